"""Schedules that run again in forward order at each time step: the class of Checkmate and of MOCCASIN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...ir import Node, Storage, UsageError
from ..remat.problem import CheckpointProblem, Solution

__all__ = ["TimeSteps", "check_size"]


@dataclass(frozen=True)
class TimeSteps:
    """The schedules that advance by one first run at each time step, and what they hold there.

    At a time step, operations of forward that ran before may run again, each once and in forward order. Then
    the operation of the time step runs for the first time, or the loss is computed.

    Args:
        problem: The recomputation problem.

    Source:
        Jain et al., Checkmate (MLSys 2020), section 4: a time step is a stage of the frontier-advancing
        partition. Ours runs backward operations once, and has a time step for the loss.
    """

    problem: CheckpointProblem

    @property
    def loss(self) -> int:
        """The time step of the loss."""
        return len(self.problem.forward)

    def first(self, node: Node) -> int:
        """The time step at which an operation of forward runs for the first time."""
        return self.problem.index[node]

    @cached_property
    def again(self) -> tuple[tuple[Node, ...], ...]:
        """For each time step, the operations that may usefully run again before it, in forward order."""
        problem = self.problem
        last = {
            node: max((problem.last_needed[s] for s in self.makes[node]), default=-1)
            for node in problem.forward
        }
        return tuple(
            tuple(n for n in problem.forward[:time_step] if n.is_recomputable and last[n] >= time_step)
            for time_step in range(problem.time_steps)
        )

    @cached_property
    def makes(self) -> Mapping[Node, tuple[Storage, ...]]:
        """For each operation, the storages that it makes and that come and go."""
        problem = self.problem
        return {
            node: tuple(s for s in problem.graph.allocates(node) if s in problem.producer)
            for node in problem.base
        }

    def may_stay(self, storage: Storage, time_step: int) -> bool:
        """Whether a storage may usefully be there when a time step begins."""
        made = self.first(self.problem.producer[storage])
        if time_step == self.loss + 1 and storage in self.problem.transient:
            return False
        return made < time_step <= self.problem.last_needed[storage]

    def running_bytes(self, node: Node) -> int:
        """Bytes that an operation takes only while it runs again: workspace, and copies of its outputs."""
        problem = self.problem
        kept = sum(s.nbytes for s in self.makes[node])
        return problem.graph.allocated_bytes(node) - kept + problem.costs.workspace_bytes[node]

    def simulate(self, again: Sequence[Sequence[Node]]) -> Solution:
        """Simulates the schedule that runs these operations again before each time step."""
        order: list[list[Node]] = []
        for time_step, before in enumerate(again):
            node = self.problem.base_of(time_step)
            order.append([*before, *([] if node is None else [node])])
        forward = [node for nodes in order[: self.loss + 1] for node in nodes]
        backward = [node for nodes in order[self.loss + 1 :] for node in nodes]
        return self.problem.simulate_order(forward, backward)


def check_size(problem: CheckpointProblem, strategy: str, most_operations: int) -> None:
    """Refuses a graph that is too large for an exact strategy.

    Args:
        problem: The recomputation problem.
        strategy: The name of the strategy.
        most_operations: The most operations that it holds.

    Raises:
        UsageError: IRC403 if the graph has more.
    """
    if (count := len(problem.base)) > most_operations:
        raise UsageError(
            "IRC403",
            f"strategy {strategy} holds {most_operations} operations, and this graph has {count}",
            help="use strategy auto, which holds graphs of any size",
        )
