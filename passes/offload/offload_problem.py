"""A recomputation problem with tiers: schedules of it with copies, and their times."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...ir import Compute, Node, Schedule, Storage, Tier, liveness, step_times
from ..remat.problem import CheckpointProblem, Recomputations, Solution
from .schedule_copies import EFFORT, Order, schedule_copies

__all__ = ["OffloadProblem"]


@dataclass(frozen=True)
class OffloadProblem:
    """A recomputation problem in which storages may also go to tiers.

    Schedules considered run what a schedule of `CheckpointProblem` runs. They copy out what forward makes and
    a tier can take, each storage once, as soon as it is made; it may be away in any of its gaps.

    Args:
        problem: The recomputation problem.
        tiers: The tiers, the fastest first.
        budget_bytes: The most that may be alive at once on the device.
    """

    problem: CheckpointProblem
    tiers: tuple[Tier, ...]
    budget_bytes: int

    @property
    def floor_bytes(self) -> int:
        """The bytes that no schedule with copies can go below: what waits for its backward may be away."""
        problem = self.problem
        return problem.floor_bytes - (problem.graph.forwards_in_flight - 1) * problem.forced_bytes

    def with_copies(
        self, solution: Solution, storages: Collection[Storage] | None = None, *, effort: int = EFFORT
    ) -> Solution | None:
        """Adds copies to a schedule as needed; None if they do not make it fit.

        Args:
            solution: The schedule.
            storages: The storages that may be copied; None for all that a tier can take.
            effort: The effort of `schedule_copies`.
        """
        if solution.peak_bytes <= self.budget_bytes:
            return solution
        return self.fitted(self.order(solution), storages=storages, effort=effort)

    def order(self, solution: Solution) -> Order:
        """The order of a schedule's computations, to which copies are added."""
        return self._order(*solution.schedule.halves)

    def _order(self, forward: Sequence[Node], backward: Sequence[Node]) -> Order:
        costs = self.problem.costs
        forward, backward = self.problem.with_remade(forward, backward)
        return Order(self.problem.graph, forward, backward, costs.seconds, costs.workspace_bytes)

    def run(self, recomputations: Recomputations, *, below_seconds: float = math.inf) -> Solution | None:
        """Makes the schedule that runs these operations again, with copies if needed; None if too slow."""
        split = len(self.problem.forward)
        pairs = list(zip(self.problem.base, recomputations, strict=True))
        forward = [n for node, before in pairs[:split] for n in (*before, node)]
        backward = [n for node, before in pairs[split:] for n in (*before, node)]
        return self.fitted(self._order(forward, backward), below_seconds=below_seconds)

    def fitted(
        self,
        order: Order,
        *,
        below_seconds: float = math.inf,
        storages: Collection[Storage] | None = None,
        effort: int = EFFORT,
    ) -> Solution | None:
        """Adds copies to an order as needed; None if it does not fit, or is not that fast.

        Args:
            order: The order.
            below_seconds: A limit: only faster steps are asked for.
            storages: The storages that may be copied; None for all that a tier can take.
            effort: The effort of `schedule_copies`.
        """
        copies = schedule_copies(
            order,
            self.problem.producer if storages is None else storages,
            self.tiers,
            self.budget_bytes,
            below_seconds=below_seconds,
            effort=effort,
        )
        if copies is None or copies.step_seconds > below_seconds:
            return None
        found = self.simulate(order.schedule(copies.swaps))
        return found if found.peak_bytes <= self.budget_bytes else None

    def simulate(self, schedule: Schedule) -> Solution:
        """Simulates a schedule: its memory, and its time with that of copies which are waited for."""
        costs = self.problem.costs
        timeline = liveness(schedule, costs.workspace_bytes)
        computed = [(i, n) for i, n in zip(schedule.instructions, timeline.during_bytes, strict=True)]
        return Solution(
            schedule=schedule,
            peak_bytes=timeline.peak_bytes,
            seconds=self.seconds(schedule),
            during_bytes=tuple(n for i, n in computed if isinstance(i, Compute)),
            order=schedule.computed,
        )

    def seconds(self, schedule: Schedule) -> float:
        """The time of a step; without a wait it is that of its computations, to the last bit."""
        costs = self.problem.costs
        times = step_times(schedule, costs.seconds, self.tiers)
        computed = math.fsum(costs.seconds[node] for node in schedule.computed)
        exposed = times.exposed_seconds
        return computed + exposed if exposed > 1e-12 * computed else computed
