"""Threads that carry out copies, one after the other, while computing goes on."""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from queue import SimpleQueue

from torch import UntypedStorage

from ....ir import TierError
from .slots import AnySlot
from .tier import Ticket

__all__ = ["Job", "Lane"]

_PATIENCE_SECONDS = 0.5
"""So long a copy is waited for before the thread is looked at that carries it out."""


class Job(Ticket):
    """One copy on a thread.

    What it holds (the tensor's memory and the slot) is one item of a list. Whoever takes it out, the thread
    that begins the copy or the call that gives it up, decides what becomes of it, without a lock. It is let
    go of before anybody is told that the copy has ended, so that memory is free at the `del` that follows.

    Args:
        storage: The tensor's memory, which the copy begins at `address` of.
        slot: Where in the tier.
        address: Of the first byte.
        nbytes: How many.
    """

    def __init__(self, storage: UntypedStorage, slot: AnySlot, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.thread: threading.Thread | None = None
        """Who carries it out."""
        self._holds = [(storage, slot)]
        self._ended = threading.Event()
        self._is_given_up = False
        self._error: TierError | None = None

    @abstractmethod
    def transfer(self, slot: AnySlot) -> TierError | None:
        """Makes the copy; the error where it fails."""

    def run(self) -> None:
        """Carries it out, unless it was given up."""
        try:
            held = self._holds.pop()
        except IndexError:
            return
        self._error = self.transfer(held[1])
        del held
        self._ended.set()

    def wait(self) -> None:
        """As of any ticket.

        Raises:
            TierError: The copy failed; IRC573 when the thread died that was to carry it out.
        """
        while not self._ended.wait(_PATIENCE_SECONDS):
            if not self._is_carried():
                self._holds.clear()
                raise TierError(
                    "IRC573",
                    f"the thread that copies to and from a tier has died, with {self.nbytes} B to copy",
                    help="repeat the step: the next copy starts another thread",
                )
        if self._error is not None:
            raise copy.copy(self._error)  # what is raised refers to the frames that it went through

    def _is_carried(self) -> bool:
        return self._ended.is_set() or (self.thread is not None and self.thread.is_alive())

    def cancel(self) -> None:
        """As of any ticket."""
        try:
            self._holds.pop()
        except IndexError:
            return
        self._is_given_up = True

    def settle(self) -> None:
        """As of any ticket."""
        while not (self._is_given_up or self._ended.wait(_PATIENCE_SECONDS)) and self._is_carried():
            pass


class Lane:
    """Carries out jobs one after the other, on a thread that starts with the first one.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Takes a job. Those of a thread that has died are not carried out: who waits for them is told."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._jobs = SimpleQueue()
                self._thread = threading.Thread(
                    target=_carry, args=(self._jobs,), name=self.name, daemon=True
                )
                self._thread.start()
            job.thread = self._thread
            self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread, once it has carried out what it took."""
        self._jobs.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _carry(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # while this waits for the next one
