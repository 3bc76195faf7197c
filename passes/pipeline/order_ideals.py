"""Downsets of a graph of items, and what the items between two of them take on a device.

A downset holds with each item all it depends on. The first stages of a contiguous partition are one, for
any number of stages; so a contiguous partition is a chain of downsets, and a stage is what lies between
two of them that are nested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .coarsen import Coarse
from .partition_problem import DeviceClass

__all__ = ["Between", "Floats", "Indices", "downsets"]

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
_Words = NDArray[np.uint64]

_WORD = 64


def downsets(coarse: Coarse, limit: int) -> list[int] | None:
    """All downsets as sets of bits, smaller ones first; None if there are more than `limit`."""
    needed = [_bits(before) for before in coarse.predecessors]
    ready_by_downset = {0: _bits(item for item, mask in enumerate(needed) if not mask)}
    found = [0]
    for downset in found:
        ready = left = ready_by_downset[downset]
        while left:
            lowest = left & -left
            left ^= lowest
            larger = downset | lowest
            if larger not in ready_by_downset:
                after = coarse.successors[lowest.bit_length() - 1]
                freed = _bits(item for item in after if not needed[item] & ~larger)
                ready_by_downset[larger] = (ready ^ lowest) | freed
                found.append(larger)
        if len(found) > limit:
            return None
    return found


def _bits(items: Iterable[int]) -> int:
    return sum(1 << item for item in items)


@dataclass(frozen=True)
class Between:
    """What lies between downsets: from one of them to many larger ones at a time.

    Args:
        coarse: The items.
        classes: The devices.
        sets: The downsets, smaller ones first; the first is empty, the last has all items.
    """

    coarse: Coarse
    classes: Sequence[DeviceClass]
    sets: Sequence[int]

    @cached_property
    def has(self) -> NDArray[np.bool_]:
        """Whether a downset has an item, `[downset, item]`."""
        items = len(self.coarse.members)
        nbytes = (items + 7) // 8
        packed = np.frombuffer(b"".join(each.to_bytes(nbytes, "little") for each in self.sets), np.uint8)
        bits = np.unpackbits(packed.reshape(len(self.sets), nbytes), axis=1, bitorder="little")
        return bits[:, :items].astype(bool)

    @cached_property
    def _words(self) -> _Words:
        """The downsets as words, `[word, downset]`."""
        nbytes = -(-len(self.coarse.members) // _WORD) * _WORD // 8
        packed = b"".join(each.to_bytes(nbytes, "little") for each in self.sets)
        return np.ascontiguousarray(np.frombuffer(packed, np.uint64).reshape(len(self.sets), -1).T)

    @cached_property
    def _seconds(self) -> Floats:
        """The time of each downset on a class, without what may not run there, `[class, downset]`."""
        times = np.array(self.coarse.seconds)
        return np.where(np.isfinite(times), times, 0.0).T @ self.has.T

    @cached_property
    def _barred(self) -> NDArray[np.int64]:
        """How many items of each downset may not run on a class, `[class, downset]`."""
        return np.isinf(np.array(self.coarse.seconds)).T.astype(np.int64) @ self.has.T

    @cached_property
    def _memory_bytes(self) -> NDArray[np.int64]:
        return self.has @ np.array(self.coarse.memory_bytes, np.int64)

    @cached_property
    def _net_seconds(self) -> Floats:
        return np.array(list(self.coarse.nets.values()))

    @cached_property
    def _net_sizes(self) -> NDArray[np.int16]:
        return np.array([len(net) for net in self.coarse.nets], np.int16)

    @cached_property
    def _held(self) -> NDArray[np.int16]:
        """How many items of each net a downset has, `[net, downset]`."""
        held = [self.has[:, sorted(net)].sum(axis=1, dtype=np.int16) for net in self.coarse.nets]
        return np.array(held, np.int16).reshape(len(held), len(self.sets))

    @cached_property
    def open_seconds(self) -> Floats:
        """For each downset the transfers of nets that it has some items of, but not all."""
        is_open = (self._held > 0) & (self._held < self._net_sizes[:, None])
        return self._net_seconds @ is_open

    def stages(self, first: int, limit_seconds: float) -> tuple[Indices, Floats]:
        """The stages that begin after one downset and have a load below a limit on some class.

        A net that `first` has some items of is paid for by the stage unless it has none of the rest of them.
        Of the other nets, those are paid for that its end has some items of but not all. Both together:
        all open nets of the end; of those that are open at `first`, minus what passes by, plus what ends.

        Args:
            first: Position of the downset before the stage.
            limit_seconds: Loads from here on do not matter.

        Returns:
            Positions of the downsets that the stages end with, and their loads, `[class, stage]`; infinite
            from the limit on, and where a stage may not be on a device of the class, for its memory or for an
            item.
        """
        larger = np.arange(first + 1, len(self.sets))
        seconds = self._seconds[:, first + 1 :] - self._seconds[:, first, None]
        is_short = (seconds < limit_seconds).any(axis=0)
        for word in self._words:
            is_short &= (word[first] & ~word[first + 1 :]) == 0
        larger = larger[is_short]
        transfers = self.open_seconds[larger]
        held = self._held[:, first]
        for net in np.nonzero((held > 0) & (held < self._net_sizes))[0]:
            at_end = self._held[net, larger]
            passes_by, ends = at_end == held[net], at_end == self._net_sizes[net]
            transfers += self._net_seconds[net] * (ends.astype(float) - passes_by)
        memory_bytes = self._memory_bytes[larger] - self._memory_bytes[first]
        loads = seconds[:, is_short]
        for kind, device in enumerate(self.classes):
            load = loads[kind]
            if device.pays_transfers:
                load += transfers
            load[memory_bytes > device.capacity_bytes] = np.inf
            load[self._barred[kind][larger] > self._barred[kind][first]] = np.inf
        loads[loads >= limit_seconds] = np.inf
        fits = np.isfinite(loads).any(axis=0)
        return larger[fits], loads[:, fits]
