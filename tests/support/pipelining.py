"""Random pipelines, and a slow simulator of them to hold the fast one to."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx
from hypothesis import strategies as st

from irc.ir.pipeline.schedule import Action, PipelineSchedule, Work
from irc.ir.pipeline.timing import StageCost, Transfer

__all__ = ["Sample", "pipelines", "slow_bytes", "slow_times"]

_SECONDS = st.integers(1, 9).map(lambda n: n / 4)  # sums of them are exact
_BYTES = st.integers(0, 50)


@dataclass(frozen=True)
class Sample:
    """A valid schedule with what each of its stages and transfers takes."""

    schedule: PipelineSchedule
    costs: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]


@st.composite
def pipelines(draw: st.DrawFn) -> Sample:
    """Any placement of a few stages, any possible order, backwards whole or split, skips of stages."""
    devices = draw(st.integers(1, 3))
    device_of = tuple(draw(st.lists(st.integers(0, devices - 1), min_size=1, max_size=5)))
    micro_batches = draw(st.integers(1, 4))
    chains = {
        (stage, micro_batch): [Work.FORWARD, *draw(st.sampled_from([[Work.BACKWARD], _SPLIT]))]
        for stage in range(len(device_of))
        for micro_batch in range(micro_batches)
    }
    lines: list[list[Action]] = [[] for _ in range(devices)]
    left = {key: list(works) for key, works in chains.items()}
    while possible := [key for key in left if left[key] and _may_run(key, left, chains)]:
        stage, micro_batch = draw(st.sampled_from(possible))
        lines[device_of[stage]].append(Action(stage, left[stage, micro_batch].pop(0), micro_batch))
    schedule = PipelineSchedule("any", device_of, micro_batches, tuple(map(tuple, lines)))
    schedule = replace(schedule, overlapped=draw(_overlapped(schedule)))
    costs = tuple(draw(_costs()) for _ in device_of)
    pairs = [(a, b) for a in range(len(device_of)) for b in range(len(device_of)) if a != b]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8)) if pairs else []
    transfers = tuple(Transfer(a, b, draw(_BYTES), draw(_SECONDS)) for a, b in chosen)
    return Sample(schedule, costs, transfers)


@st.composite
def _overlapped(draw: st.DrawFn, schedule: PipelineSchedule) -> frozenset[Action]:
    """Some forwards right before a whole backward, as long as no device waits forever."""
    found: frozenset[Action] = frozenset()
    for before, after in (pair for line in schedule.lines for pair in itertools.pairwise(line)):
        if before.work is Work.FORWARD and after.work is Work.BACKWARD and draw(st.booleans()):
            more = found | {before}
            graph = _dependencies(replace(schedule, overlapped=more))
            if networkx.is_directed_acyclic_graph(graph):
                found = more
    return found


_SPLIT = [Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT]


def _may_run(
    key: tuple[int, int],
    left: Mapping[tuple[int, int], Sequence[Work]],
    chains: Mapping[tuple[int, int], Sequence[Work]],
) -> bool:
    stage, micro_batch = key
    match left[key][0]:
        case Work.FORWARD:
            before = (stage - 1, micro_batch)
            return stage == 0 or len(left[before]) < len(chains[before])
        case Work.WEIGHT_GRADIENT:
            return True
        case _:
            after = (stage + 1, micro_batch)
            return after not in left or len(left[after]) <= len(chains[after]) - 2


@st.composite
def _costs(draw: st.DrawFn) -> StageCost:
    held_bytes = draw(_BYTES)
    return StageCost(
        draw(_SECONDS),
        draw(_SECONDS),
        draw(_SECONDS),
        draw(st.none() | _SECONDS),
        static_bytes=draw(_BYTES),
        held_bytes=held_bytes,
        held_after_input_bytes=draw(st.integers(0, held_bytes)),
        working_bytes=draw(st.dictionaries(st.sampled_from(Work), _BYTES)),
    )


# ---------------------------------------------------------------------- the slow simulator


_Sent = tuple[Transfer, int]
Times = dict[Action | _Sent, tuple[float, float]]


def slow_times(sample: Sample) -> Times:
    """Start and end of each action and transfer: longest paths in the graph of all that waits for another."""
    schedule = sample.schedule
    graph = _dependencies(schedule)
    backward, leaving = _backwards(schedule), _leaving(schedule)
    links: defaultdict[tuple[int, int], list[tuple[int, int, _Sent]]] = defaultdict(list)
    for place, transfer in enumerate(sample.transfers):
        source, target = (schedule.device_of[s] for s in (transfer.source_stage, transfer.target_stage))
        for micro_batch in range(schedule.micro_batches if source != target else 0):
            ends = [
                Action(stage, Work.FORWARD, micro_batch)
                if transfer.target_stage > transfer.source_stage
                else backward[stage, micro_batch]
                for stage in (transfer.source_stage, transfer.target_stage)
            ]
            sent = (transfer, micro_batch)
            networkx.add_path(graph, [leaving.get(ends[0], ends[0]), sent, ends[1]])
            links[source, target].append((schedule.lines[source].index(ends[0]), place, sent))
    for queue in links.values():
        networkx.add_path(graph, [sent for _, _, sent in sorted(queue, key=lambda entry: entry[:2])])
    times: Times = {}
    for node in networkx.topological_sort(graph):
        start = max((times[before][1] for before in graph.predecessors(node)), default=0.0)
        times[node] = start, start + _seconds(sample, node)
    return times


def _dependencies(schedule: PipelineSchedule) -> networkx.DiGraph[Any]:
    """Which action waits for which, transfers aside."""
    graph: networkx.DiGraph[Any] = networkx.DiGraph()
    for line in schedule.lines:
        graph.add_nodes_from(line)
        networkx.add_path(graph, line)
    backward, leaving = _backwards(schedule), _leaving(schedule)
    for (stage, micro_batch), action in backward.items():
        forward = Action(stage, Work.FORWARD, micro_batch)
        graph.add_edge(leaving.get(forward, forward), action)  # one to itself is a cycle too
        if stage + 1 < schedule.stages:
            graph.add_edge(leaving.get(forward, forward), Action(stage + 1, Work.FORWARD, micro_batch))
            graph.add_edge(backward[stage + 1, micro_batch], action)
        if action.work is Work.INPUT_GRADIENT:
            graph.add_edge(action, Action(stage, Work.WEIGHT_GRADIENT, micro_batch))
    return graph


def _backwards(schedule: PipelineSchedule) -> dict[tuple[int, int], Action]:
    """What gives the gradients of the inputs, of each stage and micro-batch."""
    works = (Work.BACKWARD, Work.INPUT_GRADIENT)
    return {(a.stage, a.micro_batch): a for line in schedule.lines for a in line if a.work in works}


def _leaving(schedule: PipelineSchedule) -> dict[Action, Action]:
    """For each overlapped forward the backward after it."""
    pairs = (pair for line in schedule.lines for pair in itertools.pairwise(line))
    return {before: after for before, after in pairs if before in schedule.overlapped}


def _seconds(sample: Sample, node: Action | _Sent) -> float:
    if not isinstance(node, Action):
        return node[0].seconds
    cost = sample.costs[node.stage]
    parts = {
        Work.FORWARD: cost.forward_seconds,
        Work.INPUT_GRADIENT: cost.input_gradient_seconds,
        Work.WEIGHT_GRADIENT: cost.weight_gradient_seconds,
    }
    whole = parts[Work.INPUT_GRADIENT] + parts[Work.WEIGHT_GRADIENT]
    parts[Work.BACKWARD] = whole if cost.backward_seconds is None else cost.backward_seconds
    return parts[node.work]


def slow_bytes(
    sample: Sample, times: Times, device: int, *, keeps_received: bool, keeps_sent: bool
) -> list[tuple[float, float, int]]:
    """The bytes of a device from each moment of any event to the next, summed over all that is alive."""
    schedule, costs = sample.schedule, sample.costs
    step_seconds = max((end for _, end in times.values()), default=0.0)
    alive: list[tuple[float, float, int]] = []
    work_of = {(a.stage, a.work, a.micro_batch): times[a] for line in schedule.lines for a in line}
    for line in schedule.lines[device : device + 1]:
        alive += [(*times[a], costs[a.stage].working_bytes.get(a.work, 0)) for a in line]
    for stage in schedule.stages_on(device):
        cost = costs[stage]
        alive.append((0.0, step_seconds, cost.static_bytes))
        for micro_batch in range(schedule.micro_batches):
            start = work_of[stage, Work.FORWARD, micro_batch][0]
            whole = work_of.get((stage, Work.BACKWARD, micro_batch))
            if whole is not None:
                alive.append((start, whole[1], cost.held_bytes))
                continue
            middle = work_of[stage, Work.INPUT_GRADIENT, micro_batch][1]
            end = work_of[stage, Work.WEIGHT_GRADIENT, micro_batch][1]
            alive.append((start, middle, cost.held_bytes))
            alive.append((middle, end, cost.held_after_input_bytes))
    for transfer in sample.transfers:
        forward = transfer.source_stage < transfer.target_stage
        source, target = (schedule.device_of[s] for s in (transfer.source_stage, transfer.target_stage))
        if keeps_received and target == device:
            alive += [(0.0, step_seconds, transfer.nbytes)] * schedule.micro_batches
        for micro_batch in range(schedule.micro_batches if source != target else 0):
            sent_start, sent_end = times[transfer, micro_batch]
            if target == device and not keeps_received:
                works = (Work.FORWARD,) if forward else (Work.INPUT_GRADIENT, Work.BACKWARD)
                keys = [(transfer.target_stage, work, micro_batch) for work in works]
                end = next(work_of[k][1] for k in keys if k in work_of)
                alive.append((sent_start, end, transfer.nbytes))
            if source == device and (keeps_sent or not forward):
                keys = [(transfer.source_stage, w, micro_batch) for w in (Work.INPUT_GRADIENT, Work.BACKWARD)]
                begin = next(work_of[k][1] for k in keys if k in work_of)
                alive.append((begin, step_seconds if keeps_sent else sent_end, transfer.nbytes))
    time_steps = sorted({time_step for start, end, _ in alive for time_step in (start, end)})
    return [
        (left, right, sum(n for start, end, n in alive if start <= left and right <= end))
        for left, right in itertools.pairwise(time_steps)
    ]
