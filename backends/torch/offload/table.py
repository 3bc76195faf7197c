"""The copies of a schedule as a table that programs carry: the tensors, their tiers, and the bytes there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....ir import Fetch, Graph, InputRole, Offload, Schedule, Storage, TensorType, Value, stored_bytes

__all__ = [
    "CopiedTensor",
    "CopyTable",
    "OffloadedRole",
    "copied_value",
    "copy_keys",
    "copy_table",
    "last_fetches",
]


@dataclass(frozen=True, slots=True)
class OffloadedRole:
    """The parameter that a copied tensor belongs to, if it is offloaded between steps.

    Args:
        parameter: The parameter's name.
        index: The parameter's index among the static inputs.
        tied: The indices of the same parameter under other names.
        is_state: Whether the tensor is the state of the parameter's optimizer.
    """

    parameter: str
    index: int
    tied: tuple[int, ...]
    is_state: bool


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor that a schedule copies to a tier. Its index in the table is its key in the emitted source.

    Args:
        name: The name of its value in the graph.
        tier: The tier.
        type: Its type; the tensor fills its storage.
        offloaded: The parameter that it belongs to, if it is offloaded between steps.
    """

    name: str
    tier: str
    type: TensorType
    offloaded: OffloadedRole | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of one copy."""
        return self.type.nbytes


@dataclass(frozen=True, slots=True)
class CopyTable:
    """All copies of a schedule.

    Args:
        tensors: The copied tensors, by key.
        peak_bytes: The most bytes that one call has in each tier at once, besides offloaded parameters.
    """

    tensors: tuple[CopiedTensor, ...] = ()
    peak_bytes: Mapping[str, int] = field(default_factory=dict[str, int])

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def has_offloaded(self) -> bool:
        """Whether parameters or optimizer states are offloaded between steps."""
        return any(copied.offloaded is not None for copied in self.tensors)


def copied_value(schedule: Schedule, storage: Storage) -> Value:
    """Returns the one value that fills a copied storage."""
    graph = schedule.graph
    if storage in graph.offloaded_of:
        return graph.offloaded_of[storage].value
    assert storage in graph.copyable_storages, f"{storage} cannot be copied"
    return next(value for value in graph.producers[storage].values if value.storage is storage)


def copy_keys(schedule: Schedule) -> dict[tuple[Storage, str], int]:
    """Numbers the pairs of a storage and a tier that it is copied to, in the order of the schedule.

    Offloaded tensors that are never copied, as nothing reads them, come last.
    """
    pairs = [(i.storage, i.tier) for i in schedule.instructions if isinstance(i, Offload | Fetch)]
    pairs += [(offloaded.storage, offloaded.tier) for offloaded in schedule.graph.offloaded_parameters]
    return {pair: key for key, pair in enumerate(dict.fromkeys(pairs))}


def copy_table(schedule: Schedule) -> CopyTable:
    """Makes the table of the copies of a schedule."""
    graph = schedule.graph
    tensors: list[CopiedTensor] = []
    for storage, tier in copy_keys(schedule):
        value = copied_value(schedule, storage)
        tensors.append(CopiedTensor(value.name, tier, value.type, _offloaded_role(graph, storage)))
    resident = {offloaded.tier: 0 for offloaded in graph.offloaded_parameters}
    for offloaded in graph.offloaded_parameters:
        resident[offloaded.tier] += offloaded.storage.nbytes
    peak = {tier: max(nbytes) - resident.get(tier, 0) for tier, nbytes in stored_bytes(schedule).items()}
    return CopyTable(tuple(tensors), peak)


def _offloaded_role(graph: Graph, storage: Storage) -> OffloadedRole | None:
    offloaded = graph.offloaded_of.get(storage)
    if offloaded is None:
        return None
    statics = [entry for entry in graph.inputs if entry.role is not InputRole.TANGENT]
    indices = {e.target: k for k, e in enumerate(statics) if e.role is InputRole.PARAMETER}
    index = indices[offloaded.parameter]
    mine = statics[index].value.storage
    tied = (k for k, e in enumerate(statics) if e.value.storage is mine and k != index)
    return OffloadedRole(offloaded.parameter, index, tuple(tied), offloaded.is_state)


def last_fetches(schedule: Schedule) -> dict[Storage, int]:
    """Returns the last instruction that fetches each storage: then its tier frees the copy."""
    return {i.storage: k for k, i in enumerate(schedule.instructions) if isinstance(i, Fetch)}
