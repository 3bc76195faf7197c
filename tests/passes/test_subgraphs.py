"""Several graphs in one step: what each takes, the choice for all, and holding less of what is held."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import at_random, chains, problem_of
from support.strategies import Sample, graphs

from irc.ir import liveness, verify_schedule
from irc.passes import CheckpointProblem, Costs, Program, Solution
from irc.passes.subgraphs.choose_together import choose_together
from irc.passes.subgraphs.footprint import Footprint, footprint, outputs_bytes, saved_by, tangents_bytes
from irc.passes.subgraphs.leaner_backward import leaner_backwards
from irc.passes.subgraphs.plan_subgraph import plan_subgraph
from irc.passes.subgraphs.subgraph import AmbientMemory, Subgraph, SubgraphSolutions

FEW = examples(12)
samples = chains() | graphs()
seeds = st.integers(0, 1 << 32)


def program_of(sample: Sample) -> Program:
    return Program(sample.graph, Costs(sample.seconds, sample.workspace_bytes, "made up"))


def part_above(parent: Subgraph | None, sample: Sample, alive_bytes: int) -> Subgraph:
    """A part in a chain: later outputs and gradients add to what is alive around it."""
    graph = sample.graph
    subgraph = Subgraph(f"part {alive_bytes}", SubgraphSolutions(program_of(sample)), parent)
    subgraph.ambient = AmbientMemory(
        forward_bytes=graph.static_bytes + alive_bytes,
        loss_bytes=graph.static_bytes + alive_bytes + outputs_bytes(graph) + tangents_bytes(graph),
        backward_bytes=graph.static_bytes + alive_bytes + 64,
    )
    if parent is not None:
        parent.children.append(subgraph)
    return subgraph


@given(samples, seeds)
@FEW
def test_a_footprint_says_when_a_schedule_takes_what(sample: Sample, seed: int) -> None:
    problem = problem_of(sample)
    assume(problem.forward)
    schedule = at_random(problem, Random(seed)).schedule
    bare = replace(schedule, graph=replace(sample.graph, loss_bytes=0, loss_held_bytes=0))
    taken = footprint(schedule, sample.workspace_bytes)
    peak_bytes = liveness(bare, sample.workspace_bytes).peak_bytes
    assert max(taken.forward_bytes, taken.backward_bytes) == peak_bytes - sample.graph.static_bytes
    held = sum(storage.nbytes for storage in saved_by(schedule))
    assert taken.saved_bytes == held
    least = held + outputs_bytes(sample.graph) + tangents_bytes(sample.graph)
    assert taken.backward_bytes >= least


@pytest.mark.slow
@pytest.mark.default
@given(samples, samples, st.integers(0, 100))
@FEW
def test_the_choice_for_two_parts_fits_and_is_no_worse_than_the_best_pair(
    lower: Sample, upper: Sample, percent: int
) -> None:
    root = part_above(None, lower, 0)
    subgraphs = [root, part_above(root, upper, 100)]
    known = [subgraph.solutions.schedules(math.inf) for subgraph in subgraphs]
    pairs = [dict(zip(subgraphs, pair, strict=True)) for pair in itertools.product(*known)]

    def peak(pair: Mapping[Subgraph, tuple[CheckpointProblem, Solution, Footprint]]) -> int:
        taken = {subgraph: entry[2] for subgraph, entry in pair.items()}
        return max(subgraph.peak_bytes(taken) for subgraph in subgraphs)

    peaks = sorted(peak(pair) for pair in pairs)
    budget = peaks[0] + (peaks[-1] - peaks[0]) * percent // 100
    best = min(
        math.fsum(solution.seconds for _, solution, _ in pair.values())
        for pair in pairs
        if peak(pair) <= budget
    )
    choices = choose_together(root, budget, time_limit=5)
    assert choices is not None
    taken = {subgraph: choice.footprint for subgraph, choice in choices.items()}
    assert max(subgraph.peak_bytes(taken) for subgraph in subgraphs) <= budget
    least = math.fsum(sum(sample.seconds[n] for n in sample.graph.operations) for sample in (lower, upper))
    assert math.fsum(c.solution.seconds for c in choices.values()) <= best + 1e-3 * least + 1e-12
    for subgraph, choice in choices.items():
        workspaces = subgraph.solutions.program.costs
        assert workspaces is not None
        verify_schedule(choice.schedule, workspaces.workspace_bytes, peak_bytes=choice.plan.peak_bytes)
        assert choice.plan.peak_bytes <= choice.plan.budget_bytes
    assert choose_together(root, peaks[0] - peaks[0] // 3 - 1, time_limit=5) is None or peaks[0] < 3


@given(samples, samples)
@FEW
def test_a_part_is_planned_in_what_the_others_leave(lower: Sample, upper: Sample) -> None:
    root = part_above(None, lower, 0)
    above = part_above(root, upper, 100)
    chosen = {subgraph: subgraph.solutions.baseline for subgraph in (root, above)}
    budget = max(subgraph.peak_bytes(chosen) for subgraph in chosen)
    for subgraph in (root, above):
        choice = plan_subgraph(subgraph, budget, chosen, time_limit=5)
        taken = {**chosen, subgraph: choice.footprint}
        assert max(other.peak_bytes(taken) for other in chosen) <= budget
        assert choice.plan.overhead == 0


@given(samples, seeds, st.integers(0, 100))
@FEW
def test_what_waits_can_go_on_with_less_of_what_it_has_saved(sample: Sample, seed: int, percent: int) -> None:
    bare = replace(sample.graph, loss_bytes=0, loss_held_bytes=0)
    problem = CheckpointProblem(bare, problem_of(sample).costs)
    ran = at_random(problem, Random(seed))
    saved = saved_by(ran.schedule)
    floor, top = problem.floor_bytes, problem.keep_all.peak_bytes
    found = list(leaner_backwards(problem, saved, floor + (top - floor) * percent // 100))
    assert found
    peaks = [footprint(s.schedule, sample.workspace_bytes).backward_bytes for s in found[:-1]]
    assert all(peak <= top for peak in peaks)
    for solution in found:
        verify_schedule(solution.schedule, sample.workspace_bytes, peak_bytes=solution.peak_bytes)
        assert saved_by(solution.schedule) <= saved
