"""Measures the memory that a step takes outside of its compiled graphs."""

# The state of the profiler has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ...ir import UsageError, allocation_bytes
from ...passes.costs.allocations import Recording, recorded_allocations

__all__ = ["Outside", "OutsideMeter", "Stretch"]

_LOG = logging.getLogger(__name__)

_MARK_BYTES = 1_000_033
_OTHER_MARK_BYTES = 7 * 512 + 2
"""The size of an allocation that separates two stretches of a step, and how much larger it is after a
recording that was spoilt: by a tensor of that size, if the model has one."""

_MOST_SPOILT = 4
"""The number of spoilt recordings in a row after which the log warns, and of sizes that marks take."""

_MOST_MARKS = 20_000
_IDLE_SECONDS = 60
"""A recording with so many marks, or with none for so long, is given up."""

_MOST_WAITED = 3
"""A meter waits so often for the session of another one, whose next step would end it."""


class Stretch(IntEnum):
    """The code that runs in a stretch of a step; the place of its bytes in `Outside`."""

    FORWARD = 0
    """A graph's forward."""
    LOSS = 1
    """The code after it: the loss, or what Dynamo left to Python before the next graph."""
    BACKWARD = 2
    """A graph's backward."""
    WAITING = 3
    """The backward of such code, while the graphs before it wait for theirs; after the last, the loop."""


class Outside(NamedTuple):
    """The memory that a step takes outside of its graphs, at each kind of stretch.

    What such code makes is often gone when a graph runs: one number for the step would count it beside graphs
    that never see it.

    Args:
        forward_bytes: The most that is alive in a graph's forward, beside the bytes that are predicted of the
            graphs.
        loss_bytes: The same in the code after a forward.
        backward_bytes: The same in a graph's backward.
        waiting_bytes: The same in the code between two backwards.
        between_bytes: The most that is alive at once after the last backward, until the next step's first
            graph.
    """

    forward_bytes: int = 0
    loss_bytes: int = 0
    backward_bytes: int = 0
    waiting_bytes: int = 0
    between_bytes: int = 0

    @staticmethod
    def throughout(nbytes: int) -> Outside:
        """Counts the same bytes from the first graph's forward to its backward."""
        return Outside(nbytes, nbytes, nbytes, nbytes)

    @property
    def beside_bytes(self) -> int:
        """The most that is alive beside the graphs, from the first one's forward to its backward."""
        return max(self[: len(Stretch)])

    def __or__(self, other: Outside) -> Outside:
        """The most of two steps."""
        return Outside(*map(max, self, other))


@dataclass(eq=False)
class OutsideMeter:
    """Records the allocations of a step, and compares them with the bytes that are predicted.

    Marks divide the step into stretches: a graph's forward or backward, or the code between two of them,
    which Dynamo left to Python. The step ends where the next one begins, so that the last stretch is what
    the training loop does between them (the optimizer's step, the next batch), and what runs before a first
    graph.

    A step in which a graph is new is recorded, and the one after it. Other steps are not.

    Attributes:
        outside: The largest of the steps so far.
    """

    outside: Outside = field(default_factory=Outside)
    _is_wanted: bool = field(default=True, init=False)
    _has_new: bool = field(default=False, init=False)
    _recording: weakref.finalize[..., OutsideMeter] | None = field(default=None, init=False)
    """Ends the session, at the latest when the process exits."""
    _device: str = field(default="cpu", init=False)
    _recordings: list[Recording] = field(default_factory=list[Recording], init=False)
    _stretches: list[Stretch] = field(default_factory=list[Stretch], init=False)
    _predicted: list[int | None] = field(default_factory=list[int | None], init=False)
    _start_bytes: int = field(default=0, init=False)
    _state_bytes: int = field(default=0, init=False)
    _marked_seconds: float = field(default=0.0, init=False)
    _waited: int = field(default=0, init=False)
    _spoilt: int = field(default=0, init=False)
    _recorder: ClassVar[weakref.ref[OutsideMeter] | None] = None
    """The meter whose session is open: torch has one for each thread."""

    @property
    def _mark_bytes(self) -> int:
        return _MARK_BYTES + self._spoilt % _MOST_SPOILT * _OTHER_MARK_BYTES

    @property
    def is_settled(self) -> bool:
        """Whether a step without a new graph has been measured since the last graph that was new."""
        return not self._is_wanted

    @property
    def is_recording(self) -> bool:
        """Whether a step is being recorded."""
        return self._recording is not None

    def begin(self, device: str, alive_bytes: int) -> None:
        """Begins to record a step, if that is wanted and nobody else is recording.

        Args:
            device: The device whose memory counts.
            alive_bytes: The bytes that are known to be alive there now.
        """
        self._device, self._recordings, self._stretches, self._predicted = device, [], [], []
        self._start_bytes, self._state_bytes = alive_bytes, 0
        if self._is_wanted:
            self._record()

    def _record(self) -> None:
        if torch.autograd._profiler_enabled() and not self._takes_over():
            return
        recording = contextlib.ExitStack()
        for hook, sign in ((register_optimizer_step_pre_hook, -1), (register_optimizer_step_post_hook, 1)):
            recording.callback(hook(partial(_count_state, weakref.ref(self), sign)).remove)
        try:
            self._recordings.append(recording.enter_context(recorded_allocations(self._device)))
        except UsageError as error:
            _LOG.info("what the step takes outside of graphs is measured in a later step: %s", error)
            recording.close()
            return
        self._recording = weakref.finalize(self, recording.close)
        self._marked_seconds = time.monotonic()
        if _stop_idle not in gc.callbacks:
            gc.callbacks.append(_stop_idle)
        self._waited, OutsideMeter._recorder = 0, weakref.ref(self)

    def _takes_over(self) -> bool:
        """Ends a recording that another model has left, but no other one, such as the user's."""
        other = _open()
        self._waited += 1
        if other is None or not other.is_recording:
            if self._waited == _MOST_WAITED:
                _LOG.warning(
                    "what a step takes outside of its graphs is not measured while a session of torch's "
                    "profiler is open, and does not count in the budget before"
                )
            return False
        if self._waited < _MOST_WAITED:
            return False
        other.stop()
        return True

    def expect_change(self) -> None:
        """Takes down that a graph of this step is new."""
        self._is_wanted = self._has_new = True

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Records nothing meanwhile: what is planned is measured by sessions of its own.

        Garbage is collected before and after, so that nothing is taken on one side and freed on the other.
        """
        if not self.is_recording:
            yield
            return
        gc.collect()
        self.stop()
        try:
            yield
        finally:
            gc.collect()
            self._record()

    def mark(self, stretch: Stretch, predicted_bytes: int | None = None) -> None:
        """Begins a stretch.

        Args:
            stretch: What runs in it.
            predicted_bytes: The most that is predicted to be alive meanwhile; None if `settle` will tell.
        """
        if self.is_recording:
            if len(self._predicted) >= _MOST_MARKS:
                self.stop()
                return
            torch.empty(self._mark_bytes, dtype=torch.uint8, device=self._device)
            self._stretches.append(stretch)
            self._predicted.append(predicted_bytes)
            self._marked_seconds = time.monotonic()

    def settle(self, predicted_bytes: int) -> None:
        """Tells what is predicted to be alive when the stretch that was begun last ends."""
        if self.is_recording:
            self._predicted[-1] = max(self._predicted[-1] or 0, predicted_bytes)

    def stop(self) -> None:
        """Ends the recording; without `end`, nothing comes of it."""
        if self._recording is not None:
            recording, self._recording = self._recording, None
            with contextlib.suppress(RuntimeError):  # another thread began it
                recording()

    def stop_if_idle(self) -> None:
        """Ends a recording that no graph has added to for long: what is recorded meanwhile takes memory."""
        if self.is_recording and time.monotonic() - self._marked_seconds > _IDLE_SECONDS:
            _LOG.warning(
                "what a step takes outside of its graphs was not measured: no step has begun for %d s",
                _IDLE_SECONDS,
            )
            self.stop()

    def end(self, alive_bytes: int, gone_bytes: int) -> bool:
        """Ends the recording, if a whole step was recorded; returns whether `outside` changed.

        Args:
            alive_bytes: The bytes that are known to be alive now, when the next step begins.
            gone_bytes: The bytes that were known to be alive at the beginning and are not alive any more; on
                the CPU their end is no event.
        """
        if not self.is_recording:
            return False
        self.stop()
        (levels, level), has_new, before = self._levels(), self._has_new, self.outside
        self._has_new = False
        if len(levels) != len(self._predicted) or self._predicted[-1] is not None:
            self._spoilt += 1
            if self._spoilt == _MOST_SPOILT:
                _LOG.warning(
                    "what a step takes outside of its graphs could not be measured in %d steps: it does not "
                    "count in the budget, which may not hold",
                    _MOST_SPOILT,
                )
            return False
        self._spoilt = 0
        level -= self._state_bytes
        levels[-1] -= self._state_bytes
        if not self._device.startswith("cuda"):
            level -= gone_bytes
        beside = [0] * len(Stretch)
        for stretch, most, predicted in zip(self._stretches, levels[:-1], self._predicted, strict=False):
            if predicted is not None:
                beside[stretch] = max(beside[stretch], most - predicted)
        held_bytes = max(level - alive_bytes, 0)  # by what ran before the first graph, and nobody knows of
        forward, loss, backward, waiting = (nbytes + held_bytes for nbytes in beside)
        self.outside |= Outside(forward, loss, backward, waiting, levels[-1])
        self._is_wanted = has_new
        return self.outside != before

    def end_first_stretch(self) -> bool:
        """Ends a recording of which the first stretch alone counts; returns whether it is whole."""
        self.stop()
        levels, _ = self._levels()
        if len(levels) != len(self._predicted):
            self._spoilt += 1
            return False
        self.outside |= Outside(between_bytes=levels[0])
        self._is_wanted = self._has_new = False
        return True

    def _levels(self) -> tuple[list[int], int]:
        """The most bytes that were alive in each stretch, and those that are alive in the end."""
        mark_bytes = allocation_bytes(self._mark_bytes, self._device)
        level, levels = self._start_bytes, list[int]()
        for nbytes in (nbytes for recording in self._recordings for nbytes in recording.events):
            if nbytes == mark_bytes:
                levels.append(level)
            elif nbytes != -mark_bytes:
                level += nbytes
                if levels:
                    levels[-1] = max(levels[-1], level)
        return levels, level


def _count_state(
    meter: weakref.ref[OutsideMeter], sign: int, optimizer: torch.optim.Optimizer, *_: object
) -> None:
    """Adds or takes off the bytes of an optimizer's state: what its first step makes is not counted."""
    recorder = meter()
    if recorder is not None:
        held = pytree.tree_leaves(list(optimizer.state.values()))
        recorder._state_bytes += sign * sum(t.nbytes for t in held if isinstance(t, torch.Tensor))


def _open() -> OutsideMeter | None:
    """The meter that recorded last."""
    return OutsideMeter._recorder() if OutsideMeter._recorder is not None else None


def _stop_idle(phase: str, _: object) -> None:
    """Looks at the open recording whenever Python collects garbage."""
    meter = _open()
    if phase == "stop" and meter is not None:
        meter.stop_if_idle()


def _stop_before_fork() -> None:
    """Ends the recording before the process forks: its child would go on with it, and never end it."""
    meter = _open()
    if meter is not None:
        meter.stop()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_stop_before_fork)
