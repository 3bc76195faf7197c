"""Graphs whose parameters and optimizer states live in a tier, and schedules that bring them at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from irc.ir import Compute, Fetch, Free, Graph, Instruction, Offload, Schedule, Storage, Tier, Wait
from irc.passes import OFFLOADABLE, CheckpointProblem, Costs, Program, offloadable_in
from irc.passes.costs.table import StepCost
from irc.passes.offload.offloaded_parameters import LoadedProgram
from irc.passes.rewrites.release_gradients import release_gradients
from support.exhaustive import at_random
from support.strategies import Sample, graphs

__all__ = ["FAR", "applied", "moved", "offload_schedule", "offloaded_names"]

FAR = Tier("far", 1 << 40, 3.0, 5.0, 0.1)


@st.composite
def applied(draw: st.DrawFn) -> Sample:
    """Random graphs whose gradients are applied by an optimizer with state."""
    sample = draw(graphs(pinned=False))
    state = st.sampled_from((0, 2, 5, 20))
    parameters = [entry.value for entry in sample.graph.inputs]
    steps = {
        value: StepCost(nbytes + 1, 0, 1.0, nbytes) for value in parameters if (nbytes := draw(state)) >= 0
    }
    graph = release_gradients(sample.graph, steps)
    seconds = {node: sample.seconds.get(node, 1.0) for node in graph.operations}
    workspace_bytes = {node: sample.workspace_bytes.get(node, 0) for node in graph.operations}
    return Sample(graph, seconds, workspace_bytes)


def offloaded_names(graph: Graph, seed: int, tier: Tier = FAR) -> LoadedProgram:
    """The graph with a random part of what can live in a tier there; operations take a second each."""
    draw = random.Random(seed)
    found = offloadable_in(tier.name, graph, OFFLOADABLE, least_bytes=1)
    offloaded_parameters = tuple(offloaded for offloaded in found if draw.random() < draw.choice((0.5, 1.0)))
    operations = graph.operations
    costs = Costs(dict.fromkeys(operations, 1.0), dict.fromkeys(operations, 0), "test")
    return LoadedProgram(Program(graph, costs, tiers=(tier,)), offloaded_parameters, tier, 1.0)


def offload_schedule(graph: Graph, seed: int, tier: Tier = FAR, *, at_once: bool = False) -> Schedule:
    """A valid schedule in which some parameters and states live in a tier, and come and go at random.

    Args:
        graph: A training graph.
        seed: Of all draws.
        tier: Where they live.
        at_once: Whether each operation runs once; else some run again, the results perhaps for nobody.
    """
    loaded = offloaded_names(graph, seed, tier)
    assert loaded.seen.costs is not None
    seen = CheckpointProblem(loaded.seen.graph, loaded.seen.costs)
    chosen = seen.keep_all if at_once else at_random(seen, random.Random(seed))
    schedule = loaded.schedule(loaded.problem(seen).graph, chosen.schedule)
    return moved(schedule, seed)


def moved(schedule: Schedule, seed: int) -> Schedule:
    """The schedule with the copies of offloaded storages begun earlier, and waited for later, at random."""
    draw = random.Random(seed)
    offloaded_parameters = schedule.graph.offloaded_of
    placed: list[tuple[float, Instruction]] = []
    mine: dict[Storage, list[tuple[int, Instruction]]] = {storage: [] for storage in offloaded_parameters}
    for step, instruction in enumerate(schedule.instructions):
        if (
            isinstance(instruction, Fetch | Wait | Offload | Free)
            and instruction.storage in offloaded_parameters
        ):
            mine[instruction.storage].append((step, instruction))
        else:
            placed.append((float(step), instruction))
    for storage, steps in mine.items():
        placed += _spread(schedule, storage, steps, draw)
    placed.sort(key=lambda pair: pair[0])
    return replace(schedule, instructions=tuple(instruction for _, instruction in placed))


def _spread(
    schedule: Schedule, storage: Storage, steps: list[tuple[int, Instruction]], draw: random.Random
) -> Iterator[tuple[float, Instruction]]:
    """The copies of one storage: for each stay a fetch and a wait, perhaps a copy back and a wait, a free."""
    end = float(len(schedule.instructions))
    gone = 0.0
    while steps:
        (fetched, fetch), (_, arrived), *steps = steps
        until = _first_reader(schedule, storage, fetched)
        begun, come = sorted((draw.uniform(gone, fetched), draw.uniform(fetched, until)))
        yield begun, fetch
        yield come, arrived
        step, instruction = steps.pop(0)
        if isinstance(instruction, Offload):
            (_, waited), (_, freed), *steps = steps
            following = end if not steps else float(steps[0][0])
            away, back, gone = sorted(draw.uniform(step, following) for _ in range(3))
            yield away, instruction
            yield back, waited
            yield gone, freed
        else:
            following = end if not steps else float(steps[0][0])
            gone = draw.uniform(step, following)
            yield gone, instruction


def _first_reader(schedule: Schedule, storage: Storage, step: int) -> float:
    graph = schedule.graph
    for later, instruction in enumerate(schedule.instructions[step:], step):
        if isinstance(instruction, Compute):
            node = instruction.node
            state = graph.state_of.get(node.operands[0].storage) if node.releases is not None else None
            if storage in graph.reads(node) or (state is not None and state.storage is storage):
                return float(later)
        elif isinstance(instruction, Free) and instruction.storage is storage:
            return float(later)
    raise AssertionError(storage)
