"""Mailboxes carry tensors between pipeline stages: one stage sends and its neighbour receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

__all__ = ["Inbox", "LocalExchange", "Mailbox", "Outbox"]


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
        """Waits for a value of a micro-batch and returns it, once."""
        ...


@dataclass
class LocalExchange:
    """The inbox and the outbox between two stages of one process: values are handed over without a copy."""

    values: dict[tuple[int, str], Tensor] = field(default_factory=dict[tuple[int, str], Tensor])

    def send(self, micro_batch: int, key: str, value: Tensor) -> None:
        """Keeps a value until it is received."""
        self.values[micro_batch, key] = value

    def expect(self, micro_batch: int) -> None:
        """Does nothing: values need no memory of their own."""

    def receive(self, micro_batch: int, key: str) -> Tensor:
        """Returns the value that was sent."""
        return self.values.pop((micro_batch, key))


@dataclass(frozen=True)
class Mailbox:
    """Exchanges values for a stage's program, in one forward or backward of a micro-batch.

    Args:
        micro_batch: The number of the micro-batch.
        inbox: The inbox of received values; None if the stage receives nothing.
        outbox: The outbox of sent values; None if the stage sends nothing.
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
