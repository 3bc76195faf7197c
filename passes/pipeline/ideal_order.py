"""An order of forward in which a good contiguous partition is a matter of cutting it.

The line of forward has the order of execution, and branches that are beside each other come one after the
other there. A contiguous partition may cut them at any downset; this looks for the best of all of them by
transfers and times, and puts its stages one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...ir import Node, Storage, Trait
from ...ir.pipeline.schedule import PipelineSchedule
from .chains import Chain, best_chain
from .coarsen import Coarse
from .devices import Devices
from .linear_order import Line
from .order_ideals import Between, downsets
from .partition_problem import DeviceClass

__all__ = ["downset_order"]

_MOST_DOWNSETS = 4_000
"""With more of them the smallest items are joined with their neighbours."""


def downset_order(
    line: Line, schedule: PipelineSchedule, devices: Devices, seconds: float
) -> tuple[Node, ...] | None:
    """The operations of forward, stage by stage, of the partition with the shortest step.

    A step is the sum of the loads of all stages and the largest load once more for each further micro-batch.
    A load is the time of the operations of a stage and of what it exchanges. Memory does not count.

    Args:
        line: In the order of execution.
        schedule: Says how many stages there are, and on which device each is.
        devices: Their speeds and links.
        seconds: Time limit.

    Returns:
        The order; None where it is the line's, where random numbers would be drawn in another order, or where
        no time was left.
    """
    if any(Trait.RANDOM in node.traits for node in line.order):
        return None
    deadline = time.monotonic() + seconds
    speeds = sorted(set(devices.speeds))
    coarse = _of_line(line, devices, speeds)
    sets: list[int] | None = None
    threshold = sum(min(each) for each in coarse.seconds) / (32 * schedule.stages)
    while sets is None:
        if time.monotonic() > deadline:
            return None
        coarse = _without_small_items(coarse, threshold)
        sets = downsets(coarse, _MOST_DOWNSETS)
        threshold *= 1.5
    if len(coarse.members) < schedule.stages:
        return None
    classes = [DeviceClass(f"speed {speed:g}", devices.speeds.count(speed)) for speed in speeds]
    kinds = [speeds.index(devices.speeds[device]) for device in schedule.device_of]
    chain = _chain(coarse, sets, classes, kinds, schedule.micro_batches, deadline)
    if chain is None:
        return None
    stage_of = {
        node: stage
        for stage, items in enumerate(chain.items)
        for item, nodes in enumerate(coarse.members)
        if items >> item & 1
        for node in nodes
    }
    order = sorted(range(len(line.order)), key=lambda place: (stage_of[place], place))
    return None if order == list(range(len(order))) else tuple(line.order[place] for place in order)


def _chain(
    coarse: Coarse,
    sets: Sequence[int],
    classes: Sequence[DeviceClass],
    kinds: Sequence[int],
    micro_batches: int,
    deadline: float,
) -> Chain | None:
    def load(stage: int, items: int) -> float:
        nets = (
            seconds
            for net, seconds in coarse.nets.items()
            if 0 < sum(items >> item & 1 for item in net) < len(net)
        )
        own = (each[kinds[stage]] for item, each in enumerate(coarse.seconds) if items >> item & 1)
        return (sum(own) + sum(nets)) * (1 + 1e-9)

    try:
        return best_chain(
            Between(coarse, classes, sets),
            kinds,
            load,
            micro_batches=micro_batches,
            seconds=max(deadline - time.monotonic(), 0.0),
        )
    except TimeoutError:
        return None


def _of_line(line: Line, devices: Devices, speeds: Sequence[float]) -> Coarse:
    """The operations as items, and what is read of them elsewhere as nets."""
    place = {node: k for k, node in enumerate(line.order)}
    maker: dict[Storage, int] = {}
    edges: set[tuple[int, int]] = set()
    touched: dict[Storage, set[int]] = {}
    for node, k in place.items():
        for storage in line.graph.reads(node):
            if storage in maker and maker[storage] != k:
                edges.add((maker[storage], k))
                touched[storage].add(k)
        for storage in line.graph.allocates(node):
            maker[storage] = k
            touched[storage] = {k}
    nets: dict[frozenset[int], float] = {}
    for storage, items in touched.items():
        if len(items) > 1:
            net = frozenset(items)
            nets[net] = nets.get(net, 0.0) + 2 * devices.transfer_seconds(storage.nbytes)
    whole = [line.seconds(k, k + 1) for k in range(len(line.order))]
    coarse = Coarse(
        tuple((k,) for k in range(len(whole))),
        tuple(tuple(seconds / speed for speed in speeds) for seconds in whole),
        (0,) * len(whole),
        frozenset(edges),
        nets,
    )
    groups = [sorted(place[node] for node in group if node in place) for group in line.flow.together]
    return coarse.joined([(group[0], other) for group in groups for other in group[1:]])


def _without_small_items(coarse: Coarse, threshold: float) -> Coarse:
    """Items below a time join the neighbour that they exchange most with."""
    shared: dict[tuple[int, int], float] = {}
    for net, seconds in coarse.nets.items():
        for item in net:
            for other in net - {item}:
                shared[item, other] = shared.get((item, other), 0.0) + seconds / len(net)
    pairs: list[tuple[int, int]] = []
    for item, each in enumerate(coarse.seconds):
        neighbours = coarse.predecessors[item] | coarse.successors[item]
        if max(each) < threshold and neighbours:
            near = max(sorted(neighbours), key=lambda other, own=item: shared.get((own, other), 0.0))
            pairs.append((item, near))
    return coarse.joined(pairs) if pairs else coarse
