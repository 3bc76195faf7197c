"""Measures plans on models: bytes and time against what was predicted, numbers against the original.

    python -m irc.tools.measure_plans --models resnet50,gpt2 --budgets 100%,75%,min --json plans.json
    python -m irc.tools.measure_plans --onnx

Each row plans one budget, and runs the original and the fitted module side by side from the same weights
and the same state of the random generator. Exit status 1: a measured peak is over the predicted one, a
predicted one over the budget, a smallest budget was refused, or numbers differ beyond the tolerance.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..backends.torch import compile_program, fit
from ..frontends.torch import Captured, capture
from ..ir import BudgetError, IrcError, Plan, UsageError
from ..passes import PassManager, Program, SelectCheckpoints, minimum_budget
from .loading import Loaded, Source, load, training_loss
from .optimize import cost_pass
from .training import measured_peak_bytes

__all__ = [
    "TOLERANCE",
    "Bench",
    "Numbers",
    "Row",
    "Settings",
    "TimeRatio",
    "compare_step",
    "interleave",
    "load_named",
    "main",
    "measure_model",
    "measure_onnx",
    "step_of",
    "threads",
    "to_markdown",
    "write_outputs",
]

TOLERANCE = 1e-5
"""How far numbers may be off, as a share of the largest of their kind (outputs, gradients, buffers)."""

_ONNX_TOLERANCE = 1e-3
_MODELS = "resnet50,unet,gpt2,densenet121,lstm"
_BUDGETS = "100%,90%,75%,60%,min"
_ONNX_BUDGET = "70%"
_BATCHES = "4"
_NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Args:
        time_limit: Seconds for the search of each schedule.
        repeats: Interleaved steps of each module that are timed.
        seed: Of the weights drawn for ONNX files, and of the generator before each compared step.
        profile: As in `irc.optimize`.
    """

    time_limit: float = 60.0
    repeats: int = 5
    seed: int = 0
    profile: bool | str | None = True


# ---------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class Numbers:
    """One step of two modules from the same state: the largest differences and the scale of what differs.

    Args:
        outputs: Largest difference of an output's element; infinite where one is NaN and the other is not.
        gradients: The same for gradients.
        buffers: The same for buffers after the step.
        output_scale: Largest element of an output of the original.
        gradient_scale: Largest element of a gradient of the original.
        buffer_scale: Largest element of a buffer of the original.
        bit_equal: Whether outputs, gradients and buffers are equal bit for bit.
        same_gradients: Whether the same parameters have gradients.
        same_generator: Whether the random generator is in the same state after the step.
    """

    outputs: float
    gradients: float
    buffers: float
    output_scale: float
    gradient_scale: float
    buffer_scale: float
    bit_equal: bool
    same_gradients: bool
    same_generator: bool

    @property
    def agrees(self) -> bool:
        """Whether all is the same up to `TOLERANCE`, and the generator's state exactly."""
        close = (
            self.outputs <= TOLERANCE * self.output_scale
            and self.gradients <= TOLERANCE * self.gradient_scale
            and self.buffers <= TOLERANCE * self.buffer_scale
        )
        return self.same_gradients and self.same_generator and (close or self.bit_equal)

    def __str__(self) -> str:
        if not self.same_gradients:
            return "other gradients are None"
        if self.bit_equal:
            return "bit-equal"
        parts = (
            ("outputs", self.outputs, self.output_scale),
            ("gradients", self.gradients, self.gradient_scale),
            ("buffers", self.buffers, self.buffer_scale),
        )
        return (
            ", ".join(f"{name} {off:.2g} of {scale:.2g}" for name, off, scale in parts if off)
            or "signs of zeros"
        )


@dataclass(frozen=True)
class _Outcome:
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor


def compare_step(original: nn.Module, other: nn.Module, args: Sequence[Any], seed: int = 0) -> Numbers:
    """One forward and backward of both, and how far they are apart.

    Buffers, gradients and the generator's state are as before afterwards.

    Args:
        original: The reference.
        other: A module with equal weights and buffers under the same names.
        args: Arguments of the step.
        seed: Of the generator before each of the two steps.
    """
    expected, found = _outcome(original, args, seed), _outcome(other, args, seed)
    names = {name for name, gradient in expected.gradients.items() if gradient is not None}
    others = {name for name, gradient in found.gradients.items() if gradient is not None}
    both = sorted(names & others)
    pairs = (
        list(zip(expected.outputs, found.outputs, strict=True)),
        [(_present(expected.gradients[n]), _present(found.gradients[n])) for n in both],
        [(value, found.buffers[name]) for name, value in expected.buffers.items()],
    )
    differences = [max((_difference(a, b) for a, b in kind), default=0.0) for kind in pairs]
    scales = [max((_largest(a) for a, _ in kind), default=0.0) for kind in pairs]
    return Numbers(
        *differences,
        *scales,
        bit_equal=all(_same_bits(a, b) for kind in pairs for a, b in kind),
        same_gradients=names == others,
        same_generator=torch.equal(expected.generator, found.generator),
    )


def _outcome(module: nn.Module, args: Sequence[Any], seed: int) -> _Outcome:
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = module(*args)
        training_loss(result).backward()
        generator = torch.get_rng_state()
    outputs = [leaf.detach().clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    after = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
    return _Outcome(outputs, gradients, after, generator)


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


def _difference(a: Tensor, b: Tensor) -> float:
    if _same_bits(a, b):
        return 0.0
    if a.shape != b.shape:
        return float("inf")
    largest = _largest(a.double() - b.double())
    return float("inf") if largest != largest else largest


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


# ---------------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class TimeRatio:
    """How long a step takes against the original's.

    Args:
        best: Shortest step over the original's shortest.
        median: Median over rounds of the two steps of that round.
        low: The smallest of the rounds.
        high: The largest.
    """

    best: float
    median: float
    low: float
    high: float

    @staticmethod
    def of(seconds: Sequence[float], original: Sequence[float]) -> TimeRatio:
        """The ratio for steps that took turns."""
        rounds = [a / b for a, b in zip(seconds, original, strict=True)]
        return TimeRatio(min(seconds) / min(original), statistics.median(rounds), min(rounds), max(rounds))

    def __str__(self) -> str:
        return f"{self.best:.3f} ({self.low:.3f} to {self.high:.3f})"


def interleave(steps: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each step, run in turns; another one begins in each round.

    They are seconds of the processor where one thread computes, else of the clock.

    Args:
        steps: What to time, warmed up.
        repeats: Rounds.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats):
        for place in range(len(steps)):
            index = (turn + place) % len(steps)
            start = clock()
            steps[index]()
            seconds[index].append(clock() - start)
    return seconds


def step_of(module: nn.Module, args: Sequence[Any]) -> Callable[[], None]:
    """Forward, loss and backward, from no gradients."""

    def run() -> None:
        module.zero_grad(set_to_none=True)
        training_loss(module(*args)).backward()

    return run


# ---------------------------------------------------------------------- one model


class Bench:
    """A model, a copy of it that plans are fitted to, and what is the same for all budgets.

    Args:
        module: The original; it is left as it is, but for its buffers after timed steps.
        args: Arguments of a step.
        settings: How to measure.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], settings: Settings) -> None:
        self.original = module
        self.copy = copy.deepcopy(module)
        self.args = tuple(args)
        self.settings = settings
        started = time.perf_counter()
        self.captured: Captured = capture(self.copy, self.args, loss=training_loss)
        captured = time.perf_counter()
        self.program = PassManager([cost_pass(settings.profile)]).run(Program(self.captured.graph))
        self.capture_seconds = captured - started
        self.cost_seconds = time.perf_counter() - captured
        self.static_bytes = self.captured.graph.static_bytes
        trained = (p for p in self.original.parameters() if p.requires_grad)
        self.held_bytes = self.static_bytes + sum(p.nbytes for p in trained)
        step_of(self.original, self.args)()
        self.original_bytes = self.measured_bytes(self.original)
        self.smallest_bytes: int | None = None

    def fit(self, budget: int | str) -> tuple[nn.Module, Plan]:
        """The copy fitted to a budget, and the plan.

        Args:
            budget: As in `irc.optimize`, or `min`, the smallest that a plan of this bench named.

        Raises:
            IrcError: What planning raises.
        """
        if budget == "min":
            budget = self.smallest_bytes or minimum_budget(self.program)[0]
        select = SelectCheckpoints(budget=budget, time_limit=self.settings.time_limit)
        program = PassManager([select]).run(self.program)
        plan = program.plan
        assert program.schedule is not None and plan is not None
        self.smallest_bytes = min(self.smallest_bytes or plan.minimum_budget_bytes, plan.minimum_budget_bytes)
        compiled = compile_program(program.schedule, self.captured.constants)
        return fit(self.copy, compiled, self.captured.signature, plan), plan

    def measured_bytes(self, module: nn.Module) -> int:
        """The peak of a warmed-up step from allocator events, static bytes included."""
        return measured_peak_bytes(module, self.args, self.static_bytes)

    def numbers(self, module: nn.Module) -> Numbers:
        """A step of `module` against one of the original."""
        self._align(module)
        return compare_step(self.original, module, self.args, self.settings.seed)

    def seconds(self, *modules: nn.Module) -> list[list[float]]:
        """Seconds of interleaved steps: the original's first, then those of `modules`."""
        with torch.random.fork_rng(devices=[]):
            steps = [step_of(module, self.args) for module in (self.original, *modules)]
            found = interleave(steps, self.settings.repeats)
        for module in (self.original, *modules):
            module.zero_grad(set_to_none=True)
        return found

    def _align(self, module: nn.Module) -> None:
        """Puts the original's buffers into `module`: timed steps move running statistics."""
        buffers = dict(self.original.named_buffers())
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])


@dataclass(frozen=True)
class Row:
    """One model at one budget.

    Args:
        model: Its name.
        asked: The budget in words.
        refusal: Why there is no plan; then what follows is None.
        minimum_bytes: The smallest budget that a schedule was found for.
        budget_bytes: The budget.
        predicted_bytes: The plan's peak.
        measured_bytes: The fitted module's peak from allocator events, static bytes included.
        baseline_bytes: The predicted peak of the original.
        original_bytes: Its measured peak.
        static_bytes: Parameters, buffers and inputs.
        predicted_time: Predicted time over the original's.
        time: Measured time over the original's.
        numbers: Outputs, gradients and buffers against the original's.
        bound: Lower bound of the overhead.
        gap: Of the plan's time to the best possible, as a fraction.
        proved: Whether the plan is proved optimal.
        strategy: What found the schedule.
        seconds: Of capturing the graph, costs and planning.
        notes: What else was seen.
        failures: What does not hold.
    """

    model: str
    asked: str
    refusal: str | None = None
    minimum_bytes: int | None = None
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    baseline_bytes: int | None = None
    original_bytes: int | None = None
    static_bytes: int | None = None
    predicted_time: float | None = None
    time: TimeRatio | None = None
    numbers: Numbers | None = None
    bound: float | None = None
    gap: float | None = None
    proved: bool | None = None
    strategy: str | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        if self.predicted_bytes is None or self.measured_bytes is None or self.original_bytes is None:
            remarks = [f"refused: {self.refusal}", *self._remarks()]
            return (self.model, self.asked, *["-"] * 10, _seconds(self.seconds), "; ".join(remarks))
        assert self.numbers is not None and self.time is not None
        proof = "proved" if self.proved else f"gap {self.gap or 0:.2%}"
        return (
            self.model,
            self.asked,
            _mib(self.budget_bytes),
            _mib(self.predicted_bytes),
            _mib(self.measured_bytes),
            f"{self.predicted_bytes / self.measured_bytes - 1:+.3%}",
            f"{_mib(self.original_bytes)} ({self.measured_bytes / self.original_bytes:.3f})",
            f"{self.predicted_time:.4f}",
            str(self.time),
            f"{1 + (self.bound or 0):.4f} ({proof}, {self.strategy})",
            str(self.numbers),
            "same" if self.numbers.same_generator else "OTHER",
            _seconds(self.seconds),
            "; ".join(self._remarks()) or "ok",
        )

    def _remarks(self) -> list[str]:
        return [*(f"FAILED: {failure}" for failure in self.failures), *self.notes]


_HEADER = (
    "model",
    "asked",
    "budget MiB",
    "predicted MiB",
    "measured MiB",
    "predicted/measured",
    "original MiB (ratio)",
    "predicted time",
    "measured time (rounds)",
    "time bound",
    "numbers",
    "generator",
    "capture/cost/plan s",
    "result",
)


def measure_model(name: str, loaded: Loaded, budgets: Iterable[str], settings: Settings) -> Iterator[Row]:
    """One row for each budget, as it is measured.

    Args:
        name: For the table.
        loaded: The model and the arguments of a step.
        budgets: Texts as `75%`, `4GiB`, or `min`.
        settings: How to measure.
    """
    try:
        bench = Bench(loaded.module, loaded.args, settings)
    except IrcError as error:
        yield Row(name, "", refusal=_first_line(error), failures=(_first_line(error),))
        return
    for asked in budgets:
        yield _measure(name, asked, bench)


def _measure(name: str, asked: str, bench: Bench) -> Row:
    started = time.perf_counter()
    try:
        fitted, plan = bench.fit(asked)
    except BudgetError as error:
        failures = ("the smallest budget of an earlier plan was refused",) if asked == "min" else ()
        seconds = _spent(bench, time.perf_counter() - started)
        return Row(
            model=name,
            asked=asked,
            refusal=f"the smallest budget is {_mib(error.minimum_bytes)} MiB, "
            f"{_mib(bench.held_bytes)} MiB of it parameters, buffers, inputs and gradients",
            minimum_bytes=error.minimum_bytes,
            original_bytes=bench.original_bytes,
            static_bytes=bench.static_bytes,
            seconds=seconds,
            failures=failures,
        )
    except UsageError:
        raise
    except IrcError as error:
        return Row(name, asked, _first_line(error), failures=(_first_line(error),))
    planned = time.perf_counter() - started
    numbers = bench.numbers(fitted)
    measured = bench.measured_bytes(fitted)
    of_original, of_fitted = bench.seconds(fitted)
    row = Row(
        model=name,
        asked=asked,
        minimum_bytes=plan.minimum_budget_bytes,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=measured,
        baseline_bytes=plan.baseline_peak_bytes,
        original_bytes=bench.original_bytes,
        static_bytes=bench.static_bytes,
        predicted_time=1 + plan.overhead,
        time=TimeRatio.of(of_fitted, of_original),
        numbers=numbers,
        bound=plan.lower_bound_overhead,
        gap=plan.gap,
        proved=plan.proven_optimal,
        strategy=plan.strategy,
        seconds=_spent(bench, planned),
    )
    slower = plan.overhead == 0 and min(row.time.best, row.time.median) > 1 + _NOISE if row.time else False
    notes = ("slower than the original, though nothing is computed twice",) if slower else ()
    return replace(row, notes=notes, failures=_failures(row, plan, numbers))


def _failures(row: Row, plan: Plan, numbers: Numbers) -> tuple[str, ...]:
    assert row.measured_bytes is not None and row.original_bytes is not None
    found: list[str] = []
    if row.measured_bytes > plan.peak_bytes:
        found.append(f"measured {row.measured_bytes} > predicted {plan.peak_bytes} bytes")
    if plan.peak_bytes > plan.budget_bytes:
        found.append(f"predicted {plan.peak_bytes} > budget {plan.budget_bytes} bytes")
    if row.measured_bytes > row.original_bytes:
        found.append(f"measured {row.measured_bytes} > original {row.original_bytes} bytes")
    if not numbers.agrees:
        found.append("generator differs" if not numbers.same_generator else f"numbers differ: {numbers}")
    return tuple(found)


def _spent(bench: Bench, planned: float) -> dict[str, float]:
    return {"capture": bench.capture_seconds, "cost": bench.cost_seconds, "plan": planned}


def _first_line(error: IrcError) -> str:
    return f"{error.code} {error.message.splitlines()[0]}"


# ---------------------------------------------------------------------- ONNX


def measure_onnx(path: Path, batches: Sequence[int], settings: Settings) -> Iterator[Row]:
    """An ONNX file with drawn weights at 70% of the baseline; with larger batches until that fits.

    Args:
        path: The file.
        batches: Batch sizes to try after the file's own, until one fits.
        settings: How to measure.
    """
    for batch in (None, *batches):
        refused = False
        for row in _measure_onnx(path, batch, settings):
            refused |= row.refusal is not None
            yield row
        if not refused:
            return


def _measure_onnx(path: Path, batch: int | None, settings: Settings) -> Iterator[Row]:
    name = path.stem.removeprefix("light_") + (f" batch {batch}" if batch else "")
    try:
        loaded = load(Source(str(path), batch=batch, seed=settings.seed))
    except UsageError as error:
        if batch is None:
            raise
        yield Row(name, _ONNX_BUDGET, refusal=_first_line(error))
        return
    except IrcError as error:
        yield Row(name, _ONNX_BUDGET, refusal=_first_line(error), failures=(_first_line(error),))
        return
    notes, failures = _against_onnxruntime(path, loaded) if batch is None else ((), ())
    more, missing = _gradients(loaded)
    for row in measure_model(name, loaded, (_ONNX_BUDGET,), settings):
        yield replace(row, notes=(*row.notes, *notes, *more), failures=(*row.failures, *failures, *missing))


def _gradients(loaded: Loaded) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A note on the gradients of one step, and a failure where a parameter has none."""
    before = [buffer.clone() for buffer in loaded.module.buffers()]
    with torch.random.fork_rng(devices=[]):
        step_of(loaded.module, loaded.args)()
    gradients = {name: parameter.grad for name, parameter in loaded.module.named_parameters()}
    loaded.module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(loaded.module.buffers(), before, strict=True):
            buffer.copy_(value)
    missing = [name for name, gradient in gradients.items() if gradient is None]
    unusable = [name for name, g in gradients.items() if g is not None and not bool(g.isfinite().all())]
    zero = sum(1 for g in gradients.values() if g is not None and not g.any())
    note = f"{len(gradients) - len(missing)} of {len(gradients)} parameters have gradients"
    failures = [f"no gradient for {missing[0]} ({len(missing)} in all)"] if missing else []
    failures += [f"gradient of {unusable[0]} is not finite ({len(unusable)} in all)"] if unusable else []
    return (note + (f", {zero} of them zero" if zero else ""),), tuple(failures)


def _against_onnxruntime(path: Path, loaded: Loaded) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How far the module's outputs in eval mode are from those of onnxruntime with the same weights."""
    modes = {child: child.training for child in loaded.module.modules()}
    with torch.no_grad():
        result = loaded.module.eval()(*loaded.args)
    for child, mode in modes.items():
        child.training = mode
    actual = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    expected = _run_onnxruntime(path, loaded)
    off = max(_difference(b.double(), a.double()) for a, b in zip(actual, expected, strict=True))
    close = all(
        torch.allclose(a.double(), b.double(), rtol=_ONNX_TOLERANCE, atol=_ONNX_TOLERANCE)
        for a, b in zip(actual, expected, strict=True)
    )
    largest = max(_largest(tensor) for tensor in expected)
    text = f"onnxruntime's outputs off by {off:.2g} of {largest:.2g}"
    return ((text,), ()) if close else ((), (text,))


def _run_onnxruntime(path: Path, loaded: Loaded) -> list[Tensor]:
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    from ..frontends.onnx import OnnxModule

    module = loaded.module
    assert isinstance(module, OnnxModule)
    model = onnx.load(str(path))
    graph = model.graph
    weights = {module.onnx_names[key]: p.detach() for key, p in module.named_parameters()}
    nodes = [node for node in graph.node if not weights.keys() & set(node.output)]
    old = [tensor for tensor in graph.initializer if tensor.name not in weights]
    new = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in weights.items()]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend([*old, *new])
    model.ir_version = max(model.ir_version, 4)  # from 4 on, weights need not be inputs
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [name for name, _, _ in module.input_specs]
    feed = {name: value.numpy() for name, value in zip(names, loaded.args, strict=True)}
    results: list[Any] = list(session.run(None, feed))
    return [torch.as_tensor(array) for array in results]


def _light_folder() -> Path:
    import onnx

    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


# ---------------------------------------------------------------------- text


def to_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns, as Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write_outputs(options: argparse.Namespace, text: str, rows: Sequence[Any], about: dict[str, Any]) -> None:
    """Prints a table, and writes it and its rows where the options say.

    Args:
        options: With `markdown` and `json`, each a path or None.
        text: The table and what explains it.
        rows: Dataclasses.
        about: How they were measured.
    """
    print(text, flush=True)
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    if options.json is not None:
        data = {"torch": torch.__version__, **about, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.2f}"


def _seconds(spent: dict[str, float]) -> str:
    return "/".join(f"{seconds:.1f}" for seconds in spent.values()) or "-"


# ---------------------------------------------------------------------- the command


@contextmanager
def threads(count: int) -> Generator[None]:
    """Computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_named(name: str) -> Loaded:
    """A benchmark model by its name, or what `irc optimize` calls MODEL.

    Raises:
        UsageError: There is no such model.
    """
    place = name if ":" in name or name.endswith(".onnx") else f"irc.tools.models:{name}"
    return load(Source(place))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler would write to the terminal
    options = _parser().parse_args(argv)
    settings = Settings(options.time_limit, options.repeats, options.seed, options.profile)
    rows: list[Row] = []
    try:
        with threads(options.threads):
            for row in _rows(options, settings):
                rows.append(row)
                print("  ".join(row.cells()), file=sys.stderr, flush=True)
    except IrcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    failed = [row for row in rows if row.failures]
    text = "\n".join(
        [
            to_markdown(_HEADER, [row.cells() for row in rows]),
            "",
            f"{options.threads} threads, best of {options.repeats} interleaved steps, "
            f"{options.time_limit:g} s for each search. Peaks are of one step, parameters, buffers and "
            f"inputs included. Numbers fail where they differ by more than {TOLERANCE:g} of the largest of "
            f"their kind. {len(failed)} of {len(rows)} rows failed.",
        ]
    )
    about = {"threads": options.threads, "repeats": options.repeats, "time_limit": options.time_limit}
    write_outputs(options, text, rows, {**about, "tolerance": TOLERANCE})
    return 1 if failed else 0


def _rows(options: argparse.Namespace, settings: Settings) -> Iterator[Row]:
    if options.onnx is not None:
        folder = Path(options.onnx) if options.onnx else _light_folder()
        paths = sorted(folder.glob("*.onnx"))
        if options.models is not None:
            wanted = {name.removeprefix("light_") for name in options.models.split(",")}
            paths = [path for path in paths if path.stem.removeprefix("light_") in wanted]
        if not all(batch.isdigit() for batch in options.batches.split(",")):
            raise UsageError("IRC400", f"--batches {options.batches!r}", help="give numbers, as 4,16")
        batches = [int(batch) for batch in options.batches.split(",")]
        if not paths:
            raise UsageError(
                "IRC420", f"no such ONNX models in {folder}", help="name a folder with .onnx files"
            )
        for path in paths:
            yield from measure_onnx(path, batches, settings)
        return
    for name in (options.models or _MODELS).split(","):
        yield from measure_model(
            name.rpartition(":")[2], load_named(name), options.budgets.split(","), settings
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m irc.tools.measure_plans", description="Measures plans on models."
    )
    parser.add_argument("--models", metavar="A,B", help=f"names or package.module:factory ({_MODELS})")
    parser.add_argument("--budgets", default=_BUDGETS, metavar="A,B", help=f"({_BUDGETS.replace('%', '%%')})")
    parser.add_argument(
        "--onnx",
        nargs="?",
        const="",
        metavar="DIR",
        help="measure the ONNX files of DIR, or those inside onnx",
    )
    parser.add_argument(
        "--batches",
        default=_BATCHES,
        metavar="A,B",
        help=f"of an ONNX file, until the budget fits ({_BATCHES})",
    )
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for each search (60)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed steps of each module (5)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="that compute (1)")
    parser.add_argument("--seed", type=int, default=0, help="of drawn weights and of the generator (0)")
    parser.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, default=True, help="measure operations"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
