"""The trade-offs of one time step, bytes that stay there against seconds that run again, and their bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...ir import Node
from .cut_network import CutNetwork, Kept
from .problem import CheckpointProblem

__all__ = ["ParametricCut", "Tradeoff"]

_TIE = 1e-4
"""A byte that stays to the end of the step counts as this much more than one: equal layers then leave one
after the other as bytes get dearer, the longest-lived first."""


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A choice at a time step.

    Args:
        counted_bytes: The bytes that stay, each counted by its storage's weight.
        nbytes: The bytes that stay.
        seconds: The time of what runs again.
        kept: The storages that stay, without those that cost nothing.
    """

    counted_bytes: float
    nbytes: int
    seconds: float
    kept: Kept


class _Line(NamedTuple):
    """A price in bytes a second, with the width of the minimum cut at it in bytes."""

    price: float
    width: float


class ParametricCut:
    """The convex hull of bytes that stay at a time step against seconds that run again behind it.

    For a price of a second in bytes, a minimum cut is the choice with the least bytes plus price times
    seconds. The prices that matter lie between two known choices, where these cost the same. The width of
    each cut bounds all choices from below (Lagrange). So equal layers are solved together, in one network:
    all of them change at one price, and weights say which goes first.

    Args:
        problem: The recomputation problem.
        time_step: The time step of the cut.
        kept: Storages that stay anyway, beside those that the time step reads.
        breaks_ties: Whether storages that live longer have a larger weight.

    Source:
        Gallo, Grigoriadis and Tarjan, A Fast Parametric Maximum Flow Algorithm (1989); the prices are those
        of Eisner and Severance, Mathematical Techniques for Efficient Record Segmentation in Large Shared
        Databases (1976).
    """

    def __init__(
        self,
        problem: CheckpointProblem,
        time_step: int,
        *,
        kept: Kept = frozenset(),
        breaks_ties: bool = True,
    ) -> None:
        self.problem, self.time_step = problem, time_step
        tie = _TIE / problem.time_steps if breaks_ties else 0.0
        weights = {storage: 1 + tie * last for storage, last in problem.last_needed.items()}
        self.network = CutNetwork(problem, time_step, kept=kept, weights=weights)
        self._lines: list[_Line] = []
        """The prices that were tried."""
        fastest, smallest = self._tradeoff(lambda node: math.inf), self._tradeoff(lambda node: 0.0)
        self._least_bytes = self.network.width_bytes / self.network.most_weight
        self._hull = [smallest, fastest]
        """The known choices, from the fewest bytes to the most."""

    @property
    def ends(self) -> tuple[Tradeoff, Tradeoff]:
        """The choices with the fewest and with the most bytes."""
        return self._hull[0], self._hull[-1]

    def room_bytes(self, budget_bytes: int) -> int:
        """The bytes that a budget leaves for what stays at the time step, beside what that reads.

        At the loss, each other forward in flight that waits holds as much.
        """
        problem, time_step = self.problem, self.time_step
        left = budget_bytes - problem.held_in(time_step, 0)
        left -= sum(s.nbytes for s in problem.read_at(time_step))
        if time_step != len(problem.forward):
            return left - problem.least_others_bytes(time_step)
        return min((left - case.nbytes) // (1 + case.waiting) for case in problem.others_at(time_step))

    def within(self, room_bytes: int) -> Tradeoff | None:
        """The choice of the hull with the most bytes that are within `room_bytes`; None if there is none."""
        hull = self._hull
        if hull[0].nbytes > room_bytes:
            return None
        at = max(index for index, choice in enumerate(hull) if choice.nbytes <= room_bytes)
        while at + 1 < len(hull) and (between := self.between(hull[at], hull[at + 1])) is not None:
            hull.insert(at + 1, between)
            at += between.nbytes <= room_bytes
        return hull[at]

    def bound_seconds(self, room_bytes: int) -> float:
        """A lower bound of the time that runs again if no more than `room_bytes` stay; infinite if none do.

        It is that of the prices tried so far: `within` tries those that matter.
        """
        if self._least_bytes > room_bytes:
            return math.inf
        counted = self.network.most_weight * room_bytes
        return max((max(line.width - counted, 0.0) / line.price for line in self._lines), default=0.0)

    def between(self, small: Tradeoff, large: Tradeoff) -> Tradeoff | None:
        """A choice of the hull between two; None if there is none."""
        seconds = small.seconds - large.seconds
        if seconds <= 0.0:
            return None
        price = (large.counted_bytes - small.counted_bytes) / seconds
        node_seconds = self.problem.costs.seconds
        found = self._tradeoff(lambda node: price * node_seconds[node])
        self._lines.append(_Line(price, self.network.width_bytes - self.network.rounding_bytes))
        is_new = small.counted_bytes < found.counted_bytes < large.counted_bytes
        return found if is_new and found.kept not in (small.kept, large.kept) else None

    def _tradeoff(self, price: Callable[[Node], float]) -> Tradeoff:
        network, weights = self.network, self.network.weights
        kept, again = network.cut_with_repeats(price)
        counted = math.fsum(network.bytes[s] * weights[s] for s in kept)
        seconds = math.fsum(self.problem.costs.seconds[node] for node in again)
        return Tradeoff(counted, sum(network.bytes[s] for s in kept), seconds, kept)
