"""Known ways to plan with copies: they keep what they promise, and the joint plan is no slower."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import problem_of
from support.strategies import Sample, with_annotations
from support.swapping import chain, program_of, samples, tiers, works

from irc.ir import (
    Annotation,
    BudgetError,
    Compute,
    Fetch,
    Free,
    Loss,
    Offload,
    Policy,
    Schedule,
    Storage,
    Tier,
    UsageError,
    step_times,
    stored_bytes,
    verify_schedule,
)
from irc.passes import CheckpointProblem, PlanMemory, Planner, Solution
from irc.passes.offload.local_search import improve
from irc.passes.offload.offload_problem import OffloadProblem
from irc.passes.offload.strategies import known_offload_solutions
from irc.passes.published.chain import Block, articulations, blocks_of
from irc.passes.published.lms import LOOK_AHEADS, lms_all
from irc.passes.published.pofo import Segment, segments_within
from irc.passes.remat.search import Incumbent

SMALL = examples(12)


def verified(work: OffloadProblem, solution: Solution, budget_bytes: int | None = None) -> None:
    verify_schedule(
        solution.schedule,
        work.problem.costs.workspace_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=solution.peak_bytes,
        tiers=work.tiers,
    )
    times = step_times(solution.schedule, work.problem.costs.seconds, work.tiers)
    assert solution.seconds == pytest.approx(times.step_seconds)
    capacities = {tier.name: tier.capacity_bytes for tier in work.tiers}
    for name, held in stored_bytes(solution.schedule).items():
        assert max(held) <= capacities[name]


# ------------------------------------------------------------------------------------------ all strategies


@SMALL
@given(works() | works(with_annotations(samples)))
def test_every_schedule_verifies(work: OffloadProblem) -> None:
    for name, solution in known_offload_solutions(work):
        verified(work, solution, None if name == "lms" else work.budget_bytes)


@SMALL
@given(works())
def test_lms_and_swap_compute_nothing_twice(work: OffloadProblem) -> None:
    for name, solution in known_offload_solutions(work):
        if name in ("lms", "swap"):
            assert solution.order == work.problem.keep_all.order


@pytest.mark.default
@SMALL
@given(samples | with_annotations(samples), tiers(), st.integers(0, 8))
def test_the_joint_plan_is_no_slower_than_any_strategy(
    sample: Sample, offered: tuple[Tier, ...], part: int
) -> None:
    planner = Planner(program_of(sample, offered))
    low, high = planner.problem.floor_bytes, planner.problem.keep_all.peak_bytes
    budget = low + (high - low) * part // 8
    seconds = {
        name: planned(planner, budget, name) for name in ("auto", "lms", "ome", "pofo", "swap", "recompute")
    }
    best = seconds.pop("auto")
    for name, other in seconds.items():
        assert other is None or (best is not None and best <= other * (1 + 1e-9)), name


def planned(planner: Planner, budget: int, strategy: str) -> float | None:
    """Seconds of a step; None where nothing fits."""
    try:
        plan = PlanMemory(budget, strategy, time_limit=20).choose(planner).plan
    except BudgetError as error:
        assert error.minimum_bytes > budget
        return None
    assert plan is not None and plan.peak_bytes <= plan.budget_bytes and plan.step_seconds is not None
    assert strategy == "auto" or plan.strategy == strategy or strategy == "recompute"
    return plan.step_seconds * (1 + plan.overhead)


# ------------------------------------------------------------------------------------- Large Model Support


@SMALL
@given(works(), st.sampled_from(LOOK_AHEADS))
def test_lms_fetches_as_far_ahead_as_it_says(work: OffloadProblem, look_ahead: int) -> None:
    solution = lms_all(work, look_ahead)
    instructions = solution.schedule.instructions
    events = list(itertools.accumulate(isinstance(i, Compute | Loss) for i in instructions))
    reads = reading_events(work.problem, solution.schedule)
    for step, instruction in enumerate(instructions):
        if isinstance(instruction, Fetch):
            following = next(event for event in reads[instruction.storage] if event > events[step])
            # what was just read for the last time in forward cannot be fetched before it has left
            assert following - events[step] - 1 <= look_ahead
            left = next(k for k, i in enumerate(instructions) if i == Free(instruction.storage))
            assert following - events[step] - 1 == look_ahead or events[step] == events[left] + 1


def reading_events(problem: CheckpointProblem, schedule: Schedule) -> dict[Storage, list[int]]:
    """The numbers of the computations, from 1 and with the loss, that read each storage."""
    found: dict[Storage, list[int]] = {}
    events = (i for i in schedule.instructions if isinstance(i, Compute | Loss))
    for number, event in enumerate(events, 1):
        for storage in problem.graph.reads(event.node) if isinstance(event, Compute) else ():
            found.setdefault(storage, []).append(number)
    return found


def test_lms_swaps_all_that_backward_reads(chain_work: OffloadProblem) -> None:
    solution = lms_all(chain_work, 1)
    out = [i.storage for i in solution.schedule.instructions if isinstance(i, Offload)]
    problem = chain_work.problem
    assert out == [s for s in problem.producer if s in problem.read_positions] and len(out) == 7
    assert solution.peak_bytes < problem.keep_all.peak_bytes
    assert solution.seconds > problem.step_seconds
    assert lms_all(chain_work, 0).seconds > solution.seconds


# ------------------------------------------------------------------------------------------- chains, POFO


def straight(count: int = 8, nbytes: int = 600) -> Sample:
    """A chain whose backward reads every value; each operation takes a second."""
    program = chain(count, nbytes)
    assert program.costs is not None
    return Sample(program.graph, program.costs.seconds, program.costs.workspace_bytes)


@pytest.fixture
def chain_work() -> OffloadProblem:
    problem = problem_of(straight())
    return OffloadProblem(problem, (Tier("host", 1 << 20, 600.0, 600.0),), problem.keep_all.peak_bytes // 2)


@SMALL
@given(samples)
def test_blocks_are_the_whole_graph_and_hang_on_their_sources(sample: Sample) -> None:
    problem = problem_of(sample)
    assume(problem.forward)
    blocks = blocks_of(problem)
    assert [b.first for b in blocks[1:]] == [b.end for b in blocks[:-1]]
    assert blocks[0].first == 0 and blocks[-1].end == len(problem.forward)
    assert sum(b.forward_seconds + b.backward_seconds for b in blocks) == pytest.approx(problem.step_seconds)
    sources = [b.source for b in blocks if b.source is not None]
    saved = [s for b in blocks for s in b.saved]
    assert len(saved) == len(set(saved))
    assert set(problem.read_positions) - set(sources) == set(saved) - set(sources)
    for block in blocks[1:]:
        inside = problem.forward[block.first :]
        made = {s for node in inside for s in problem.graph.allocates(node)}
        read = {s for node in inside for s in problem.forward_reads[node]} - made
        assert {s for s in read if s.nbytes} == {block.source}


def test_articulations_of_a_chain() -> None:
    problem = problem_of(straight(6))
    assert list(articulations(problem)) == [1, 2, 3, 4, 5]
    assert len(blocks_of(problem)) == 6
    assert len(blocks_of(problem, most=4)) == 4


@SMALL
@given(samples, st.integers(0, 10), st.sampled_from((1.0, 100.0, 1e9)), st.sampled_from((1.0, 50.0)))
def test_pofo_is_the_best_choice_of_its_class(
    sample: Sample, part: int, out_rate: float, back_rate: float
) -> None:
    problem = problem_of(sample)
    blocks = blocks_of(problem, most=4)
    low, high = problem.floor_bytes, problem.keep_all.peak_bytes
    budget = low + (high - low) * part // 10
    unit = problem.keep_all.peak_bytes
    tier = Tier("host", 1 << 60, out_rate * unit, back_rate * unit / 100)
    lost = {choice: seconds_lost(blocks, choice, tier, budget) for choice in choices(len(blocks))}
    fitting = {choice: seconds for choice, seconds in lost.items() if seconds is not None}
    chosen = segments_within(blocks, tier, budget, parts=None)
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert fitting[tuple(chosen)] == pytest.approx(min(fitting.values()), abs=1e-9)
    rounded = segments_within(blocks, tier, budget)
    assert rounded is None or tuple(rounded) in fitting


def choices(count: int, first: int = 0) -> Iterator[tuple[Segment, ...]]:
    """All ways to treat the blocks from `first` on."""
    if first == count:
        yield ()
    for end in range(first + 1, count + 1):
        for is_recomputed in (True, False) if end == first + 1 else (True,):
            for is_offloaded in (True, False):
                for rest in choices(count, end):
                    yield (Segment(first, end, is_recomputed, is_offloaded), *rest)


class Queue:
    """What a channel has still to carry, first come first served."""

    def __init__(self, rate: float, budget: float) -> None:
        self.rate, self.budget = rate, budget
        self.left: list[float] = []
        self.waited = 0.0

    def carry(self, nbytes: float) -> None:
        while self.left and nbytes > 0:
            part = min(self.left[0], nbytes)
            nbytes -= part
            self.left[0] -= part
            if self.left[0] <= 0:
                self.left.pop(0)

    def run(self, needed: float, seconds: float) -> bool:
        """Runs something that needs so many bytes beside the queue; False where it never fits."""
        over = max(needed + sum(self.left) - self.budget, 0.0)
        if needed > self.budget:
            return False
        self.waited += over / self.rate
        self.carry(over)
        self.carry(seconds * self.rate)
        return True


def seconds_lost(blocks: Sequence[Block], choice: Sequence[Segment], tier: Tier, budget: int) -> float | None:
    """What a choice costs: forward with the copies out, and backward with the copies back, each alone."""
    again = 0.0
    going = Queue(tier.out_bytes_per_second, budget)
    kept = 0
    for segment in choice:
        inside = blocks[segment.first : segment.end]
        source = inside[0].source_bytes
        if segment.is_recomputed:
            kept += sum(block.forced_bytes for block in inside)
            stored = source
        else:
            stored = sum(s.nbytes for s in inside[0].saved) + source * inside[0].is_source_read
        if not segment.is_recomputed and not going.run(
            kept + inside[0].keeping_bytes, inside[0].forward_seconds
        ):
            return None
        if segment.is_offloaded:
            going.left.append(stored)
        else:
            kept += stored
        for number, block in enumerate(inside if segment.is_recomputed else ()):
            here = block.forward_bytes - (source if number == 0 else 0)
            if not going.run(kept + here, block.forward_seconds):
                return None
    coming = Queue(tier.in_bytes_per_second, budget)
    kept = 0
    for segment in choice:
        inside = blocks[segment.first : segment.end]
        source = inside[0].source_bytes
        seconds = sum(block.backward_seconds for block in inside)
        if segment.is_recomputed:
            kept += sum(block.forced_bytes for block in inside)
            more = sum(block.again_seconds for block in inside[:-1]) + inside[-1].again_last_seconds
            again += more
            seconds += more
            stored = source
            needed = remade = 0
            for number, block in enumerate(inside):
                mine = block.source_bytes if number else 0
                running = max(block.forward_bytes, block.keeping_bytes) - block.base_bytes
                needed = max(needed, inside[-1].entry_bytes + remade + mine + running)
                remade += sum(s.nbytes for s in block.saved) - block.forced_bytes
                remade += mine if block.is_source_read else 0
                needed = max(needed, remade + block.backward_bytes)
        else:
            stored = sum(s.nbytes for s in inside[0].saved) + source * inside[0].is_source_read
            needed = inside[0].backward_bytes
        if not coming.run(kept + stored + needed, seconds):
            return None
        if segment.is_offloaded:
            coming.left.append(stored)
        else:
            kept += stored
    left = sum(going.left) / going.rate + sum(coming.left) / coming.rate
    return again + going.waited + coming.waited + left


def test_pofo_offloads_where_copies_are_fast_and_recomputes_where_they_are_slow() -> None:
    blocks = blocks_of(problem_of(straight()))
    budget = problem_of(straight()).keep_all.peak_bytes * 6 // 10
    fast = segments_within(blocks, Tier("host", 1 << 40, 1e6, 1e6), budget)
    slow = segments_within(blocks, Tier("host", 1 << 40, 1.0, 1.0), budget)
    assert fast is not None and slow is not None
    again = [
        sum(blocks[k].again_seconds for s in found for k in range(s.first, s.end - 1))
        for found in (fast, slow)
    ]
    away = [sum(s.is_offloaded for s in found) for found in (fast, slow)]
    assert again[0] == 0 < again[1] and away[0] > away[1]
    assert segments_within(blocks, Tier("host", 1 << 40, 1e6, 1e6), 100) is None


# ------------------------------------------------------------------------------------------------ the pass


def test_each_strategy_is_a_strategy_of_the_pass(chain_work: OffloadProblem) -> None:
    program = program_of(straight(), chain_work.tiers)
    found = {}
    for name in ("auto", "recompute", "lms", "ome", "pofo", "swap"):
        made = PlanMemory(strategy=name, budget="60%").run(program)
        assert made.plan is not None and made.plan.peak_bytes <= made.plan.budget_bytes
        found[name] = made.plan.overhead
        copies = {d.action for d in made.plan.decisions} & {"swap"}
        assert bool(copies) == (name not in ("recompute",)), name
    assert found["auto"] == min(found.values())
    assert found["recompute"] > 0


def test_what_is_wrong_with_a_strategy_is_said(chain_work: OffloadProblem) -> None:
    with pytest.raises(UsageError, match="there is no strategy 'mls'") as caught:
        PlanMemory(strategy="mls").check()
    assert caught.value.code == "IRC403"
    assert caught.value.help is not None and "lms, ome, pofo, swap, recompute" in caught.value.help
    program = program_of(straight(), ())
    with pytest.raises(UsageError, match="strategy lms copies, and there is no tier") as caught:
        PlanMemory(strategy="lms").run(program)
    assert caught.value.code == "IRC403"
    bare = program_of(straight(), chain_work.tiers)
    with pytest.raises(BudgetError, match="with copies to host by strategy pofo, over the budget"):
        PlanMemory(100, "pofo").run(bare)


def test_improving_keeps_what_is_requested() -> None:
    """What is to be made again is not kept, although that were faster."""
    sample = straight(6)
    annotation = Annotation(Policy.RECOMPUTE, "irc.recompute(a)")
    made = {
        node: replace(node, annotation=annotation if node.name in ("f1", "f2") else None)
        for node in sample.graph.nodes
    }
    graph = replace(sample.graph, nodes=tuple(made.values()), annotations=(annotation,))
    requested = Sample(
        graph, {made[n]: s for n, s in sample.seconds.items()}, dict.fromkeys(made.values(), 0)
    )
    work = OffloadProblem(problem_of(requested), (Tier("host", 1 << 20, 1e6, 1e6),), 1 << 30)
    incumbent = Incumbent("keep-all", work.problem.keep_all)
    improve(work, incumbent, deadline=time.thread_time() + 5)
    verified(work, incumbent.best)
    assert incumbent.best.seconds == work.problem.keep_all.seconds > work.problem.step_seconds
