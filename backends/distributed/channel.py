"""The boxes between two stages on different ranks of a process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...ir import TensorType, Value

__all__ = ["Channel", "ChannelInbox", "ChannelOutbox"]


@dataclass(frozen=True)
class Channel:
    """One direction across one boundary between two stages.

    A value travels as the bytes of its storage, and arrives in the layout that it had.

    Args:
        values: What is sent for each micro-batch, in the order in which it is sent.
        peer: The other stage's rank in the world.
        tag: Tells the messages of this channel from others, where the group can.
        group: What they go through; None for all ranks. Where a group cannot tell messages apart (NCCL), each
            channel has its own.
    """

    values: tuple[Value, ...]
    peer: int
    tag: int
    group: dist.ProcessGroup | None = None


class ChannelOutbox:
    """Sends to another rank.

    Args:
        channel: To where.
        window: The values of so many micro-batches may be on their way; before more is sent, those of the
            first have arrived.
    """

    def __init__(self, channel: Channel, window: int) -> None:
        self.channel = channel
        self.window = window
        self._types = {value.name: value.type for value in channel.values}
        self._on_their_way: dict[int, list[tuple[dist.Work, Tensor]]] = {}

    def send(self, micro_batch: int, key: str, value: Tensor) -> None:
        """Begins to send a value, which must not be written from here on."""
        if micro_batch not in self._on_their_way:
            while len(self._on_their_way) >= self.window:
                self._end(next(iter(self._on_their_way)))
            self._on_their_way[micro_batch] = []
        payload = _payload_of(value, self._types[key])
        work = dist.isend(payload, self.channel.peer, self.channel.group, self.channel.tag)
        assert work is not None
        self._on_their_way[micro_batch].append((work, payload))

    def end(self) -> None:
        """Waits until all that was sent has arrived."""
        for micro_batch in tuple(self._on_their_way):
            self._end(micro_batch)

    def _end(self, micro_batch: int) -> None:
        for work, _ in self._on_their_way[micro_batch]:
            work.wait()
        del self._on_their_way[micro_batch]


class ChannelInbox:
    """Receives from another rank.

    Args:
        channel: From where.
        device: Where the values go.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.channel = channel
        self.device = device
        self._types = {value.name: value.type for value in channel.values}
        self._arriving: dict[tuple[int, str], tuple[dist.Work, Tensor]] = {}

    def expect(self, micro_batch: int) -> None:
        """Allocates memory for the values of a micro-batch, and begins to receive them."""
        for name, type in self._types.items():
            payload = torch.empty(_payload_bytes(type), dtype=torch.uint8, device=self.device)
            work = dist.irecv(payload, self.channel.peer, self.channel.group, self.channel.tag)
            assert work is not None
            self._arriving[micro_batch, name] = work, payload

    def receive(self, micro_batch: int, key: str) -> Tensor:
        """A value, once it has arrived."""
        work, payload = self._arriving.pop((micro_batch, key))
        work.wait()
        type = self._types[key]
        dtype: torch.dtype = getattr(torch, type.dtype.value)
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(payload.untyped_storage(), 0, type.shape, type.strides)


def _payload_bytes(type: TensorType) -> int:
    """The bytes from the first element of a tensor to its last."""
    if 0 in type.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(type.shape, type.strides, strict=True))
    return (last + 1) * type.dtype.itemsize


def _payload_of(tensor: Tensor, type: TensorType) -> Tensor:
    """The bytes of a tensor in its planned layout: the tensor's own memory where it has that layout."""
    if tuple(tensor.stride()) != type.strides:
        laid = torch.empty_strided(type.shape, type.strides, dtype=tensor.dtype, device=tensor.device)
        tensor = laid.copy_(tensor)
    first = tensor.storage_offset() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), first, (_payload_bytes(type),), (1,))
