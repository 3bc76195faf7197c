"""The memory and time of the steps of an optimizer on the device of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...ir import Graph, InputRole, Storage
from ..costs.table import StepCost

__all__ = ["OptimizerSteps"]


@dataclass(frozen=True)
class OptimizerSteps:
    """The cost of an optimizer for each parameter by itself; nothing without an optimizer.

    It takes its steps parameter by parameter when all micro-batches are done, with nothing of them left.

    Args:
        costs: The costs by the storage of the parameter.
    """

    costs: Mapping[Storage, StepCost] = field(default_factory=dict[Storage, StepCost])

    def kept_bytes(self, storage: Storage) -> int:
        """The bytes kept for a trained parameter for the whole step: itself, its gradient, and state."""
        return 2 * storage.nbytes + self._of(storage).state_bytes

    def state_bytes(self, graph: Graph) -> int:
        """The bytes kept from step to step for the parameters of a graph."""
        return sum(self._of(storage).state_bytes for storage in _trained(graph))

    def workspace_bytes(self, graph: Graph) -> int:
        """The most bytes that the step of a parameter of a graph takes beyond that."""
        return max((self._of(storage).workspace_bytes for storage in _trained(graph)), default=0)

    def seconds(self, graphs: Iterable[Graph]) -> float:
        """The time of the steps of all parameters of the graphs, each once."""
        return sum(self._of(storage).seconds for storage in {s for graph in graphs for s in _trained(graph)})

    def _of(self, storage: Storage) -> StepCost:
        return self.costs.get(storage, StepCost())


def _trained(graph: Graph) -> set[Storage]:
    return {i.value.storage for i in graph.inputs if i.role is InputRole.PARAMETER and i.requires_grad}
