"""The copies of a schedule as a table that programs carry: what goes to which tier, and how much is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....ir import Fetch, InputRole, Offload, Schedule, Storage, TensorType, Value, stored_bytes

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
    """Whose home a copied tensor lives in.

    Args:
        parameter: The parameter's name.
        index: Its place among the static inputs.
        tied: The places of the same parameter under other names.
        is_state: Whether it is the state of its optimizer.
    """

    parameter: str
    index: int
    tied: tuple[int, ...]
    is_state: bool


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor that a schedule copies to a tier. Its place in the table is its key in the emitted source.

    Args:
        name: Of its value in the graph.
        tier: Where it goes.
        type: What it is made as; it fills its storage.
        offloaded: Whose it is, where it lives in the tier between steps.
    """

    name: str
    tier: str
    type: TensorType
    offloaded: OffloadedRole | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.type.nbytes


@dataclass(frozen=True, slots=True)
class CopyTable:
    """All that a schedule copies.

    Args:
        tensors: By key.
        peak_bytes: For each tier, the most that one call lays there at once, beside what lives there.
    """

    tensors: tuple[CopiedTensor, ...] = ()
    peak_bytes: Mapping[str, int] = field(default_factory=dict[str, int])

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def has_offloaded(self) -> bool:
        """Whether parameters or states of optimizers live in a tier."""
        return any(copied.offloaded is not None for copied in self.tensors)


def copied_value(schedule: Schedule, storage: Storage) -> Value:
    """The one value that fills a storage which is copied."""
    graph = schedule.graph
    if storage in graph.offloaded_of:
        return graph.offloaded_of[storage].value
    assert storage in graph.copyable_storages, f"{storage} cannot be copied"
    return next(value for value in graph.producers[storage].values if value.storage is storage)


def copy_keys(schedule: Schedule) -> dict[tuple[Storage, str], int]:
    """A number for each storage and tier that it is copied to, in the order of the schedule.

    What lives in a tier and is never copied, as nothing reads it, comes last.
    """
    pairs = [(i.storage, i.tier) for i in schedule.instructions if isinstance(i, Offload | Fetch)]
    pairs += [(offloaded.storage, offloaded.tier) for offloaded in schedule.graph.offloaded_parameters]
    return {pair: key for key, pair in enumerate(dict.fromkeys(pairs))}


def copy_table(schedule: Schedule) -> CopyTable:
    """The copies of a schedule."""
    graph = schedule.graph
    statics = [entry for entry in graph.inputs if entry.role is not InputRole.TANGENT]
    positions = {e.target: k for k, e in enumerate(statics) if e.role is InputRole.PARAMETER}
    tensors: list[CopiedTensor] = []
    for storage, tier in copy_keys(schedule):
        value, offloaded = copied_value(schedule, storage), graph.offloaded_of.get(storage)
        of = None
        if offloaded is not None:
            index = positions[offloaded.parameter]
            mine = statics[index].value.storage
            tied = (k for k, e in enumerate(statics) if e.value.storage is mine and k != index)
            of = OffloadedRole(offloaded.parameter, index, tuple(tied), offloaded.is_state)
        tensors.append(CopiedTensor(value.name, tier, value.type, of))
    lives = {offloaded.tier: 0 for offloaded in graph.offloaded_parameters}
    for offloaded in graph.offloaded_parameters:
        lives[offloaded.tier] += offloaded.storage.nbytes
    held = {tier: max(nbytes) - lives.get(tier, 0) for tier, nbytes in stored_bytes(schedule).items()}
    return CopyTable(tuple(tensors), held)


def last_fetches(schedule: Schedule) -> dict[Storage, int]:
    """For each storage that is fetched, the last instruction that fetches it: then its tier gives it up."""
    return {i.storage: k for k, i in enumerate(schedule.instructions) if isinstance(i, Fetch)}
