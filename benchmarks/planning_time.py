"""How long planning takes: twenty models at four budgets, each in a process of its own with an empty cache.

    python -m benchmarks.planning_time
    python -m benchmarks.planning_time --models cnn,gpt2 --budgets 60%
    python -m benchmarks.planning_time --journal times.jsonl --markdown docs/results/planning_time.md

Times are seconds of the processor, on one thread; the goals are for all of them but `import torch`. A budget
that no schedule fits is replaced by the smallest one that the refusal names. Exit status: 1 where a goal is
missed, 2 where the command is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from irc.ir import BudgetError
from irc.passes.progress import Progress

from .command import chosen, parser_of, run_command, run_row_alone, run_tasks
from .harness import hardware
from .models.images import Classifier, resnet18, resnet50, unet, vgg16
from .models.registry import ARCHITECTURES, Instance, loss_of
from .models.sequences import gpt2, lstm, t5
from .pages import to_markdown

__all__ = ["HEADER", "MODELS", "Row", "eager_seconds", "import_seconds", "main", "measure"]

_TIME_LIMIT = 60.0
_MOST_GAP = 0.01
_GOALS = ((500, 5.0), (1500, 15.0))
"""Operations, and the seconds that a plan of so many may take."""

_RETRIES = 3
"""A smallest budget may be refused in its turn: which one is found depends on the times that are measured."""

_CAPTURE_ALONE = 0.2
"""With everything kept, measuring and search may take this part of imports and capture."""

_EAGER = "eager"
"""The budget that stands for a step of the model as it is."""


# ---------------------------------------------------------------------- models


def _cnn() -> Instance:
    """The example of the README."""

    def block(channels_in: int, channels_out: int) -> nn.Module:
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())

    model = nn.Sequential(
        block(3, 64),
        *(block(64, 64) for _ in range(7)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return Instance(Classifier(model), (torch.randn(16, 3, 64, 64), torch.randint(10, (16,))))


def _mlp() -> Instance:
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    return Instance(Classifier(model), (torch.randn(1024, 256), torch.randint(10, (1024,))))


def _made(make: Callable[..., tuple[nn.Module, tuple[Any, ...]]], **sizes: int) -> Instance:
    return Instance(*make(**sizes))


def _tiny(name: str) -> Instance:
    """A small instance of a known architecture; the module that registers it is imported now."""
    from .models import architectures

    assert architectures.ARCHITECTURES is ARCHITECTURES
    return ARCHITECTURES[name]()


_TINY = ("bert", "vit", "llama", "convnext", "swin", "mlp-mixer", "efficientnet", "whisper", "mamba", "deit")

MODELS: dict[str, Callable[[], Instance]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "resnet18": partial(_made, resnet18),
    "resnet50": partial(_made, resnet50),
    "vgg16": partial(_made, vgg16),
    "unet": partial(_made, unet),
    "gpt2": partial(_made, gpt2, width=384, heads=6),
    "gpt2-24": partial(_made, gpt2, depth=24, width=256, heads=4, sequence=128),
    "t5": partial(_made, t5),
    "lstm": partial(_made, lstm),
    **{name: partial(_tiny, name) for name in _TINY},
}
"""The models by name; the last ones are the small instances of `benchmarks.architectures`."""


# ---------------------------------------------------------------------- one row


@dataclass(frozen=True)
class Row:
    """One model, planned at one budget.

    Args:
        model: The model's name.
        asked: The budget that was asked for.
        operations: Of the graph that is planned.
        share: The budget as a part of the baseline's peak.
        eager: Seconds of the processor for the first step of the model as it is.
        torch: Seconds for `import torch`.
        imports: Seconds for irc, and for the modules of torch that it imports: the tracer's above all.
        capture: Seconds for tracing, and for writing the program down.
        measuring: Seconds for rewriting the graph and measuring its operations.
        search: Seconds for choosing the schedule.
        overhead: Of the plan.
        gap: The distance from the bound, as a part of the step's time.
        minimum_bytes: The smallest budget that the refusal names; 0 if a plan was found.
    """

    model: str
    asked: str
    operations: int = 0
    share: float = 0.0
    eager: float = 0.0
    torch: float = 0.0
    imports: float = 0.0
    capture: float = 0.0
    measuring: float = 0.0
    search: float = 0.0
    overhead: float = 0.0
    gap: float = 0.0
    minimum_bytes: int = 0

    @property
    def total(self) -> float:
        """Seconds in all, for a script that has imported torch."""
        return self.imports + self.capture + self.measuring + self.search

    @property
    def goal(self) -> str:
        """What is asked of the row; empty for graphs that nothing is asked of."""
        if self.minimum_bytes:
            return "a plan"
        if self.share >= 1.0:
            return "capture alone"
        limit = next((seconds for most, seconds in _GOALS if self.operations <= most), None)
        return "" if limit is None else f"{limit:g} s, gap {_MOST_GAP:.0%}"

    @property
    def has_failed(self) -> bool:
        """Whether the goal is missed."""
        if self.minimum_bytes:
            return True
        if self.share >= 1.0:
            return self.measuring + self.search > _CAPTURE_ALONE * (self.imports + self.capture)
        limit = next((seconds for most, seconds in _GOALS if self.operations <= most), float("inf"))
        return self.total > limit or (bool(self.goal) and self.gap > _MOST_GAP)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        parts = (self.torch, self.imports, self.capture, self.measuring, self.search)
        seconds = (self.eager, *parts, self.total, self.torch + self.total)
        if self.minimum_bytes:
            return (self.model, "-", f"{self.asked}, refused", *["-"] * 10, self.goal, "missed")
        is_smallest = self.asked != f"{self.share:.0%}"
        return (
            self.model,
            str(self.operations),
            f"{self.asked}, smallest {self.share:.1%}" if is_smallest else self.asked,
            *(f"{s:.1f}" for s in seconds),
            f"{self.overhead:.2%}",
            f"{self.gap:.2%}",
            self.goal or "-",
            ("missed" if self.has_failed else "met") if self.goal else "-",
        )


HEADER = (
    "model",
    "operations",
    "budget",
    "step, s",
    "torch",
    "imports",
    "capture",
    "measuring",
    "search",
    "in all",
    "with torch",
    "overhead",
    "gap",
    "goal",
    "is",
)

_MEASURING = ("replay-draws", "split-convolutions", "cost")
"""The passes whose time is that of measuring."""


class _Stopwatch:
    """Adds up the seconds of the processor of each phase of planning, as it is told of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.operations = 0
        self._phase, self._since = "capture", time.process_time()

    def __call__(self, progress: Progress) -> None:
        self._end(progress.phase)
        self.operations = progress.operations or self.operations

    def stop(self) -> None:
        """Ends the last phase."""
        self._end("")

    def _end(self, following: str) -> None:
        now = time.process_time()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = following, now


def measure(model: str, asked: str, budget: str, make: Callable[[], Instance], time_limit: float) -> Row:
    """Plans one model, which has been imported; only the first plan of a process has all of its costs.

    Args:
        model: For the table.
        asked: For the table.
        budget: The budget, or a number of bytes.
        make: Makes the model and its batch.
        time_limit: Seconds of the processor for the search.
    """
    instance = make()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["IRC_CACHE_DIR"] = cache
        from irc import optimize

        watch = _Stopwatch()
        try:
            fitted = optimize(
                instance.module,
                instance.args,
                int(budget) if budget.isdecimal() else budget,
                example_kwargs=dict(instance.keywords),
                loss=loss_of,
                time_limit=time_limit,
                progress=watch,
            )
        except BudgetError as error:
            return Row(model, asked, minimum_bytes=error.minimum_bytes)
        watch.stop()
    plan = fitted.plan
    measuring = sum(watch.seconds.get(phase, 0.0) for phase in _MEASURING)
    everything = sum(watch.seconds.values())
    return Row(
        model,
        asked,
        watch.operations,
        plan.budget_bytes / plan.baseline_peak_bytes,
        capture=everything - measuring - plan.seconds_to_plan,
        measuring=measuring,
        search=plan.seconds_to_plan,
        overhead=plan.overhead,
        gap=plan.overhead - plan.lower_bound_overhead,
    )


def eager_seconds(make: Callable[[], Instance]) -> float:
    """Takes the time of the first training step of a model, which fills the caches of its kernels."""
    instance = make()
    started = time.process_time()
    loss_of(instance.module(*instance.args, **instance.keywords)).backward()
    return time.process_time() - started


_IMPORTS = """
import time
started = time.process_time()
import torch
imported = time.process_time()
from irc import optimize
print(imported - started, time.process_time() - imported)
"""


def import_seconds() -> tuple[float, float]:
    """Takes the times of `import torch`, and of importing `irc.optimize` after it, in another process."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], stdout=subprocess.PIPE, text=True, check=True)
    torch_seconds, irc_seconds = map(float, done.stdout.split())
    return torch_seconds, irc_seconds


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    parser = parser_of(
        "planning_time",
        "Measures how long planning takes.",
        models=None,
        budgets="100%,80%,60%,40%",
        time_limit=_TIME_LIMIT,
        threads=1,
        journal=None,
        markdown=None,
        row=None,
    )
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    if options.row is not None:
        model, asked, budget = options.row
        if asked == _EAGER:
            print(json.dumps({_EAGER: eager_seconds(MODELS[model])}))
        else:
            print(json.dumps(asdict(measure(model, asked, budget, MODELS[model], options.time_limit))))
        return 0
    names = chosen(options.models, MODELS, "model") if options.models else list(MODELS)
    budgets = options.budgets.split(",")

    @cache
    def eager(model: str) -> float:
        return run_row_alone(options, "planning_time", (model, _EAGER, _EAGER))[_EAGER]

    def row(model: str, asked: str) -> list[Row]:
        found = Row(**run_row_alone(options, "planning_time", (model, asked, asked)))
        for _ in range(_RETRIES):
            if found.minimum_bytes:
                smallest = (model, asked, str(found.minimum_bytes))
                found = Row(**run_row_alone(options, "planning_time", smallest))
        torch_seconds, irc_seconds = import_seconds()
        return [replace(found, eager=eager(model), torch=torch_seconds, imports=irc_seconds)]

    def tasks(_: object) -> Iterator[tuple[str, Callable[[], Sequence[Row]]]]:
        for model in names:
            for asked in budgets:
                yield f"{model} at {asked}", partial(row, model, asked)

    about = {"torch": torch.__version__, "time_limit": options.time_limit}
    page = partial(_page, options.command)
    rows = run_tasks(options, "irc-planning-time-2", about, Row, tasks, page)
    return int(any(row.has_failed for found in rows.values() for row in found))


_PAGE = """# How long planning takes

```
{command}
```

Each row is one plan, made in a process of its own that had measured nothing before (torch {torch},
{hardware}, one thread; other work ran beside it). Times are **seconds of the processor**:

- *step*: the first training step of the model as it is. Workspaces are measured by running operations, so
  that measuring all of them takes about as long, less what equal operations save;
- *torch*: `import torch` alone;
- *imports*: irc, and the modules of torch that it imports when `irc.optimize` is first named, most of all the
  tracer's. Modules that the model's libraries would have imported anyway are counted;
- *capture*: tracing the step, and writing the chosen program down;
- *measuring*: rewriting the graph, and measuring workspaces and times of its operations;
- *search*: choosing the schedule, to a gap of half a per cent of the step's time;
- *in all*: the sum of imports, capture, measuring and search, for a script that has imported torch;
- *with torch*: the same with `import torch`.

Budgets are parts of the baseline's peak; if no schedule fits, it is the smallest budget that the refusal
names. The goals are for *in all*: 5 s up to 500 operations and 15 s up to 1,500, with a gap of at most 1%;
at 100%, capture alone, which counts as met if measuring and search take at most a fifth of imports and
capture. {missed} of {all} rows miss their goal.

{table}"""


def _page(command: str, found: Mapping[str, Sequence[Row]]) -> str:
    rows = [row for some in found.values() for row in some]
    with_goal = [row for row in rows if row.goal]
    return _PAGE.format(
        command=command,
        torch=torch.__version__,
        hardware=hardware(),
        missed=sum(row.has_failed for row in with_goal),
        all=len(with_goal),
        table=to_markdown(HEADER, [row.cells() for row in rows]),
    )


if __name__ == "__main__":
    raise SystemExit(main())
