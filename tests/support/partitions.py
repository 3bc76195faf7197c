"""Small random partition problems, and all their partitions one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hypothesis import strategies as st

from benchmarks.partition_tables.partition_problem import PartitionNode, PartitionProblem, evaluate
from irc.passes.pipeline.coarsened_problem import DeviceClass


@st.composite
def problems(draw: st.DrawFn) -> PartitionProblem:
    """Forward graphs of up to seven nodes, some with a backward, orphans, colours and memory."""
    has_host = draw(st.booleans())
    count = draw(st.integers(1, 6 if has_host else 7))
    accelerators = draw(st.integers(1, 2 if has_host else 3))
    capacity = draw(st.sampled_from([math.inf, 12, 20]))
    classes = (DeviceClass("accelerator", accelerators, capacity), DeviceClass("host", 1, math.inf, False))
    times = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5])

    def node(name: str, colour: int, is_backward: bool) -> PartitionNode:
        seconds = draw(times)
        slower = seconds * draw(st.sampled_from([1, 4]))
        barred = has_host and draw(st.integers(0, 9)) == 0
        both = (math.inf if barred else seconds, slower)
        return PartitionNode(
            name,
            both if has_host else both[:1],
            draw(st.sampled_from([0, 0, 3, 5])),
            draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            colour,
            is_backward,
        )

    nodes = [node(f"f{i}", i if draw(st.integers(0, 6)) else i // 2, False) for i in range(count)]
    edges = [(i, j) for j in range(count) for i in range(j) if draw(st.integers(0, 2)) == 0]
    if draw(st.booleans()):
        nodes += [node(f"b{i}", nodes[i].colour, True) for i in range(count)]
        edges += [(count + j, count + i) for i, j in edges]
        edges += [(i, count + i) for i in range(count) if draw(st.booleans())]
        if draw(st.booleans()):
            nodes.append(node("step", count, True))
            edges.append((count + draw(st.integers(0, count - 1)), 2 * count))
    return PartitionProblem("random", tuple(nodes), tuple(edges), classes if has_host else classes[:1])


def best_of_all(problem: PartitionProblem, *, is_contiguous: bool) -> float:
    """The smallest largest load of all partitions that fit; infinite without one."""
    best = math.inf
    colours = sorted({node.colour for node in problem.nodes})
    for devices in _choices(problem, len(colours)):
        of_colour = dict(zip(colours, devices, strict=True))
        found = evaluate(problem, [of_colour[node.colour] for node in problem.nodes])
        if found.fits and (found.is_contiguous or not is_contiguous):
            best = min(best, found.max_load_seconds)
    return best


def _choices(problem: PartitionProblem, length: int) -> Iterator[tuple[int, ...]]:
    """Devices for each colour; of equal devices the first is used first."""
    if not length:
        yield ()
        return
    for rest in _choices(problem, length - 1):
        fresh = set[int]()
        for device, kind in enumerate(problem.devices):
            if device in rest:
                yield (*rest, device)
            elif kind not in fresh:
                fresh.add(kind)
                yield (*rest, device)
