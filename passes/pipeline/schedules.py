"""The known pipeline schedules, by the names of the command line.

Each is a function of the number of devices p, of micro-batches m, and of chunks v: the stages that each
device has. On every device the micro-batches of a stage come in order. So a device's actions are given by
stages and works alone, and counting tells which micro-batch each is for. The orders are those of
torch.distributed.pipelining.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...ir import UsageError
from ...ir.pipeline.schedule import Action, PipelineSchedule, Work

__all__ = ["SCHEDULES", "ScheduleKind", "pipeline_schedule"]

_F, _B, _I, _W = Work.FORWARD, Work.BACKWARD, Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT

_Steps = list[tuple[int, Work]]
"""The stages and works of one device, in order."""


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A known schedule.

    Args:
        chunks: The number of stages on each device; None if it is up to the user.
        device_of: The device of a stage, given the number of devices.
        steps: The steps of a device, given it, p, m and v.
        check: Raises IRC468 if the schedule does not take p and m.
        overlapped: The forwards that are one with the backward after them, given a device's actions, the
            device and p.
    """

    chunks: int | None
    device_of: Callable[[int, int], int]
    steps: Callable[[int, int, int, int], _Steps]
    check: Callable[[int, int], None] = lambda p, m: None
    overlapped: Callable[[Sequence[Action], int, int], Iterable[Action]] = lambda line, device, p: ()


def pipeline_schedule(
    name: str, devices: int, micro_batches: int, chunks: int | None = None
) -> PipelineSchedule:
    """Makes a known schedule.

    Args:
        name: One of `SCHEDULES`.
        devices: The number of devices.
        micro_batches: The number of micro-batches in a step.
        chunks: The stages of each device; None for two if it is up to the user, else for the schedule's own.

    Raises:
        UsageError: IRC467 for an unknown name; IRC469 for a number below 1; IRC468 for numbers that the
            schedule does not take.
    """
    kind = SCHEDULES.get(name)
    if kind is None:
        raise UsageError(
            "IRC467", f"there is no pipeline schedule {name!r}", help=f"choose {', '.join(SCHEDULES)}"
        )
    for count, what in ((devices, "devices"), (micro_batches, "micro-batches"), (chunks, "chunks")):
        if count is not None and count < 1:
            raise UsageError("IRC469", f"a pipeline cannot have {count} {what}", help="give 1 or more")
    if kind.chunks is not None and chunks not in (None, kind.chunks):
        raise UsageError(
            "IRC468",
            f"{name} has {kind.chunks} stages on each device, not {chunks}",
            help=f"give {kind.chunks}, or choose interleaved, which takes any number",
        )
    kind.check(devices, micro_batches)
    v = kind.chunks or chunks or 2
    lines = tuple(
        tuple(_numbered(kind.steps(device, devices, micro_batches, v), micro_batches))
        for device in range(devices)
    )
    return PipelineSchedule(
        name,
        tuple(kind.device_of(stage, devices) for stage in range(v * devices)),
        micro_batches,
        lines,
        frozenset(a for device, line in enumerate(lines) for a in kind.overlapped(line, device, devices)),
    )


def _numbered(steps: Iterable[tuple[int, Work]], micro_batches: int) -> Iterator[Action]:
    """Yields the actions of a device: the micro-batches of each stage come in order, forward and backward.

    Steps beyond the last micro-batch are left out.
    """
    done: defaultdict[tuple[int, Work], int] = defaultdict(int)
    for stage, work in steps:
        counted = (_I, _W) if work is _B else (work,)
        micro_batch = done[stage, counted[0]]
        for part in counted:
            done[stage, part] += 1
        if micro_batch < micro_batches:
            yield Action(stage, work, micro_batch)


def _around(stage: int, p: int) -> int:
    """Stages go around the devices: 0 1 2 3 0 1 2 3."""
    return stage % p


def _there_and_back(stage: int, p: int) -> int:
    """Stages go to the last device and back, as a V: 0 1 2 3 3 2 1 0."""
    return min(stage, 2 * p - 1 - stage)


# ---------------------------------------------------------------------- one stage on each device


def _gpipe(device: int, p: int, m: int, v: int) -> _Steps:
    """All forwards, then all backwards. It takes any p and m.

    Source:
        Huang et al., GPipe (NeurIPS 2019), with the backwards in the order of the forwards.
    """
    return [(device, _F)] * m + [(device, _B)] * m


def _one_forward_one_backward(device: int, p: int, m: int, v: int) -> _Steps:
    """Runs as many forwards ahead as there are stages behind, then one forward and one backward in turn.

    It takes any p and m; torch's Schedule1F1B refuses m < p.

    Source:
        Narayanan et al., PipeDream (SOSP 2019), flushed after each step.
    """
    ahead = min(p - 1 - device, m)
    return [(device, _F)] * ahead + [(device, _F), (device, _B)] * (m - ahead) + [(device, _B)] * ahead


def _zero_bubble_h1(device: int, p: int, m: int, v: int) -> _Steps:
    """1F1B with split backwards; on device r each weight gradient comes r backwards later than it could.

    So no device holds more than p micro-batches, as much as the first one of 1F1B. It takes any p and m.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), schedule ZB-H1. In torch it is
        ScheduleInterleavedZeroBubble with one stage on each device, which refuses an m that is not a multiple
        of m // p; the order is defined there too.
    """
    ahead = min(p - 1 - device, m)
    steps = [(device, _F)] * ahead
    for backward in range(m):
        steps += [(device, _F)] * (backward < m - ahead) + [(device, _I)]
        steps += [(device, _W)] * (backward >= device)
    return steps + [(device, _W)] * min(device, m)


# ---------------------------------------------------------------------- v stages on each device


def _round(p: int, m: int) -> int:
    """The micro-batches that an interleaved schedule takes through a chunk before the next chunk."""
    return m // max(m // p, 1)


def _check_interleaved(p: int, m: int) -> None:
    rounds = max(m // p, 1)
    if m % rounds:
        raise UsageError(
            "IRC468",
            f"interleaved takes micro-batches in equal rounds, and {m} are not {rounds} times as many",
            help=f"give {rounds * p} or {(rounds + 1) * p} micro-batches, or choose 1f1b",
        )


def _interleaved(device: int, p: int, m: int, v: int) -> _Steps:
    """1F1B over v chunks of each device, q micro-batches through one chunk and then through the next.

    It takes m <= p with q = m, multiples of p with q = p, and any other multiple of m // p, with q > p.

    Source:
        Narayanan et al., Megatron-LM (SC 2021), section 2.2, for multiples of p.
    """
    q = _round(p, m)
    chunks = [k // q % v for k in range(v * m)]
    forward = [(device + p * chunk, _F) for chunk in chunks]
    backward = [(device + p * (v - 1 - chunk), _B) for chunk in chunks]
    ahead = min((v - 1) * q + 2 * (p - 1 - device), v * m)
    in_turn = [step for pair in zip(forward[ahead:], backward, strict=False) for step in pair]
    return forward[:ahead] + in_turn + backward[v * m - ahead :]


# ---------------------------------------------------------------------- two stages on each device, as a V


def _zero_bubble_v(device: int, p: int, m: int, v: int) -> _Steps:
    """Zero bubble with the memory of 1F1B: the first device has the last stage too, so backward begins early.

    It takes any p and m; with fewer than 2p - 1 micro-batches it is that of 2p - 1, without the missing ones.

    Source:
        Qi et al., Pipeline Parallelism with Controllable Memory (NeurIPS 2024), and section 6 of Zero Bubble
        Pipeline Parallelism (ICLR 2024), schedule ZB-V.
    """
    down, up = device, 2 * p - 1 - device
    n = max(m, 2 * p - 1)
    downs_left = n - (2 * p - 1 - device)  # forwards of the way down that are left for the steady part
    steps = [(down, _F)] * (2 * (p - device) - 1) + [(up, _F), (down, _F)] * device
    steps += [(up, _F), (up, _I), (up, _W)] * (p - device)
    for turn in range(n - p):
        steps += [(down, _F)] * (turn < downs_left)
        steps += [(down, _I), (down, _W), (up, _F), (up, _I), (up, _W)]
    steps += [(down, _I), (up, _I)] * device + [(down, _I), (down, _W)] * (p - device)
    return steps + [(up, _W)] * device + [(down, _W)] * device


def _check_dual_pipe_v(p: int, m: int) -> None:
    if m < 2 * p:
        raise UsageError(
            "IRC468",
            f"dualpipev on {p} devices takes {2 * p} micro-batches or more, one for each stage, not {m}",
            help=f"give {2 * p} micro-batches, or choose zbv, which takes any number",
        )


def _dual_pipe_v(device: int, p: int, m: int, v: int) -> _Steps:
    """A forward of one chunk beside a backward of the other in turn, weight gradients apart at both ends.

    It takes m >= 2p.

    Source:
        DeepSeek-AI, DualPipe (DeepSeek-V3 technical report, 2024), cut in half.
    """
    down, up, behind = device, 2 * p - 1 - device, p - 1 - device
    steps = [(down, _F)] * (2 * behind) + [(down, _F), (up, _F)] * (device + 1)
    steps += [(up, _I), (up, _W), (up, _F)] * behind
    steps += [(down, _F), (up, _B), (up, _F), (down, _B)] * (m - 2 * p + device + 1)
    steps += [(up, _B), (up, _F), (down, _B)] * behind
    turns = [up, down] * (device + 1)
    whole, split = turns[: device + 1], turns[device + 1 :]
    steps += [(stage, _B) for stage in whole] + [(stage, _I) for stage in split]
    waiting = split + [down] * behind  # weight gradients, in the order in which they become possible
    for stage in waiting[:behind]:
        steps += [(stage, _W), (down, _I)]
    return steps + [(stage, _W) for stage in waiting[behind:]]


def _dual_pipe_v_overlapped(line: Sequence[Action], device: int, p: int) -> list[Action]:
    """All forwards right before a whole backward, but the first one of the last device."""
    found = [a for a, b in itertools.pairwise(line) if a.work is _F and b.work is _B]
    return found[1:] if device == p - 1 else found


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(1, _around, _gpipe),
    "1f1b": ScheduleKind(1, _around, _one_forward_one_backward),
    "interleaved": ScheduleKind(None, _around, _interleaved, _check_interleaved),
    "zb-h1": ScheduleKind(1, _around, _zero_bubble_h1),
    "zbv": ScheduleKind(2, _there_and_back, _zero_bubble_v),
    "dualpipev": ScheduleKind(2, _there_and_back, _dual_pipe_v, _check_dual_pipe_v, _dual_pipe_v_overlapped),
}
"""All known schedules, by name."""
