"""Threads that carry out copies one after the other, beside the computation."""

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
"""The time after which a waiting caller checks that the thread of the copy is alive."""


class Job(Ticket):
    """One copy on a thread.

    The tensor's memory and the slot are one item of a list. The thread that begins the copy and the call that
    cancels it both try to pop that item, and the one that gets it decides, without a lock. The item is
    dropped before the end of the copy is announced, so that memory is free at the `del` that follows.

    Args:
        storage: The tensor's memory.
        slot: The slot in the tier.
        address: The address of the first byte.
        nbytes: The number of bytes.
    """

    def __init__(self, storage: UntypedStorage, slot: AnySlot, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.thread: threading.Thread | None = None
        """The thread that carries the copy out."""
        self._holds = [(storage, slot)]
        self._ended = threading.Event()
        self._is_given_up = False
        self._error: TierError | None = None

    @abstractmethod
    def transfer(self, slot: AnySlot) -> TierError | None:
        """Makes the copy; returns the error if it fails."""

    def run(self) -> None:
        """Carries the copy out, unless it was cancelled."""
        try:
            held = self._holds.pop()
        except IndexError:
            return
        self._error = self.transfer(held[1])
        del held
        self._ended.set()

    def wait(self) -> None:
        """Waits until the copy has ended.

        Raises:
            TierError: The copy failed; IRC573 if its thread has died.
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
            raise copy.copy(self._error)  # a raised error refers to the frames that it went through

    def _is_carried(self) -> bool:
        return self._ended.is_set() or (self.thread is not None and self.thread.is_alive())

    def cancel(self) -> None:
        """Cancels the copy if it has not started."""
        try:
            self._holds.pop()
        except IndexError:
            return
        self._is_given_up = True

    def settle(self) -> None:
        """Waits until a cancelled copy does not touch any memory any more."""
        while not (self._is_given_up or self._ended.wait(_PATIENCE_SECONDS)) and self._is_carried():
            pass


class Lane:
    """Carries out jobs one after the other, on a thread that starts with the first one.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Takes a job. The jobs of a thread that has died are not carried out; `wait` raises for them."""
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
        """Ends the thread after its jobs."""
        self._jobs.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _carry(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it is not held while the thread waits for the next one
