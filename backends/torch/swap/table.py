"""The copies of a schedule as a table that programs carry: what goes to which tier, and how much is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....ir import Fetch, Offload, Schedule, Storage, TensorType, Value, stored_bytes

__all__ = ["CopiedTensor", "CopyTable", "copied_value", "copy_keys", "copy_table", "last_fetches"]


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor that a schedule copies to a tier. Its place in the table is its key in the emitted source.

    Args:
        name: Of its value in the graph.
        tier: Where it goes.
        type: What it is made as; it fills its storage.
    """

    name: str
    tier: str
    type: TensorType

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.type.nbytes


@dataclass(frozen=True, slots=True)
class CopyTable:
    """All that a schedule copies.

    Args:
        tensors: By key.
        peak_bytes: For each tier, the most that one call lays there at once.
    """

    tensors: tuple[CopiedTensor, ...] = ()
    peak_bytes: Mapping[str, int] = field(default_factory=dict[str, int])

    def __bool__(self) -> bool:
        return bool(self.tensors)


def copied_value(schedule: Schedule, storage: Storage) -> Value:
    """The one value that fills a storage which is copied."""
    graph = schedule.graph
    assert storage in graph.copyable_storages, f"{storage} cannot be copied"
    return next(value for value in graph.producers[storage].values if value.storage is storage)


def copy_keys(schedule: Schedule) -> dict[tuple[Storage, str], int]:
    """A number for each storage and tier that it is copied to, in the order of the schedule."""
    pairs = ((i.storage, i.tier) for i in schedule.instructions if isinstance(i, Offload | Fetch))
    return {pair: key for key, pair in enumerate(dict.fromkeys(pairs))}


def copy_table(schedule: Schedule) -> CopyTable:
    """The copies of a schedule."""
    copied = ((copied_value(schedule, storage), tier) for storage, tier in copy_keys(schedule))
    return CopyTable(
        tuple(CopiedTensor(value.name, tier, value.type) for value, tier in copied),
        {tier: max(nbytes) for tier, nbytes in stored_bytes(schedule).items()},
    )


def last_fetches(schedule: Schedule) -> dict[Storage, int]:
    """For each storage that is fetched, the last instruction that fetches it: then its tier gives it up."""
    return {i.storage: k for k, i in enumerate(schedule.instructions) if isinstance(i, Fetch)}
