"""Point-to-point links between two stages on different ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...ir import TensorType, Value
from .lost_ranks import reaching

__all__ = ["P2PInbox", "P2PLink", "P2POutbox", "PendingSends"]


@dataclass(frozen=True)
class P2PLink:
    """One direction across one boundary between two stages.

    A value travels as the bytes of its storage, and arrives in the layout that it had.

    Args:
        values: The values that are sent for each micro-batch, in order.
        peer: The other stage's rank in the world.
        tag: The tag of the messages of this link, for groups that have tags.
        group: The process group; None for all ranks. If a group has no tags (NCCL), each link has its own.
    """

    values: tuple[Value, ...]
    peer: int
    tag: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class _PendingSend:
    """A value that was sent and may not have arrived."""

    link: P2PLink
    micro_batch: int
    work: dist.Work
    payload: Tensor


class PendingSends:
    """The values that a rank has sent and that may not have arrived; they are held until then.

    Each is waited for once: a second wait for the same send through gloo would never end.

    Args:
        lag: The number of further actions of the rank after which it waits for a value.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._actions = 0
        self._pending: list[tuple[int, _PendingSend]] = []

    def end_action(self) -> None:
        """Waits for old sends, before memory is taken for the values that the next actions receive."""
        self._actions += 1
        oldest = self._actions - self.lag
        self._wait(lambda action, _: action < oldest)

    def begin_send(self, link: P2PLink, micro_batch: int) -> None:
        """Waits for the values that a link sent for other micro-batches."""
        self._wait(lambda _, sent: sent.link is link and sent.micro_batch != micro_batch)

    def add(self, send: _PendingSend) -> None:
        """Holds a value that is sent in the current action."""
        self._pending.append((self._actions, send))

    def end(self) -> None:
        """Waits until all values have arrived."""
        self._wait(lambda _, __: True)

    def _wait(self, is_due: Callable[[int, _PendingSend], bool]) -> None:
        pending, self._pending = self._pending, []
        while pending:
            action, send = pending.pop(0)
            if is_due(action, send):
                with reaching(send.link.peer):
                    send.work.wait()
            else:
                self._pending.append((action, send))


class P2POutbox:
    """Sends to another rank; the values of one micro-batch have arrived before the next is sent.

    Args:
        link: The link to the other rank.
        pending_sends: Holds sent values until they have arrived.
    """

    def __init__(self, link: P2PLink, pending_sends: PendingSends) -> None:
        self.link = link
        self.pending_sends = pending_sends
        self._types = {value.name: value.type for value in link.values}

    def send(self, micro_batch: int, key: str, value: Tensor) -> None:
        """Begins to send a value, which must not be written from here on."""
        self.pending_sends.begin_send(self.link, micro_batch)
        payload = _payload_of(value, self._types[key])
        with reaching(self.link.peer):
            work = dist.isend(payload, self.link.peer, self.link.group, self.link.tag)
        assert work is not None
        self.pending_sends.add(_PendingSend(self.link, micro_batch, work, payload))


class P2PInbox:
    """Receives from another rank.

    Args:
        link: The link from the other rank.
        device: The device of received values.
    """

    def __init__(self, link: P2PLink, device: torch.device) -> None:
        self.link = link
        self.device = device
        self._types = {value.name: value.type for value in link.values}
        self._arriving: dict[tuple[int, str], tuple[dist.Work, Tensor]] = {}

    def expect(self, micro_batch: int) -> None:
        """Allocates memory for the values of a micro-batch, and begins to receive them."""
        for name, type in self._types.items():
            payload = torch.empty(_payload_bytes(type), dtype=torch.uint8, device=self.device)
            with reaching(self.link.peer):
                work = dist.irecv(payload, self.link.peer, self.link.group, self.link.tag)
            assert work is not None
            self._arriving[micro_batch, name] = work, payload

    def receive(self, micro_batch: int, key: str) -> Tensor:
        """Waits for a value and returns it."""
        work, payload = self._arriving.pop((micro_batch, key))
        with reaching(self.link.peer):
            work.wait()
        type = self._types[key]
        dtype: torch.dtype = getattr(torch, type.dtype.value)
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(payload.untyped_storage(), 0, type.shape, type.strides)


def _payload_bytes(type: TensorType) -> int:
    """Returns the number of bytes from the first element of a tensor to its last."""
    if 0 in type.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(type.shape, type.strides, strict=True))
    return (last + 1) * type.dtype.itemsize


def _payload_of(tensor: Tensor, type: TensorType) -> Tensor:
    """Returns the bytes of a tensor in its planned layout; the tensor's own memory if it has that layout."""
    if tuple(tensor.stride()) != type.strides:
        laid = torch.empty_strided(type.shape, type.strides, dtype=tensor.dtype, device=tensor.device)
        tensor = laid.copy_(tensor)
    first = tensor.storage_offset() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), first, (_payload_bytes(type),), (1,))
