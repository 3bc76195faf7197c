"""Measures one model under every method: eager, PyTorch's ways to save memory, and irc's plans.

All modules of a model live in one process and take turns, so that the machine's moods meet all of them. Peaks
are of one step above parameters, buffers and inputs, which no method changes; gradients and the workspaces of
operations are part of them.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from torch import nn

from irc.compiler.compare import Numbers
from irc.compiler.comparison.torch_methods import Method, NotApplicableError, compiler, methods
from irc.compiler.model_source import Loaded
from irc.ir import BudgetError, IrcError, Plan, Region, first_line

from .harness import Fitter, Original, Settings, TimeRatio, broken_promises

__all__ = ["EAGER", "IRC", "TORCH", "ModelResult", "Planned", "Point", "Scope", "Times", "measure_model"]

EAGER, TORCH, IRC = "eager", "PyTorch", "irc"

_SAME_PEAK = 1e-3
"""Peaks that are closer than this share of eager's get one plan, at the smallest of them."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which points to measure.

    Args:
        families: Of PyTorch's methods (`torch_methods.FAMILIES`).
        settings: Values of `activation_memory_budget`.
        ratios: Budgets of irc as shares of eager's peak; `min` is the smallest with a known schedule.
    """

    families: tuple[str, ...]
    settings: tuple[float, ...]
    ratios: tuple[float | str, ...]


@dataclass(frozen=True)
class Times:
    """Timed steps of a module in turns with eager's.

    Args:
        cpu_seconds: Median of the processor seconds of a step, over all threads.
        wall_seconds: Median of the clock's seconds of a step.
        cpu: Processor seconds over eager's.
        wall: The clock's seconds over eager's.
    """

    cpu_seconds: float
    wall_seconds: float
    cpu: TimeRatio
    wall: TimeRatio


@dataclass(frozen=True)
class Planned:
    """What irc's plan promises.

    Args:
        peak_bytes: Predicted peak above static bytes.
        time: Predicted time over that of the step with everything kept.
        bound: No schedule within the budget takes less time, over the same.
        gap: How far the plan's time may be above the best, as a fraction of the best.
        proved: Whether the plan is proved optimal.
        strategy: What found it.
        seconds: How long planning took.
    """

    peak_bytes: int
    time: float
    bound: float
    gap: float
    proved: bool
    strategy: str
    seconds: float


@dataclass(frozen=True)
class Point:
    """One method at one setting.

    Args:
        system: `eager`, `PyTorch` or `irc`.
        name: The method and its setting.
        budget_bytes: irc's budget, above static bytes.
        peak_bytes: Measured peak of a step above static bytes; None where nothing ran.
        times: Measured times.
        numbers: The step's numbers against eager's.
        plan: irc's plan.
        build_seconds: Time until the first step was done: planning or compiling, and that step.
        refusal: Why nothing ran.
        failures: What does not hold of irc's promises.
    """

    system: str
    name: str
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    times: Times | None = None
    numbers: Numbers | None = None
    plan: Planned | None = None
    build_seconds: float | None = None
    refusal: str | None = None
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelResult:
    """All points of one model.

    Args:
        model: Its name.
        measured_at: When measuring ended, in UTC.
        load: Processes that wanted to run on the machine, on average over a minute: before and after.
        parameters: How many numbers it learns.
        static_bytes: Parameters, buffers and inputs.
        eager_bytes: Measured peak of eager's step above them.
        operations: In irc's graph, of forward and backward; None where irc did not capture it.
        capture_seconds: Time of capturing the graph.
        cost_seconds: Time of measuring the operations that the cache did not hold.
        points: Eager first, then PyTorch's methods, then irc's plans.
    """

    model: str
    measured_at: str
    load: tuple[float, float]
    parameters: int
    static_bytes: int
    eager_bytes: int
    operations: tuple[int, int] | None
    capture_seconds: float | None
    cost_seconds: float | None
    points: tuple[Point, ...]

    def of(self, system: str) -> Iterator[Point]:
        """The points of `eager`, `PyTorch` or `irc`."""
        return (point for point in self.points if point.system == system)

    def share(self, nbytes: int) -> float:
        """Bytes above the static ones as a share of eager's."""
        return nbytes / self.eager_bytes

    def within(self, peak_bytes: int) -> Point | None:
        """The plan of irc that needs no more memory and promises the least time; None where there is none."""
        fitting = [
            (point.plan.time, point.peak_bytes, index)
            for index, point in enumerate(self.points)
            if point.plan is not None and point.peak_bytes is not None and point.peak_bytes <= peak_bytes
        ]
        return self.points[min(fitting)[2]] if fitting else None


# ---------------------------------------------------------------------- one model


@dataclass(frozen=True)
class _Running:
    """A point whose module is there to be timed."""

    point: Point
    module: nn.Module | None = None


def measure_model(
    name: str,
    loaded: Loaded,
    scope: Scope,
    settings: Settings,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> ModelResult:
    """Builds every method of a model, measures peaks and numbers, then times all of them in turns.

    Args:
        name: For tables.
        loaded: The model and the arguments of a step.
        scope: What to measure.
        settings: How to measure.
        report: Told in a line what was just done.
    """
    before = os.getloadavg()[0]
    with compiler():
        original = Original(loaded.module, loaded.args, settings.seed)
        report(f"{name}: eager takes {original.step_bytes / 2**20:.1f} MiB above static bytes")
        running = [_Running(Point(EAGER, "eager", peak_bytes=original.step_bytes), original.module)]
        asked = methods(loaded.module, loaded.args, scope.families, scope.settings)
        for entry in (_measure_torch(original, method) for method in asked):
            running.append(entry)
            report(f"{name}: {_told(entry.point, original)}")
        fitter = _fitter(original, settings)
        if isinstance(fitter, Point):
            running.append(_Running(fitter))
            report(f"{name}: {_told(fitter, original)}")
        else:
            for budget in list(_budgets(scope, original, running)):
                running.append(_measure_irc(original, fitter, budget))
                report(f"{name}: {_told(running[-1].point, original)}")
        points = _timed(original, running, settings.repeats)
    report(f"{name}: timed {settings.repeats} rounds")
    captured = fitter if isinstance(fitter, Fitter) else None
    trained = (p.numel() for p in loaded.module.parameters() if p.requires_grad)
    return ModelResult(
        model=name,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        load=(before, os.getloadavg()[0]),
        parameters=sum(trained),
        static_bytes=original.static_bytes,
        eager_bytes=original.step_bytes,
        operations=captured and _operations(captured),
        capture_seconds=captured and captured.capture_seconds,
        cost_seconds=captured and captured.cost_seconds,
        points=points,
    )


def _timed(original: Original, running: Sequence[_Running], repeats: int) -> tuple[Point, ...]:
    """The points with times. Eager is timed beside itself, too: its spread is that of the machine."""
    modules = [entry.module for entry in running if entry.module is not None]
    timed = iter(original.timed(modules, repeats))
    points: list[Point] = []
    for entry in running:
        if entry.module is None:
            points.append(entry.point)
            continue
        found = next(timed)
        times = Times(
            statistics.median(step.cpu for step in found.steps),
            statistics.median(step.wall for step in found.steps),
            found.cpu,
            found.wall,
        )
        points.append(replace(entry.point, times=times))
    return tuple(points)


def _told(point: Point, original: Original) -> str:
    if point.peak_bytes is None:
        return f"{point.name}: refused: {point.refusal}"
    failed = "".join(f"; FAILED: {failure}" for failure in point.failures)
    return (
        f"{point.name}: {point.peak_bytes / original.step_bytes:.3f} of eager's peak, {point.numbers}, "
        f"{point.build_seconds:.1f} s{failed}"
    )


def _why(error: Exception) -> str:
    if isinstance(error, IrcError):
        return error.brief
    text = first_line(error)
    return text if isinstance(error, NotApplicableError) else f"{type(error).__name__}: {text}"


def _measure_torch(original: Original, method: Method) -> _Running:
    module = original.copy()
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler warns about itself
            method.apply(module)
            original.warm_up(module)
            built = time.perf_counter() - started
            numbers = original.numbers(module)
            peak_bytes = original.peak_of(module)
    except Exception as error:  # whatever PyTorch's method stumbles over is a result
        return _Running(Point(TORCH, method.name, refusal=_why(error)))
    point = Point(TORCH, method.name, peak_bytes=peak_bytes, numbers=numbers, build_seconds=built)
    return _Running(point, module)


# ---------------------------------------------------------------------- irc


def _fitter(original: Original, settings: Settings) -> Fitter | Point:
    """What plans the model; a point with the reason where irc cannot take it."""
    try:
        return Fitter(original, settings)
    except Exception as error:  # no bad row is left out
        refusal = _why(error)
        return Point(IRC, "capture", refusal=refusal, failures=(refusal,))


def _operations(fitter: Fitter) -> tuple[int, int]:
    regions = [node.region for node in fitter.program.graph.operations]
    return regions.count(Region.FORWARD), regions.count(Region.BACKWARD)


@dataclass(frozen=True, slots=True)
class _Budget:
    """A budget above static bytes; None is the smallest. `required`: PyTorch reached this peak."""

    nbytes: int | None
    name: str
    required: bool = False


def _budgets(scope: Scope, original: Original, running: Sequence[_Running]) -> Iterator[_Budget]:
    """The budgets of irc: those asked for, then each peak that PyTorch reached."""
    for ratio in scope.ratios:
        if isinstance(ratio, str):
            yield _Budget(None, "smallest budget")
        else:
            yield _Budget(math.floor(ratio * original.step_bytes), f"budget {ratio:g}")
    reached = sorted(e.point.peak_bytes for e in running if e.point.system == TORCH and e.point.peak_bytes)
    last = -math.inf
    for nbytes in reached:
        if nbytes - last > _SAME_PEAK * original.step_bytes:
            last = nbytes
            yield _Budget(nbytes, f"budget {nbytes / original.step_bytes:.3f} (PyTorch's)", required=True)


def _measure_irc(original: Original, fitter: Fitter, budget: _Budget) -> _Running:
    started = time.perf_counter()
    point = Point(IRC, budget.name, budget_bytes=budget.nbytes)
    try:
        asked = "min" if budget.nbytes is None else fitter.static_bytes + budget.nbytes
        module, plan = fitter.fit(asked)
        original.warm_up(module)
        built = time.perf_counter() - started
        numbers = original.numbers(module)
        peak_bytes = original.peak_of(module)
    except BudgetError as error:
        smallest = (error.minimum_bytes - fitter.static_bytes) / original.step_bytes
        refusal = f"the smallest budget is {smallest:.3f}"
        missed = budget.required or budget.nbytes is None
        return _Running(replace(point, refusal=refusal, failures=(refusal,) if missed else ()))
    except Exception as error:  # no bad row is left out
        refusal = _why(error)
        return _Running(replace(point, refusal=refusal, failures=(refusal,)))
    planned = _planned(plan, fitter.static_bytes)
    point = replace(
        point,
        budget_bytes=plan.budget_bytes - fitter.static_bytes,
        peak_bytes=peak_bytes,
        numbers=numbers,
        plan=planned,
        build_seconds=built,
    )
    assert point.budget_bytes is not None
    failures = broken_promises(peak_bytes, planned.peak_bytes, point.budget_bytes, numbers)
    return _Running(replace(point, failures=tuple(failures)), module)


def _planned(plan: Plan, static_bytes: int) -> Planned:
    return Planned(
        peak_bytes=plan.peak_bytes - static_bytes,
        time=1 + plan.overhead,
        bound=1 + plan.lower_bound_overhead,
        gap=plan.gap,
        proved=plan.proven_optimal,
        strategy=plan.strategy,
        seconds=plan.seconds_to_plan,
    )
