# `make demo` runs the main job on a real model. `make fast` runs the tests for each edit, `make test` all but the slow
# ones, `make slow` these, `make fuzz` all properties on new examples, and new modules. Each needs Python >= 3.11 alone.

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
DEMO := build/demo

# Two processes; each collects for itself, and faster if the rewritten assertions of the tests may be kept as bytecode.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses 2 --dist worksteal

.PHONY: demo fast test slow fuzz docs lint clean

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# The ResNet-50 of the onnx wheel is exported for one image and holds placeholder weights: the demo asks for
# eight images and draws the weights, plans for 60% of the baseline peak, then trains beside the original.
demo: $(READY)
	model=$$($(PYTHON) -c 'import onnx, pathlib; print(pathlib.Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx")') && \
	$(VENV)/bin/irc optimize "$$model" --batch 8 --draw-weights 0 --budget 60% -o $(DEMO) && \
	$(VENV)/bin/irc run $(DEMO) --steps 3 --check

fast: $(READY)
	$(PYTEST) -m fast

test: $(READY)
	$(PYTEST) -m 'not slow'

slow: $(READY)
	$(PYTEST) -m slow

fuzz: $(READY)
	IRC_FUZZ=10 $(PYTEST) -m hypothesis --override-ini most_cpu_seconds=inf
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.module_fuzz

# The site, into build/docs; tutorials run meanwhile. A warning is an error.
$(VENV)/.docs: $(READY)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(VENV)/bin/sphinx-build -W --keep-going -q -b html docs build/docs

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

clean:
	rm -rf $(VENV) build dist
