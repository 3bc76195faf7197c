"""An order of forward that a good contiguous partition only has to cut.

A linear order of forward has the order of execution, in which parallel branches come one after the other. A
contiguous partition may cut them at any order ideal. This module looks for the best partition by transfers
and times, and puts its stages one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...ir import Node, Storage, Trait
from ...ir.pipeline.schedule import PipelineSchedule
from .chains import Chain, best_chain
from .coarsened_problem import CoarsenedProblem, DeviceClass
from .devices import Devices
from .linear_order import LinearOrder
from .order_ideals import Between, order_ideals

__all__ = ["ideal_order"]

_MOST_IDEALS = 4_000
"""The most order ideals; with more of them the smallest items are joined with their neighbours."""


def ideal_order(
    linear_order: LinearOrder, schedule: PipelineSchedule, devices: Devices, seconds: float
) -> tuple[Node, ...] | None:
    """Lists the operations of forward, stage by stage, of the partition with the shortest step.

    A step is the sum of the loads of all stages, and the largest load once more for each further micro-batch.
    A load is the time of the operations of a stage and of what it exchanges. Memory does not count.

    Args:
        linear_order: The operations in the order of execution.
        schedule: Says how many stages there are, and on which device each is.
        devices: Their speeds and links.
        seconds: The time limit.

    Returns:
        The order; None if it is the given one, if random numbers would be drawn in another order, or if no
        time was left.
    """
    if any(Trait.RANDOM in node.traits for node in linear_order.operations):
        return None
    deadline = time.thread_time() + seconds
    speeds = sorted(set(devices.speeds))
    coarsened = _coarsened(linear_order, devices, speeds)
    sets: list[int] | None = None
    threshold = sum(min(each) for each in coarsened.seconds) / (32 * schedule.stages)
    while sets is None:
        if time.thread_time() > deadline:
            return None
        coarsened = _without_small_items(coarsened, threshold)
        sets = order_ideals(coarsened, _MOST_IDEALS)
        threshold *= 1.5
    if len(coarsened.members) < schedule.stages:
        return None
    classes = [DeviceClass(f"speed {speed:g}", devices.speeds.count(speed)) for speed in speeds]
    kinds = [speeds.index(devices.speeds[device]) for device in schedule.device_of]
    chain = _chain(coarsened, sets, classes, kinds, schedule.micro_batches, deadline)
    if chain is None:
        return None
    stage_of = {
        node: stage
        for stage, items in enumerate(chain.items)
        for item, nodes in enumerate(coarsened.members)
        if items >> item & 1
        for node in nodes
    }
    order = sorted(range(len(linear_order.operations)), key=lambda position: (stage_of[position], position))
    if order == list(range(len(order))):
        return None
    return tuple(linear_order.operations[position] for position in order)


def _chain(
    coarsened: CoarsenedProblem,
    sets: Sequence[int],
    classes: Sequence[DeviceClass],
    kinds: Sequence[int],
    micro_batches: int,
    deadline: float,
) -> Chain | None:
    def load(stage: int, items: int) -> float:
        nets = (
            seconds
            for net, seconds in coarsened.nets.items()
            if 0 < sum(items >> item & 1 for item in net) < len(net)
        )
        own = (each[kinds[stage]] for item, each in enumerate(coarsened.seconds) if items >> item & 1)
        return (sum(own) + sum(nets)) * (1 + 1e-9)

    try:
        return best_chain(
            Between(coarsened, classes, sets),
            kinds,
            load,
            micro_batches=micro_batches,
            seconds=max(deadline - time.thread_time(), 0.0),
        )
    except TimeoutError:
        return None


def _coarsened(linear_order: LinearOrder, devices: Devices, speeds: Sequence[float]) -> CoarsenedProblem:
    """Makes the operations items, and what others read of them nets."""
    position = {node: k for k, node in enumerate(linear_order.operations)}
    maker: dict[Storage, int] = {}
    edges: set[tuple[int, int]] = set()
    touched: dict[Storage, set[int]] = {}
    for node, k in position.items():
        for storage in linear_order.graph.reads(node):
            if storage in maker and maker[storage] != k:
                edges.add((maker[storage], k))
                touched[storage].add(k)
        for storage in linear_order.graph.allocates(node):
            maker[storage] = k
            touched[storage] = {k}
    nets: dict[frozenset[int], float] = {}
    for storage, items in touched.items():
        if len(items) > 1:
            net = frozenset(items)
            nets[net] = nets.get(net, 0.0) + 2 * devices.transfer_seconds(storage.nbytes)
    whole = [linear_order.seconds(k, k + 1) for k in range(len(linear_order.operations))]
    coarsened = CoarsenedProblem(
        tuple((k,) for k in range(len(whole))),
        tuple(tuple(seconds / speed for speed in speeds) for seconds in whole),
        (0,) * len(whole),
        frozenset(edges),
        nets,
    )
    groups = [
        sorted(position[node] for node in group if node in position) for group in linear_order.flow.together
    ]
    return coarsened.joined([(group[0], other) for group in groups for other in group[1:]])


def _without_small_items(coarsened: CoarsenedProblem, threshold: float) -> CoarsenedProblem:
    """Joins items below a time with the neighbour that they exchange most with."""
    shared: dict[tuple[int, int], float] = {}
    for net, seconds in coarsened.nets.items():
        for item in net:
            for other in net - {item}:
                shared[item, other] = shared.get((item, other), 0.0) + seconds / len(net)
    pairs: list[tuple[int, int]] = []
    for item, each in enumerate(coarsened.seconds):
        neighbours = coarsened.predecessors[item] | coarsened.successors[item]
        if max(each) < threshold and neighbours:
            near = max(sorted(neighbours), key=lambda other, own=item: shared.get((own, other), 0.0))
            pairs.append((item, near))
    return coarsened.joined(pairs) if pairs else coarsened
