"""Measures training steps beside the original's: bytes from the allocator, seconds in turns, and plans.

An `Original` is what everything is held against; a `Fitter` fits copies of it to budgets. Peaks are the
allocator's own events, so no dispatch mode is active (under one, code that torch compiled falls back to eager
without a word).
"""

from __future__ import annotations

import copy
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from irc.backends.torch import bind_program, compile_program
from irc.compiler.compare import Numbers
from irc.compiler.model_source import Loaded, load, training_loss
from irc.compiler.request import cost_passes
from irc.compiler.source import Source
from irc.compiler.training import compare_step, measured_peak_bytes
from irc.frontends.torch import Captured, capture
from irc.ir import BudgetError, Graph, Plan, TimeLimitError, UsageError, format_bytes
from irc.passes import PassManager, PlanMemory, Planner, Program
from irc.torch_support.allocated import allocated_bytes

from . import models

__all__ = [
    "FittedShare",
    "Fitter",
    "Original",
    "Settings",
    "StepTime",
    "TimeRatio",
    "Timed",
    "broken_promises",
    "fit_share",
    "hardware",
    "interleave",
    "load_named",
    "model_source",
    "step_of",
    "threads",
]

_NEIGHBOURS = 4
_PATIENCE = 30


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Args:
        time_limit: Seconds for the search of each schedule.
        repeats: Interleaved steps of each module that are timed.
        seed: Of the weights drawn for ONNX files, and of the generator before each compared step.
        costs: As in `irc.optimize`.
    """

    time_limit: float = 60.0
    repeats: int = 5
    seed: int = 0
    costs: str = "thorough"


# ---------------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long one step took.

    Args:
        cpu: Seconds of the processor, over all threads.
        wall: Seconds of the clock.
    """

    cpu: float
    wall: float


@dataclass(frozen=True, slots=True)
class TimeRatio:
    """How long a step takes against the original's, over rounds in which they took turns.

    Args:
        best: Shortest step over the shortest of the original's beside it.
        median: Median over rounds of the ratio within the round.
        low: The smallest of the rounds.
        lower: Their lower quartile.
        upper: Their upper quartile.
        high: The largest.
    """

    best: float
    median: float
    low: float
    lower: float
    upper: float
    high: float

    @staticmethod
    def of(seconds: Sequence[float], original: Sequence[float]) -> TimeRatio:
        """The ratio for steps that took turns."""
        rounds = [a / b for a, b in zip(seconds, original, strict=True)]
        twice = rounds if len(rounds) > 1 else rounds * 2
        lower, median, upper = statistics.quantiles(twice, n=4, method="inclusive")
        return TimeRatio(min(seconds) / min(original), median, min(rounds), lower, upper, max(rounds))

    def __str__(self) -> str:
        return f"{self.best:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Timed:
    """The timed steps of one module, each with those of the original around it.

    Args:
        steps: One for each round.
        beside: For each of them, the mean of the original's steps before and after it.
    """

    steps: tuple[StepTime, ...]
    beside: tuple[StepTime, ...]

    @property
    def cpu(self) -> TimeRatio:
        """Processor seconds over the original's."""
        return TimeRatio.of([s.cpu for s in self.steps], [s.cpu for s in self.beside])

    @property
    def wall(self) -> TimeRatio:
        """Seconds of the clock over the original's."""
        return TimeRatio.of([s.wall for s in self.steps], [s.wall for s in self.beside])

    @property
    def ratio(self) -> TimeRatio:
        """`cpu` where one thread computes, which neighbours on the machine disturb least; else `wall`.

        It is `wall` too where a GPU is in use, which computes while the processor waits.
        """
        return self.cpu if torch.get_num_threads() == 1 and not torch.cuda.is_initialized() else self.wall


def interleave(
    original: Callable[[], Any], steps: Sequence[Callable[[], Any]], repeats: int
) -> tuple[Timed, ...]:
    """Times steps in turns with the original's.

    In each round every step runs once, in an order of its own, and the original runs between every four
    of them. So a change of the machine's speed meets both, and no step has the same neighbours twice.

    Args:
        original: What they are held against, warmed up.
        steps: What to time, warmed up.
        repeats: Rounds.
    """
    own: list[list[StepTime]] = [[] for _ in steps]
    beside: list[list[StepTime]] = [[] for _ in steps]
    order = list(range(len(steps)))
    drawn = random.Random(0)
    for _ in range(repeats):
        drawn.shuffle(order)
        before = _timed(original)
        for start in range(0, len(order), _NEIGHBOURS):
            group = order[start : start + _NEIGHBOURS]
            for index in group:
                own[index].append(_timed(steps[index]))
            after = _timed(original)
            reference = StepTime((before.cpu + after.cpu) / 2, (before.wall + after.wall) / 2)
            for index in group:
                beside[index].append(reference)
            before = after
    return tuple(Timed(tuple(a), tuple(b)) for a, b in zip(own, beside, strict=True))


def _timed(step: Callable[[], Any]) -> StepTime:
    _finish()
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    _finish()
    return StepTime(time.process_time() - cpu, time.perf_counter() - wall)


def _finish() -> None:
    """Waits for a GPU that is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def step_of(module: nn.Module, args: Sequence[Any]) -> Callable[[], None]:
    """Forward, loss and backward, from no gradients."""

    def run() -> None:
        module.zero_grad(set_to_none=True)
        training_loss(module(*args)).backward()

    return run


@contextmanager
def threads(count: int) -> Generator[None]:
    """Computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hardware() -> str:
    """Processor, cores that this process may use, memory and operating system."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        processor = next((value.strip() for key, _, value in lines if key.strip() == "model name"), processor)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{processor}, {usable} cores, {format_bytes(memory)}, {platform.system()} {platform.release()}"


# ---------------------------------------------------------------------- the original


class Original:
    """A module as it is, and how others are held against it.

    Args:
        module: The original; it is left as it is, but for its buffers after steps.
        args: Arguments of a step.
        seed: Of the generator before each compared step.

    Attributes:
        static_bytes: Parameters, buffers and inputs.
        step_bytes: Measured peak of a step above them.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], seed: int = 0) -> None:
        self.module = module
        self.args = tuple(args)
        self.seed = seed
        self.static_bytes = _static_bytes(module, self.args)
        self.warm_up(module)
        self.step_bytes = self.peak_of(module)

    def copy(self) -> nn.Module:
        """A copy with the same parameters, the tensors themselves, and buffers of its own."""
        return copy.deepcopy(self.module, {id(p): p for p in self.module.parameters()})

    def warm_up(self, module: nn.Module) -> None:
        """One step, in which kernels choose their workspaces; the generator is left as it was."""
        with torch.random.fork_rng():
            step_of(module, self.args)()
        module.zero_grad(set_to_none=True)

    def peak_of(self, module: nn.Module) -> int:
        """The peak of a warmed-up step from allocator events, above what exists before it, in bytes."""
        return measured_peak_bytes(module, self.args, 0)

    def numbers(self, module: nn.Module) -> Numbers:
        """A step of `module` against one of the original, from the original's buffers."""
        buffers = dict(self.module.named_buffers())
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        return compare_step(self.module, module, self.args, self.seed)

    def timed(self, modules: Sequence[nn.Module], repeats: int) -> tuple[Timed, ...]:
        """Steps of warmed-up modules in turns with the original's."""
        with torch.random.fork_rng():
            steps = [step_of(module, self.args) for module in modules]
            found = interleave(step_of(self.module, self.args), steps, repeats)
        for module in (self.module, *modules):
            module.zero_grad(set_to_none=True)
        return found


def _static_bytes(module: nn.Module, args: Sequence[Any]) -> int:
    """Bytes of parameters, buffers and tensors in the arguments, each storage once."""
    leaves = [leaf for leaf in pytree.tree_leaves(tuple(args)) if isinstance(leaf, Tensor)]
    tensors = [*module.parameters(), *module.buffers(), *leaves]
    storages = {tensor.untyped_storage().data_ptr(): allocated_bytes(tensor) for tensor in tensors}
    return sum(storages.values())


# ---------------------------------------------------------------------- plans


class Fitter:
    """A captured copy of an original, which plans are fitted to.

    Args:
        original: What to plan for.
        settings: How to measure and search.

    Attributes:
        static_bytes: What plans count as existing before a step: parameters, buffers, inputs, constants.
        held_bytes: The same with all gradients of parameters.
        capture_seconds: Time of capturing the graph.
        cost_seconds: Time of measuring the operations that no earlier run has measured.

    Raises:
        IrcError: What capturing and measuring costs raise.
    """

    def __init__(self, original: Original, settings: Settings) -> None:
        self.copy = original.copy()
        self.settings = settings
        started = time.perf_counter()
        self.captured: Captured = capture(self.copy, original.args, loss=training_loss)
        captured = time.perf_counter()
        self.program = PassManager(cost_passes(settings.costs)).run(Program(self.captured.graph))
        self.capture_seconds = captured - started
        self.cost_seconds = time.perf_counter() - captured
        trained = (p for p in original.module.parameters() if p.requires_grad)
        self.static_bytes = self.program.graph.static_bytes
        self.held_bytes = self.static_bytes + sum(p.nbytes for p in trained)
        self.planner = Planner(self.program)

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that a schedule was found for."""
        return self.planner.minimum_bytes(is_thorough=True)

    def fit(self, budget: int | str, strategy: str = "auto") -> tuple[nn.Module, Plan]:
        """The copy fitted to a budget, and the plan. Modules fitted earlier stay usable.

        Args:
            budget: As in `irc.optimize`, or `min`, the smallest.
            strategy: As in `irc.optimize`.

        Raises:
            IrcError: What planning raises.
        """
        asked = self.smallest_bytes if budget == "min" else budget
        select = PlanMemory(budget=asked, strategy=strategy, time_limit=self.settings.time_limit)
        program = select.choose(self.planner)
        plan = program.plan
        assert program.schedule is not None and plan is not None
        compiled = compile_program(program.schedule, self.captured.constants)
        return bind_program(self.copy, compiled, self.captured.signature, plan), plan


@dataclass(frozen=True)
class FittedShare:
    """A module that is fitted to a share of its baseline's peak.

    Args:
        module: The fitted module.
        plan: Its plan.
        graph: Of the step.
        baseline_bytes: The baseline's peak.
        share: The budget over the baseline's peak: what was asked for, or the smallest that fits.
        is_smallest: Whether what was asked for does not fit.
    """

    module: nn.Module
    plan: Plan
    graph: Graph
    baseline_bytes: int
    share: float
    is_smallest: bool


def fit_share(
    module: nn.Module,
    args: Sequence[Any],
    loss: Callable[[Any], Tensor],
    share: float,
    time_limit: float,
    *,
    keywords: Mapping[str, Any] | None = None,
    specialize_branches: bool = False,
) -> FittedShare:
    """Fits a module to a share of its baseline's peak, or to the smallest budget if that share does not fit.

    Costs are estimates.

    Args:
        module: What is fitted.
        args: Arguments of a step.
        loss: A function from the result to a scalar.
        share: Of the baseline's peak.
        time_limit: Seconds for the search; a search that ends without a schedule has 30 times as many.
        keywords: Keyword arguments of a step.
        specialize_branches: As in `irc.optimize`.

    Raises:
        IrcError: What capturing and planning raise.
    """
    captured = capture(
        module,
        tuple(args),
        keywords or {},
        loss=loss,
        specialize_branches=specialize_branches,
        with_eager=True,
    )
    program = Program(captured.graph, eager=captured.eager)
    planner = Planner(PassManager(cost_passes("measured")).run(program))
    budget, is_smallest = int(share * planner.baseline_bytes), False
    try:
        program = _chosen_schedule(planner, budget, time_limit)
    except BudgetError:
        budget, is_smallest = planner.minimum_bytes(is_thorough=True), True
        program = _chosen_schedule(planner, budget, time_limit)
    plan = program.plan
    assert program.schedule is not None and plan is not None
    fitted = bind_program(
        module, compile_program(program.schedule, captured.constants), captured.signature, plan
    )
    baseline = planner.baseline_bytes
    return FittedShare(fitted, plan, captured.graph, baseline, budget / baseline, is_smallest)


def _chosen_schedule(planner: Planner, budget: int, time_limit: float) -> Program:
    try:
        return PlanMemory(budget=budget, time_limit=time_limit).choose(planner)
    except TimeLimitError:
        return PlanMemory(budget=budget, time_limit=_PATIENCE * time_limit).choose(planner)


def broken_promises(
    measured_bytes: int, predicted_bytes: int, budget_bytes: int, numbers: Numbers | None = None
) -> list[str]:
    """Names the promises that a plan broke when it ran."""
    found: list[str] = []
    if measured_bytes > predicted_bytes:
        found.append(f"measured {measured_bytes} > predicted {predicted_bytes} bytes")
    if predicted_bytes > budget_bytes:
        found.append(f"predicted {predicted_bytes} > budget {budget_bytes} bytes")
    if numbers is not None and not numbers.agrees:
        found.append(f"numbers differ: {numbers}")
    return found


# ---------------------------------------------------------------------- models


def model_source(name: str) -> Source:
    """A benchmark model by its name, or what `irc optimize` calls MODEL.

    Raises:
        UsageError: IRC420 when no benchmark model has this name.
    """
    if ":" in name or name.endswith(".onnx"):
        return Source(name)
    if name not in models.__all__:
        raise UsageError(
            "IRC420",
            f"there is no benchmark model {name!r}",
            help=f"choose among {', '.join(models.__all__)}, or give package.module:factory",
        )
    return Source(f"{models.__name__}:{name}")


def load_named(name: str) -> Loaded:
    """Loads what `model_source` names.

    Raises:
        UsageError: There is no such model, or it cannot be loaded.
    """
    return load(model_source(name))
