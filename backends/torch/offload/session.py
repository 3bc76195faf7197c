"""The copies of one call: the argument `copies` of the emitted forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....ir import TensorType, TierError
from .memory import checksum
from .offloaded_parameters import Resident
from .slots import AnySlot
from .table import CopiedTensor
from .tier import RunningTier, Ticket

__all__ = ["Session"]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a tier.

    Args:
        slot: Its slot.
        strides: The strides of the tensor, which may differ from the planned ones.
        checksum: The checksum of its bytes; None if checksums are off.
    """

    slot: AnySlot
    strides: tuple[int, ...]
    checksum: int | None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A copy under way.

    Args:
        ticket: The copy.
        fetched: The tensor that it fills, if its checksum will be compared.
        then: A function to call when the copy has ended.
    """

    ticket: Ticket
    fetched: Tensor | None = None
    then: Callable[[], None] | None = None


class Session:
    """The copies of one call of a module.

    It gives its slots back when it is closed, and when nobody refers to it any more.

    Args:
        tensors: The copied tensors, by key.
        tiers: The tiers, by name.
        offloaded_parameters: The tensors that are offloaded between steps, by key.
        checks: The names of the tiers whose copies are compared by checksums.
        parent: The session of the call, for a backward after which another one may run: the slots of the
            parent stay.
    """

    def __init__(
        self,
        tensors: Sequence[CopiedTensor],
        tiers: Mapping[str, RunningTier],
        offloaded_parameters: Mapping[int, Resident],
        checks: frozenset[str] = frozenset(),
        parent: Session | None = None,
    ) -> None:
        self._stored: dict[int, _Stored] = {}
        self._pending: dict[int, _Pending] = {}
        self._tensors = tensors
        self._tiers = tiers
        self._offloaded_parameters = offloaded_parameters
        self._checks = checks
        self._parent = parent

    def retained(self) -> Session:
        """Makes a session for one of several backwards of this call."""
        return Session(self._tensors, self._tiers, self._offloaded_parameters, self._checks, self)

    # ------------------------------------------------------------------ called by the emitted source

    def offload(self, key: int, tensor: Any) -> None:
        """Begins to copy to a tier a tensor, or a `State` from `fetch`. It must not change before `wait`.

        Raises:
            TierError: IRC577 if the tier is full; IRC570 or IRC572 if its disk is full, or fails; IRC578 if
                the tensor does not fill its memory.
        """
        if key in self._offloaded_parameters:
            offloaded = self._offloaded_parameters[key]
            self._pending[key] = _Pending(offloaded.offload(tensor), then=offloaded.arrived)
            return
        copied = self._tensors[key]
        tier = self._tiers[copied.tier]
        _refuse_scattered(tensor, copied)
        slot = tier.room.take(copied.nbytes)
        crc = checksum(tensor) if copied.tier in self._checks else None
        self._stored[key] = _Stored(slot, tensor.stride(), crc)
        self._pending[key] = _Pending(tier.begin_out(tensor, slot))
        tier.count(out_bytes=copied.nbytes)

    def fetch(self, key: int) -> Any:
        """Begins to copy a tensor back, or an offloaded parameter or `State`.

        The result may be read after `wait`, and must not be dropped before.
        """
        if key in self._offloaded_parameters:
            there, ticket = self._offloaded_parameters[key].fetch()
            self._pending[key] = _Pending(ticket)
            return there
        copied = self._tensors[key]
        tier, stored = self._tiers[copied.tier], self._held(key)
        dtype: torch.dtype = getattr(torch, copied.type.dtype.value)
        tensor = torch.empty_strided(
            copied.type.shape, stored.strides, dtype=dtype, device=copied.type.device
        )
        checked = tensor if stored.checksum is not None else None
        self._pending[key] = _Pending(tier.begin_in(stored.slot, tensor), checked)
        tier.count(in_bytes=copied.nbytes)
        return tensor

    def wait(self, key: int) -> None:
        """Waits for the copy of a tensor that was begun last.

        Raises:
            TierError: IRC570 or IRC572 if the copy failed; IRC573 if its thread has died; IRC574 if other
                bytes came back.
        """
        copied = self._tensors[key]
        pending = self._pending.pop(key, None)
        if pending is None:
            assert self._parent is not None, f"no copy of {copied.name} was begun"
            pending = self._parent._pending[key]
        started = time.perf_counter()
        pending.ticket.wait()
        self._tiers[copied.tier].count(waited_seconds=time.perf_counter() - started)
        if pending.fetched is not None:
            self._compare(key, pending.fetched)
        if pending.then is not None:
            pending.then()

    def drop(self, key: int) -> None:
        """Frees the slot in the tier."""
        self._stored.pop(key, None)

    # ------------------------------------------------------------------

    def close(self) -> None:
        """Cancels all copies and frees all slots; returns when no copy touches memory of this call."""
        given_up = [pending.ticket for pending in self._pending.values()]
        self._give_up()
        for ticket in given_up:
            ticket.settle()

    def _give_up(self) -> None:
        for pending in self._pending.values():
            pending.ticket.cancel()
        self._pending.clear()
        self._stored.clear()

    def __del__(self) -> None:
        self._give_up()

    def _held(self, key: int) -> _Stored:
        stored = self._stored.get(key)
        if stored is None:
            assert self._parent is not None, f"{self._tensors[key].name} is not in a tier"
            stored = self._parent._stored[key]
        return stored

    def _compare(self, key: int, tensor: Tensor) -> None:
        copied, expected = self._tensors[key], self._held(key).checksum
        found = checksum(tensor)
        if found != expected:
            raise TierError(
                "IRC574",
                f"{copied.name} ({copied.nbytes} B) came back from tier {copied.tier} with other bytes: "
                f"their checksum is {found:#010x}, and was {expected:#010x}",
                help="see that disk and memory are in order; the step can be repeated",
            )


def _refuse_scattered(tensor: Tensor, copied: CopiedTensor) -> None:
    """Refuses a tensor with gaps, whose kernel gave it another layout than planned."""
    strides = tensor.stride()
    if str(tensor.dtype).removeprefix("torch.") != copied.type.dtype.value:
        raise TierError(
            "IRC578",
            f"{copied.name} is {tensor.dtype}, planned was {copied.type.dtype.value}",
            help="plan without swap, and report this model",
        )
    if strides != copied.type.strides or tensor.shape != copied.type.shape:
        there = TensorType(tuple(tensor.shape), copied.type.dtype, strides)
        if there.shape != copied.type.shape or not there.is_dense:
            raise TierError(
                "IRC578",
                f"{copied.name} has shape {list(there.shape)} and strides {list(strides)}, planned were "
                f"{list(copied.type.shape)} and {list(copied.type.strides)}: it is not one block of memory",
                help="plan without swap, and report this model",
            )
