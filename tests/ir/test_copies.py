"""Copies to tiers in schedules: what they take in memory and time, how they print, and what is refused."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.random_copies import TIERS, with_random_copies
from support.strategies import Sample, graphs

from irc.ir import (
    Compute,
    Direction,
    Fetch,
    Free,
    Instruction,
    Offload,
    Schedule,
    Storage,
    Tier,
    VerificationError,
    Wait,
    liveness,
    parse_program,
    print_program,
    same_schedule,
    step_times,
    stored_bytes,
    verify_schedule,
    with_frees,
)
from irc.ir.graph import Region


def keep_all(sample: Sample) -> Schedule:
    operations = sample.graph.operations
    forward = [node for node in operations if node.region is Region.FORWARD]
    return with_frees(sample.graph, forward, [node for node in operations if node.region is Region.BACKWARD])


@st.composite
def copied(draw: st.DrawFn) -> tuple[Sample, Schedule]:
    """A schedule with at least one copy out and back."""
    sample = draw(graphs())
    schedule = with_random_copies(keep_all(sample), draw(st.integers(0, 1 << 20)), rate=1.0)
    assume(any(isinstance(item, Fetch) for item in schedule.instructions))
    return sample, schedule


def edited(schedule: Schedule, instructions: Iterable[Instruction]) -> Schedule:
    return replace(schedule, instructions=tuple(instructions))


def code_of(sample: Sample, schedule: Schedule, tiers: Sequence[Tier] = TIERS) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_schedule(schedule, sample.workspace_bytes, tiers=tiers)
    return caught.value.code


@given(copied())
def test_copies_are_accepted_and_both_counts_of_memory_agree(drawn: tuple[Sample, Schedule]) -> None:
    sample, schedule = drawn
    timeline = verify_schedule(schedule, sample.workspace_bytes, tiers=TIERS)
    assert timeline == liveness(schedule, sample.workspace_bytes)
    assert timeline.after_bytes[-1] == liveness(keep_all(sample), sample.workspace_bytes).after_bytes[-1]


@given(copied())
def test_what_is_fetched_counts_from_its_fetch_and_nothing_from_its_free(
    drawn: tuple[Sample, Schedule],
) -> None:
    sample, schedule = drawn
    after = liveness(schedule, sample.workspace_bytes).after_bytes
    for step, item in enumerate(schedule.instructions):
        change = after[step] - (after[step - 1] if step else sample.graph.static_bytes)
        if isinstance(item, Fetch):
            assert change == item.storage.nbytes
        elif isinstance(item, Free):
            assert change == -item.storage.nbytes
        elif isinstance(item, Offload | Wait):
            assert change == 0


@given(copied())
def test_tiers_are_empty_at_the_end_and_hold_what_is_away(drawn: tuple[Sample, Schedule]) -> None:
    _, schedule = drawn
    held = stored_bytes(schedule)
    away: set[Storage] = set()
    for step, item in enumerate(schedule.instructions):
        if isinstance(item, Free):
            away.add(item.storage)
        elif isinstance(item, Fetch):
            away.remove(item.storage)
            assert sum(nbytes[step] for nbytes in held.values()) >= item.storage.nbytes
        fetched_later = {i.storage for i in schedule.instructions[step + 1 :] if isinstance(i, Fetch)}
        there = sum(s.nbytes for s in away & fetched_later)
        assert sum(nbytes[step] for nbytes in held.values()) >= there
    assert all(nbytes[-1] == 0 for nbytes in held.values())


@given(copied())
def test_programs_with_copies_read_back_equal(drawn: tuple[Sample, Schedule]) -> None:
    _, schedule = drawn
    assert same_schedule(parse_program(print_program(schedule)), schedule)


# ------------------------------------------------------------------------------------------------ times


@given(copied(), st.booleans())
def test_times_are_those_of_one_line_of_computing_and_of_one_copy_at_a_time(
    drawn: tuple[Sample, Schedule], is_duplex: bool
) -> None:
    sample, schedule = drawn
    tiers = [Tier(tier.name, 1 << 40, 3.0, 2.0, 0.25, is_duplex) for tier in TIERS]
    times = step_times(schedule, sample.seconds, tiers)
    assert (
        times.step_seconds
        >= times.compute_seconds
        == pytest.approx(sum(sample.seconds[node] for node in schedule.computed))
    )
    assert list(times.start_seconds[1:]) == list(times.end_seconds[:-1])
    by_name = {tier.name: tier for tier in tiers}
    busy: dict[object, float] = {}
    ends: dict[Storage, float] = {}
    for copy in times.copies:
        tier = by_name[copy.tier]
        channel = tier.channel(copy.direction)
        assert copy.start_seconds >= max(times.start_seconds[copy.step], busy.get(channel, 0.0))
        assert copy.end_seconds == pytest.approx(
            copy.start_seconds + tier.copy_seconds(copy.storage.nbytes, copy.direction)
        )
        busy[channel] = copy.end_seconds
    pending = iter(times.copies)
    for step, item in enumerate(schedule.instructions):
        if isinstance(item, Offload | Fetch):
            ends[item.storage] = next(pending).end_seconds
        elif isinstance(item, Wait):
            assert times.end_seconds[step] >= ends[item.storage]
    without = step_times(keep_all(sample), sample.seconds)
    assert without.step_seconds == pytest.approx(without.compute_seconds) and not without.exposed_seconds


def test_a_step_by_hand() -> None:
    text = """
graph loss_bytes=0 {
  storage @w 8 cpu
  storage @a 600 cpu
  storage @b 600 cpu
  storage @t 8 cpu
  storage @g 8 cpu
  input %w: float32[2]{1} @w parameter "w" requires_grad
  input %t: float32[2]{1} @t tangent "0"
forward:
  f = test.f(%w) -> %a: float32[150]{1} @a
  h = test.h(%w) -> %b: float32[2]{1} @b
backward:
  k = test.k(%t, %a) -> %g: float32[2]{1} @g
  output %b "0"
  gradient %g "parameter:w"
}
schedule {
  compute f keep(@a)
  offload @a to host
  compute h keep(@b)
  wait @a
  free @a
  loss
  fetch @a from host
  wait @a
  compute k keep(@g)
  free @a
}
"""
    schedule = parse_program(text)
    seconds = {node: float(n) for n, node in enumerate(schedule.graph.operations, 1)}
    times = step_times(schedule, seconds, [Tier("host", 1000, 150.0, 300.0, 0.5)])
    out, back = times.copies
    assert (out.start_seconds, out.end_seconds) == (1.0, 5.5)  # begun after f, 600 B at 150 B/s, and 0.5 s
    assert times.start_seconds[4] == 5.5  # h ends at 3.0; 2.5 s are waited for
    assert (back.start_seconds, back.end_seconds) == (5.5, 8.0)
    assert (times.step_seconds, times.compute_seconds, times.exposed_seconds) == (11.0, 6.0, 5.0)
    assert times.busy_seconds("host", Direction.OUT) == 4.5
    assert times.busy_seconds("host", Direction.IN) == 2.5
    held = stored_bytes(schedule)["host"]
    assert held == (0, 600, 600, 600, 600, 600, 600, 0, 0, 0)
    assert liveness(schedule, {}).after_bytes[3:7] == (1208, 608, 616, 1216)


# ------------------------------------------------------------------------------------- what is refused


def _at(schedule: Schedule, kind: type[Instruction], data: st.DataObject) -> int:
    steps = [k for k, item in enumerate(schedule.instructions) if isinstance(item, kind)]
    assume(steps)
    return data.draw(st.sampled_from(steps))


_DROPPED: list[tuple[type[Instruction], set[str]]] = [
    (Offload, {"IRC136", "IRC137"}),
    (Fetch, {"IRC120", "IRC121", "IRC136", "IRC137"}),
    (Wait, {"IRC135", "IRC136", "IRC138"}),
]


@pytest.mark.parametrize(("kind", "codes"), _DROPPED, ids=["offload", "fetch", "wait"])
@given(drawn=copied(), data=st.data())
def test_a_dropped_copy_or_wait_is_caught(
    kind: type[Instruction], codes: set[str], drawn: tuple[Sample, Schedule], data: st.DataObject
) -> None:
    sample, schedule = drawn
    step = _at(schedule, kind, data)
    items = schedule.instructions
    assert code_of(sample, edited(schedule, items[:step] + items[step + 1 :])) in codes


@given(copied(), st.data())
def test_a_copy_begun_twice_and_a_second_wait_are_caught(
    drawn: tuple[Sample, Schedule], data: st.DataObject
) -> None:
    sample, schedule = drawn
    for kind, code in ((Offload, "IRC135"), (Fetch, "IRC136"), (Wait, "IRC137")):
        step = _at(schedule, kind, data)
        items = schedule.instructions
        assert code_of(sample, edited(schedule, (*items[: step + 1], *items[step:]))) == code


@given(copied(), st.data())
def test_what_no_tier_takes_is_caught(drawn: tuple[Sample, Schedule], data: st.DataObject) -> None:
    sample, schedule = drawn
    graph = sample.graph
    fixed = sorted(graph.static_storages | graph.output_storages, key=lambda s: s.name)
    storage = data.draw(st.sampled_from(fixed))
    begun = (Offload(storage, "near"), *schedule.instructions)
    assert code_of(sample, edited(schedule, begun)) == "IRC135"


@given(copied())
def test_a_tier_that_is_missing_or_full_is_caught(drawn: tuple[Sample, Schedule]) -> None:
    sample, schedule = drawn
    assert code_of(sample, schedule, ()) == "IRC139"
    most = {name: max(nbytes) for name, nbytes in stored_bytes(schedule).items()}
    small = [replace(tier, capacity_bytes=most.get(tier.name, 0)) for tier in TIERS]
    verify_schedule(schedule, sample.workspace_bytes, tiers=small)
    less = [replace(tier, capacity_bytes=tier.capacity_bytes - 1) for tier in small]
    assert code_of(sample, schedule, less) == "IRC139"


def _swapped(schedule: Schedule, is_first: Callable[[Instruction, Instruction], bool]) -> Schedule | None:
    """The schedule with the first such pair of neighbours exchanged."""
    items = list(schedule.instructions)
    for step, (one, two) in enumerate(pairwise(items)):
        if is_first(one, two):
            items[step : step + 2] = [two, one]
            return edited(schedule, items)
    return None


@given(copied())
def test_a_free_before_its_wait_is_caught(drawn: tuple[Sample, Schedule]) -> None:
    sample, schedule = drawn
    broken = _swapped(
        schedule, lambda a, b: isinstance(a, Wait) and isinstance(b, Free) and a.storage is b.storage
    )
    assume(broken is not None)
    assert broken is not None and code_of(sample, broken) == "IRC138"


@given(copied())
def test_a_read_before_its_wait_is_caught(drawn: tuple[Sample, Schedule]) -> None:
    sample, schedule = drawn
    fetched: set[Storage] = set()
    items = list(schedule.instructions)
    for step, item in enumerate(items):
        if isinstance(item, Fetch):
            fetched.add(item.storage)
        elif isinstance(item, Wait) and item.storage in fetched:
            later = items[step + 1 :]
            reader = next(
                k
                for k, i in enumerate(later)
                if (isinstance(i, Compute) and item.storage in sample.graph.reads(i.node))
                or (isinstance(i, Free | Offload) and i.storage is item.storage)
            )
            moved = [*items[:step], *later[: reader + 1], item, *later[reader + 1 :]]
            assert code_of(sample, edited(schedule, moved)) in {"IRC135", "IRC138"}
            return
    raise AssertionError("something is fetched, and waited for")
