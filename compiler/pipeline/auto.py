"""Chooses how many devices a pipeline uses, its micro-batches and its schedule, for the shortest step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ...frontends.torch import Captured
from ...ir import BudgetError, IrcError, TimeLimitError, UnsupportedError, UsageError, format_bytes
from ...passes.pipeline import SCHEDULES, LinearPartition
from .plan import MicroBatch, devices_of
from .request import AUTO, PipelineRequest
from .trainer import Stages

__all__ = ["Capture", "Choice", "Considered", "choose", "considered_lines"]


class Capture(Protocol):
    """Captures the training graph of a micro-batch of the model."""

    def __call__(self, count: int, *, stepwise: bool = False) -> Captured:
        """Captures it.

        Args:
            count: The number of micro-batches.
            stepwise: Whether LSTM layers are captured as their time steps, in place of kernels.
        """
        ...


@dataclass(frozen=True)
class Considered:
    """A way to run the pipeline that was looked at.

    Args:
        devices: How many.
        micro_batches: How many.
        schedule: Its name.
        bound_seconds: No plan of it takes less; None if it was not looked at.
        step_seconds: Of the plan; None if none was made.
        peak_bytes: On the device that has most; None if no plan was made.
        why_not: Why no plan was made; empty if one was.
        which: Each of the devices, as `DeviceRequest` names it.
    """

    devices: int
    micro_batches: int
    schedule: str
    bound_seconds: float | None = None
    step_seconds: float | None = None
    peak_bytes: int | None = None
    why_not: str = ""
    which: tuple[str, ...] = ()

    def text(self, *, names_devices: bool = False) -> str:
        """In one line."""
        which = f" ({', '.join(self.which)})" if names_devices else ""
        counts = f"{_many(self.devices, 'device')}{which}, {_many(self.micro_batches, 'micro-batch')}"
        said = f"{counts}, {self.schedule}: "
        if self.step_seconds is None or self.peak_bytes is None:
            return said + self.why_not
        return said + f"{self.step_seconds:.4g} s, largest peak {format_bytes(self.peak_bytes)}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def considered_lines(considered: Sequence[Considered]) -> list[str]:
    """Describes the candidates for a person: plans one by one, the others by why there is none.

    Devices are named if they differ.
    """
    differ = len({name for one in considered for name in one.which}) > 1
    lines = [one.text(names_devices=differ) for one in considered if one.step_seconds is not None]
    others: dict[str, list[Considered]] = {}
    for one in considered:
        if one.step_seconds is None:
            others.setdefault(one.why_not, []).append(one)
    for why_not, ways in others.items():
        several = f"{len(ways)} other ways: {why_not}"
        lines.append(ways[0].text(names_devices=differ) if len(ways) == 1 else several)
    return lines


@dataclass(frozen=True)
class Choice:
    """The best way that was found.

    Args:
        request: It, with nothing open.
        captured: One micro-batch.
        stages: Its plan.
        considered: All that was looked at, the shortest step first, then what has no plan.
    """

    request: PipelineRequest
    captured: Captured
    stages: Stages
    considered: tuple[Considered, ...]

    @property
    def bound_seconds(self) -> float:
        """No plan of all that was looked at takes less for a step."""
        bounds = (one.bound_seconds for one in self.considered)
        return min(bound for bound in bounds if bound is not None)


@dataclass(frozen=True)
class _Candidate:
    """A request with nothing open, and what is known of it before it is planned."""

    request: PipelineRequest
    micro_batch: MicroBatch
    bound_seconds: float
    estimated_seconds: float

    def considered(self, **more: Any) -> Considered:
        return replace(_considered(self.request, ""), bound_seconds=self.bound_seconds, **more)


def choose(capture: Capture, request: PipelineRequest, batch: int) -> Choice:
    """Plans the ways to run a pipeline that a request leaves open, the most promising ones first.

    Numbers of micro-batches are those that divide the batch, two of them at most from one power of two to the
    next. If a part of the devices is used, that is the fastest ones, or those with most memory. A way
    whose bound is above the best plan's step is not planned. In turns a third of the time that is left goes
    into capturing and measuring micro-batches of several sizes, the rest into plans, each with a part of it.

    Args:
        capture: The training graph of a micro-batch.
        request: What is asked; `auto` is open.
        batch: The size of a whole batch.

    Raises:
        BudgetError: IRC486 of the way that came nearest, if none fits.
        UsageError: IRC487 if the batch does not divide; IRC498 if no way was left.
        UnsupportedError: If the model uses what is not supported.
    """
    started = time.thread_time()
    deadline = started + request.time_limit
    counts = _micro_batches(request, batch)
    choosing = _Choosing(request, deadline)
    failure: IrcError | None = None
    while counts:
        now = time.thread_time()
        candidates = _candidates(capture, request, counts, now + (deadline - now) / 3)
        choosing.refuse(candidates.refused)
        choosing.plan(candidates.found)
        counts, failure = candidates.uncaptured, failure or candidates.failure
        if time.thread_time() >= deadline:
            break
    for count in counts:
        choosing.refuse(
            _considered(way, "no time was left to capture a micro-batch") for way in _ways(request, count)
        )
    best, considered = choosing.best, choosing.considered
    if best is None:
        raise choosing.refusal or (None if choosing.is_any_captured else failure) or _nothing(considered)
    candidate, stages = best
    considered.sort(key=lambda one: math.inf if one.step_seconds is None else one.step_seconds)
    plan = replace(stages.plan, planning_seconds=time.thread_time() - started)
    return Choice(
        candidate.request,
        candidate.micro_batch.captured,
        replace(stages, plan=plan),
        tuple(considered),
    )


class _Choosing:
    """The candidates considered so far, and the best of them."""

    def __init__(self, request: PipelineRequest, deadline: float) -> None:
        self.request = request
        self.deadline = deadline
        self.best: tuple[_Candidate, Stages] | None = None
        self.refusal: BudgetError | None = None
        self.considered: list[Considered] = []
        self.is_any_captured = False

    def refuse(self, considered: Iterable[Considered]) -> None:
        """Notes ways that are not planned."""
        self.considered += considered

    def plan(self, candidates: Sequence[_Candidate]) -> None:
        """Plans what may be better than the best so far, in turn."""
        self.is_any_captured |= bool(candidates)
        for number, candidate in enumerate(candidates):
            self.considered.append(self._considered(candidate, len(candidates) - number))

    def _considered(self, candidate: _Candidate, left: int) -> Considered:
        """Plans one candidate, of the given number that are left."""
        seconds = self.deadline - time.thread_time()
        if self.best is not None and candidate.bound_seconds >= self.best[1].plan.step_seconds:
            return candidate.considered(why_not="no plan can be shorter than the best one")
        if self.best is not None and seconds <= 0:
            return candidate.considered(why_not="no time was left to plan it")
        try:
            part = max(seconds / max(1 + left, 2), self.request.time_limit / 20)
            stages = candidate.micro_batch.plan(candidate.request, part)
        except BudgetError as error:
            if self.refusal is None or error.minimum_bytes < self.refusal.minimum_bytes:
                self.refusal = error
            return candidate.considered(why_not=f"over budget: {error.message}")
        except (TimeLimitError, UsageError) as error:
            return candidate.considered(why_not=error.message)
        plan = stages.plan
        if self.best is None or plan.step_seconds < self.best[1].plan.step_seconds:
            self.best = candidate, stages
        return candidate.considered(step_seconds=plan.step_seconds, peak_bytes=max(plan.peak_bytes))


def _nothing(considered: Sequence[Considered]) -> IrcError:
    said = considered[0].text() if considered else "no number of micro-batches divides the batch"
    return UsageError(
        "IRC498",
        f"no way to run a pipeline was left ({said})",
        help="give another batch, more time (--time-limit), or numbers instead of auto",
    )


def _considered(request: PipelineRequest, why_not: str) -> Considered:
    return Considered(
        request.count_of_devices,
        request.count_of_micro_batches,
        request.schedule,
        why_not=why_not,
        which=tuple(map(str, request.requested_devices())),
    )


@dataclass(frozen=True)
class _Candidates:
    """The candidates to plan, the shortest estimated step first, and those refused.

    Args:
        found: What may be planned.
        refused: What may not.
        uncaptured: Numbers of micro-batches that there was no time for.
        failure: Why a micro-batch could not be captured, the first one.
    """

    found: list[_Candidate]
    refused: list[Considered]
    uncaptured: list[int]
    failure: UnsupportedError | UsageError | None


def _candidates(
    capture: Capture, request: PipelineRequest, counts: Sequence[int], deadline: float
) -> _Candidates:
    """Captures micro-batches by some numbers of them, until a deadline, but at the least one."""
    found: list[_Candidate] = []
    refused: list[Considered] = []
    failure: UnsupportedError | UsageError | None = None
    for number, count in enumerate(counts):
        if found and time.thread_time() > deadline:
            return _Candidates(_sorted(found), refused, list(counts[number:]), failure)
        ways: list[PipelineRequest] = []
        for way in _ways(request, count):
            try:
                way.order()
            except UsageError as error:
                refused.append(_considered(way, error.message))
            else:
                ways.append(way)
        if not ways:
            continue
        try:
            micro_batch = MicroBatch.measured(capture(count), request, partial(capture, count, stepwise=True))
        except (UnsupportedError, UsageError) as error:  # such as a batch of one, which has no statistics
            refused += [_considered(way, error.message) for way in ways]
            failure = failure or error
            continue
        for way in ways:
            if (places := len(micro_batch.linear_order.cut_points)) <= way.order().stages:
                refused.append(_considered(way, f"the model has {places - 1} places for stages"))
            else:
                found.append(_candidate(way, micro_batch))
    return _Candidates(_sorted(found), refused, [], failure)


def _sorted(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    return sorted(candidates, key=lambda one: (one.estimated_seconds, one.bound_seconds))


def _candidate(request: PipelineRequest, micro_batch: MicroBatch) -> _Candidate:
    partition = LinearPartition(
        micro_batch.linear_order, request.order(), devices_of(request), micro_batch.optimizer_steps
    )
    bound_seconds = micro_batch.bound_seconds(request)
    return _Candidate(request, micro_batch, bound_seconds, partition.simulated_seconds())


def _ways(request: PipelineRequest, micro_batches: int) -> Iterator[PipelineRequest]:
    """The requests with nothing open for a number of micro-batches."""
    devices = request.requested_devices()
    texts = [f"{f'{d.name}=' if d.name else ''}{d.budget_bytes}@{d.speed!r}" for d in devices]
    places = range(len(devices))
    fastest = sorted(places, key=lambda k: (-devices[k].speed, -devices[k].budget_bytes, k))
    largest = sorted(places, key=lambda k: (-devices[k].budget_bytes, -devices[k].speed, k))
    counts = range(1, len(devices) + 1) if request.devices == AUTO else [len(devices)]
    names = SCHEDULES if request.schedule == AUTO else [request.schedule]
    parts = dict.fromkeys(tuple(sorted(row[:count])) for count in counts for row in (fastest, largest))
    for part in parts:
        count = len(part)
        for name in names if count > 1 or request.schedule != AUTO else ["1f1b"]:
            yield replace(
                request,
                devices=count,
                micro_batches=micro_batches,
                schedule=name,
                budget=[texts[k] for k in part],
                chunks=request.chunks if name == "interleaved" else None,
            )


def _micro_batches(request: PipelineRequest, batch: int) -> list[int]:
    """Numbers of micro-batches, those around four for each device first.

    Raises:
        UsageError: IRC487 if the given one does not divide the batch, or there is no batch.
    """
    if request.micro_batches != AUTO:
        return [request.count_of_micro_batches]
    if not batch:
        raise UsageError(
            "IRC487", "no argument is a batch that could be divided", help="give tensors with a batch"
        )
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    by_power: dict[int, list[int]] = {}
    for count in divisors:
        by_power.setdefault(count.bit_length(), []).append(count)
    kept = [count for counts in by_power.values() for count in counts[:_EACH_POWER]]
    aim = 4 * request.count_of_devices
    return sorted(kept, key=lambda count: abs(math.log(count / aim)))


_EACH_POWER = 2
"""The count of micro-batch numbers tried from one power of two to the next."""
