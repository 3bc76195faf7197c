"""What carries tensors between pipeline stages: boxes that one stage fills and its neighbour empties."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

__all__ = ["Inbox", "Locker", "Mailbox", "Outbox"]


class Outbox(Protocol):
    """Takes what a stage sends to one neighbour, in one direction."""

    def send(self, micro_batch: int, key: str, value: Tensor) -> None:
        """Sends a value of a micro-batch."""
        ...


class Inbox(Protocol):
    """Gives what one neighbour sends, in one direction."""

    def expect(self, micro_batch: int) -> None:
        """Makes room for all values of a micro-batch."""
        ...

    def receive(self, micro_batch: int, key: str) -> Tensor:
        """A value of a micro-batch, once it is there; it is given once."""
        ...


@dataclass
class Locker:
    """Both boxes between two stages of one process: values are handed over as they are."""

    values: dict[tuple[int, str], Tensor] = field(default_factory=dict[tuple[int, str], Tensor])

    def send(self, micro_batch: int, key: str, value: Tensor) -> None:
        """Keeps a value until it is received."""
        self.values[micro_batch, key] = value

    def expect(self, micro_batch: int) -> None:
        """Does nothing: there is no copy."""

    def receive(self, micro_batch: int, key: str) -> Tensor:
        """The value that was sent."""
        return self.values.pop((micro_batch, key))


@dataclass(frozen=True)
class Mailbox:
    """What a stage's program calls to exchange values, in one forward or backward of a micro-batch.

    Args:
        micro_batch: Its number.
        inbox: Where values come from; None where nothing does.
        outbox: Where they go; None where nothing does.
    """

    micro_batch: int
    inbox: Inbox | None
    outbox: Outbox | None

    def send(self, key: str, value: Tensor) -> None:
        """Sends a value."""
        assert self.outbox is not None, "the stage has no neighbour there"
        self.outbox.send(self.micro_batch, key, value)

    def receive(self, key: str) -> Tensor:
        """Receives a value."""
        assert self.inbox is not None, "the stage has no neighbour there"
        return self.inbox.receive(self.micro_batch, key)
