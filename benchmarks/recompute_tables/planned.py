"""Plans of one network on a described machine: at a budget, by a strategy, and within a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from irc.compiler.request import cost_passes
from irc.frontends.torch import capture
from irc.ir import InputRole
from irc.passes import (
    Costs,
    Machine,
    PassManager,
    Planner,
    Program,
    ReleaseGradients,
)

from ..models import MODELS
from ..models.registry import Example
from ..swap_tables.simulated import Entry, reached, roofline

__all__ = ["Maker", "Outcome", "Planning", "Point", "benchmark_model", "captured"]

Maker = Callable[..., Example]
"""A network and its batch, from the name of a benchmark model and its arguments."""


def benchmark_model(model: str, **keywords: Any) -> Example:
    """The benchmark model of that name."""
    return MODELS[model](**keywords)


_REWRITTEN_FOR = "gtx1080ti"
"""Rewrites are the same for every described GPU."""

_STEPS = 6
"""Halvings of the budgets between the smallest and the baseline."""


@dataclass(frozen=True, slots=True)
class Point:
    """One plan.

    Args:
        question: The question that it answers.
        budget_bytes: The most that a step might take.
        peak_bytes: Its peak; the smallest that was found, where nothing fits, 0 where time was out.
        overhead: The time that it adds, as a part of the original's; None where nothing fits.
        bound: No plan within the budget adds less; 0 where nothing was proved.
        plan_seconds: How long planning took.
    """

    question: str
    budget_bytes: int
    peak_bytes: int
    overhead: float | None
    bound: float
    plan_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The plans of one network.

    Args:
        baseline_bytes: The peak of the original step.
        floor_bytes: No plan goes below it.
        parameter_bytes: Parameters and buffers, and the gradients that are there before the step.
        step_seconds: Time of the original step.
        operations: How many it has.
        points: The plans.
    """

    baseline_bytes: int
    floor_bytes: int
    parameter_bytes: int
    step_seconds: float
    operations: int
    points: tuple[Point, ...]

    def point(self, question: str) -> Point:
        """The plan that answers a question."""
        return next(point for point in self.points if point.question == question)

    def cut(self, nbytes: int) -> float:
        """The part of the original's peak above `parameter_bytes` that a peak saves."""
        return 1 - (nbytes - self.parameter_bytes) / (self.baseline_bytes - self.parameter_bytes)


def captured(model: str, make: Maker = benchmark_model, **keywords: Any) -> tuple[Program, Program]:
    """The training step of a network on tensors without data, with the rewrites of `irc.optimize`.

    Args:
        model: The name of a benchmark model.
        make: Makes it from its name and its arguments.
        keywords: Its arguments.

    Returns:
        The step that delivers its gradients at its end, and the one that adds each to the one that is there.
    """
    with FakeTensorMode():
        module, args = make(model, **keywords)
    *rewrites, _ = cost_passes(_REWRITTEN_FOR)
    program = PassManager(rewrites).run(Program(capture(module, args).graph))
    return program, ReleaseGradients().run(program)


class Planning:
    """The planner of one training step on a described machine, without workspaces and without tiers.

    Args:
        program: The step.
        machine: The machine that it runs on.
        seconds: For each search.
    """

    def __init__(self, program: Program, machine: Machine, seconds: float) -> None:
        graph = program.original or program.graph
        costs = Costs.united([roofline(each, machine) for each in dict.fromkeys((graph, program.graph))])
        self._program = replace(program, costs=costs)
        self.planner = Planner(self._program)
        self.graph, self.seconds = graph, seconds
        held = (InputRole.PARAMETER, InputRole.BUFFER)
        storages = {entry.value.storage for entry in graph.inputs if entry.role in held}
        self.parameter_bytes = sum(storage.nbytes for storage in storages) + graph.reserved_bytes
        self.baseline_bytes = self.planner.baseline_bytes

    @property
    def step_seconds(self) -> float:
        """Time of the original step."""
        return self.planner.original.step_seconds

    def cut_to(self, part: float) -> int:
        """The peak that is left if so much is cut of what is above `parameter_bytes`."""
        above = self.baseline_bytes - self.parameter_bytes
        return self.parameter_bytes + int((1 - part) * above)

    def outcome(self, *points: Point) -> Outcome:
        """The plans with what they are held against."""
        return Outcome(
            baseline_bytes=self.baseline_bytes,
            floor_bytes=self.planner.problem.floor_bytes,
            parameter_bytes=self.parameter_bytes,
            step_seconds=self.step_seconds,
            operations=len(self.graph.operations),
            points=points,
        )

    def at(self, question: str, budget_bytes: int) -> Point:
        """The fastest plan within a budget."""
        return self._point(question, reached(self.planner, "auto", budget_bytes, self.seconds))

    def by(self, strategy: str) -> Point:
        """The fastest plan of a strategy, whatever it takes up to the original's peak.

        No later plan begins with it.
        """
        apart = Planner(self._program)
        return self._point(strategy, reached(apart, strategy, self.baseline_bytes, self.seconds))

    def deepest(self, question: str) -> Point:
        """The plan within the smallest budget that a schedule is found for."""
        return self.at(question, self.planner.minimum_bytes(is_thorough=True))

    def within(self, question: str, overhead: float) -> Point:
        """The plan of least memory that halving the budgets finds and that adds no more time than this."""
        best = self.deepest(question)
        plan_seconds = best.plan_seconds
        if best.overhead is not None and best.overhead <= overhead:
            return best
        low, high = best.budget_bytes, self.baseline_bytes
        best = self.at(question, high)
        plan_seconds += best.plan_seconds
        for _ in range(_STEPS):
            middle = (low + high) // 2
            found = self.at(question, middle)
            plan_seconds += found.plan_seconds
            if found.overhead is None or found.overhead > overhead:
                low = middle
            else:
                best, high = found, min(middle, found.peak_bytes)
        return replace(best, plan_seconds=plan_seconds)

    def _point(self, question: str, entry: Entry) -> Point:
        overhead = None if entry.seconds is None else entry.seconds / self.step_seconds - 1
        bound = max(entry.bound_seconds / self.step_seconds - 1, 0.0)
        return Point(question, entry.budget_bytes, entry.peak_bytes, overhead, bound, entry.plan_seconds)
