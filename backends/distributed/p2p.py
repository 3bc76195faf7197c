"""The boxes between two stages on different ranks of a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...ir import IrcError, TensorType, Value, first_line

__all__ = ["Channel", "ChannelInbox", "ChannelOutbox", "Departures"]


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

    @contextlib.contextmanager
    def reaching(self) -> Generator[None]:
        """Says which rank is not there any more, where sending or receiving fails.

        Raises:
            IrcError: IRC493.
        """
        try:
            yield
        except RuntimeError as error:
            raise IrcError(
                "IRC493",
                f"rank {self.peer} cannot be reached within a step: {first_line(error)}",
                help="see what that rank has printed, and start all ranks again",
            ) from error


@dataclass(frozen=True)
class _Departure:
    """Something that was sent."""

    channel: Channel
    micro_batch: int
    work: dist.Work
    payload: Tensor


class Departures:
    """What a rank has sent that may not have arrived; it is kept until then.

    Each is waited for once: a second wait for what was sent through gloo would never end.

    Args:
        lag: After so many more actions of the rank it has arrived: the rank waits for it.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._actions = 0
        self._pending: list[tuple[int, _Departure]] = []

    def end_action(self) -> None:
        """Waits for what was sent too long ago, before memory is taken for what the next actions receive."""
        self._actions += 1
        oldest = self._actions - self.lag
        self._wait(lambda action, _: action < oldest)

    def begin_send(self, channel: Channel, micro_batch: int) -> None:
        """Waits for what a channel sent for other micro-batches."""
        self._wait(lambda _, sent: sent.channel is channel and sent.micro_batch != micro_batch)

    def add(self, departure: _Departure) -> None:
        """Keeps what is sent in the current action."""
        self._pending.append((self._actions, departure))

    def end(self) -> None:
        """Waits until all of it has arrived."""
        self._wait(lambda _, __: True)

    def _wait(self, is_due: Callable[[int, _Departure], bool]) -> None:
        pending, self._pending = self._pending, []
        while pending:
            action, departure = pending.pop(0)
            if is_due(action, departure):
                with departure.channel.reaching():
                    departure.work.wait()
            else:
                self._pending.append((action, departure))


class ChannelOutbox:
    """Sends to another rank; what was sent for one micro-batch has arrived before more is sent.

    Args:
        channel: To where.
        departures: Keeps what was sent until it has arrived.
    """

    def __init__(self, channel: Channel, departures: Departures) -> None:
        self.channel = channel
        self.departures = departures
        self._types = {value.name: value.type for value in channel.values}

    def send(self, micro_batch: int, key: str, value: Tensor) -> None:
        """Begins to send a value, which must not be written from here on."""
        self.departures.begin_send(self.channel, micro_batch)
        payload = _payload_of(value, self._types[key])
        with self.channel.reaching():
            work = dist.isend(payload, self.channel.peer, self.channel.group, self.channel.tag)
        assert work is not None
        self.departures.add(_Departure(self.channel, micro_batch, work, payload))


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
            with self.channel.reaching():
                work = dist.irecv(payload, self.channel.peer, self.channel.group, self.channel.tag)
            assert work is not None
            self._arriving[micro_batch, name] = work, payload

    def receive(self, micro_batch: int, key: str) -> Tensor:
        """A value, once it has arrived."""
        work, payload = self._arriving.pop((micro_batch, key))
        with self.channel.reaching():
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
