"""The door to the combinatorial solvers of OR-Tools: minimum cuts of flow networks, and knapsacks."""

from __future__ import annotations

from collections.abc import Sequence

from ortools.algorithms.python import knapsack_solver
from ortools.graph.python import max_flow

__all__ = ["FlowNetwork", "knapsack"]


class FlowNetwork:
    """A directed graph with capacities: the flow goes from vertex 0, the source, to vertex 1, the sink."""

    SOURCE, SINK = 0, 1

    def __init__(self) -> None:
        self._flow = max_flow.SimpleMaxFlow()

    def add_arc(self, tail: int, head: int, capacity: int) -> int:
        """Adds an arc; returns its number."""
        return self._flow.add_arc_with_capacity(tail, head, capacity)

    def set_capacity(self, arc: int, capacity: int) -> None:
        """Changes the capacity of an arc."""
        self._flow.set_arc_capacity(arc, capacity)

    def sink_side(self) -> set[int]:
        """The vertices on the sink's side of a minimum cut; of several cuts, the side is the smallest."""
        status = self._flow.solve(self.SOURCE, self.SINK)
        assert status == self._flow.OPTIMAL, status
        return set(self._flow.get_sink_side_min_cut())

    @property
    def width(self) -> int:
        """The width of the minimum cut that was found last: the capacities of its arcs together."""
        return self._flow.optimal_flow()


def knapsack(values: Sequence[int], sizes: Sequence[int], capacity: int) -> list[int]:
    """The positions of the items of the largest total value whose sizes fit into the capacity."""
    kind = knapsack_solver.SolverType.KNAPSACK_DIVIDE_AND_CONQUER_SOLVER
    solver = knapsack_solver.KnapsackSolver(kind, "knapsack")
    solver.init(list(values), [list(sizes)], [capacity])
    solver.solve()
    return [item for item in range(len(values)) if solver.best_solution_contains(item)]
