"""The copies of one call: what the emitted forward and backward have as `copies`."""

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
    """What lies in a tier.

    Args:
        slot: Where.
        strides: As the tensor had them, which may be others than planned.
        checksum: Of its bytes; None where none is compared.
    """

    slot: AnySlot
    strides: tuple[int, ...]
    checksum: int | None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A copy under way.

    Args:
        ticket: What it is waited for by.
        fetched: The tensor that it fills, where its checksum will be compared.
        then: What is called when it has ended.
    """

    ticket: Ticket
    fetched: Tensor | None = None
    then: Callable[[], None] | None = None


class Session:
    """The copies of one call of a module.

    What it holds goes back when it is closed, and when nobody refers to it any more.

    Args:
        tensors: What is copied, by key.
        tiers: Where, by name.
        offloaded_parameters: What of it lives in a tier between steps, by key.
        checks: The names of the tiers whose copies are compared by checksums.
        parent: The session of the call, for a backward after which another one may come: what the parent
            holds stays.
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
        """A session for one of several backwards of this call."""
        return Session(self._tensors, self._tiers, self._offloaded_parameters, self._checks, self)

    # ------------------------------------------------------------------ what the emitted source calls

    def offload(self, key: int, tensor: Any) -> None:
        """Begins to copy a tensor to its tier, or what `fetch` gave. It must stay as it is until `wait`.

        Raises:
            TierError: IRC577 when the tier is full; IRC570 or IRC572 when its disk is, or fails; IRC578 when
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
        """Begins to copy a tensor back, or what lives in a tier; a `State` is one of several tensors.

        It may be read after `wait`, and not be let go of before.
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
        """Goes on when the copy of a tensor that was begun last has ended.

        Raises:
            TierError: IRC570 or IRC572 when the copy failed; IRC573 when the thread died that made it; IRC574
                when what came back is not what went.
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
        """Gives up the copy in the tier."""
        self._stored.pop(key, None)

    # ------------------------------------------------------------------

    def close(self) -> None:
        """Gives up everything; returns when no copy touches any memory of this call any more."""
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
            assert self._parent is not None, f"{self._tensors[key].name} is in no tier"
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
    """Refuses a tensor whose kernel gave it another layout than planned, with gaps."""
    strides = tensor.stride()
    if strides != copied.type.strides or tensor.shape != copied.type.shape:
        there = TensorType(tuple(tensor.shape), copied.type.dtype, strides)
        if there.shape != copied.type.shape or not there.is_dense:
            raise TierError(
                "IRC578",
                f"{copied.name} has shape {list(there.shape)} and strides {list(strides)}, planned were "
                f"{list(copied.type.shape)} and {list(copied.type.strides)}: it is not one block of memory",
                help="plan without swap, and report this model",
            )
