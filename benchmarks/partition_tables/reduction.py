"""Partition problems reduced: items in place of nodes, and fewer of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from irc.passes.pipeline.coarsened_problem import CoarsenedProblem, add_net

from .partition_problem import PartitionProblem

__all__ = ["can_run", "coarsen", "contract", "spread"]


def can_run(coarsened: CoarsenedProblem) -> bool:
    """Whether each item has a class that all of it may run on."""
    return all(min(each) < math.inf for each in coarsened.seconds)


def spread(coarsened: CoarsenedProblem, chosen: Sequence[int], nodes: int) -> tuple[int, ...]:
    """The choices for `nodes` nodes, given the choice for each item."""
    found = [0] * nodes
    for members, choice in zip(coarsened.members, chosen, strict=True):
        for node in members:
            found[node] = choice
    return tuple(found)


def coarsen(
    problem: PartitionProblem, members: Sequence[Sequence[int]], edges: Iterable[tuple[int, int]]
) -> CoarsenedProblem:
    """The problem with given sets of nodes as items.

    Args:
        problem: The graph.
        members: The positions of the nodes of each item; all nodes, each once.
        edges: The order that partitions have to follow, between items.
    """
    item_of = {node: item for item, part in enumerate(members) for node in part}
    nets: dict[frozenset[int], float] = {}
    for position, node in enumerate(problem.nodes):
        touched = {item_of[position]} | {item_of[reader] for reader in problem.readers[position]}
        add_net(nets, frozenset(touched), node.transfer_seconds)
    kinds = range(len(problem.classes))
    return CoarsenedProblem(
        tuple(map(tuple, members)),
        tuple(
            tuple(sum(problem.nodes[node].seconds[kind] for node in part) for kind in kinds)
            for part in members
        ),
        tuple(sum(problem.nodes[node].memory_bytes for node in part) for part in members),
        frozenset(edges),
        nets,
    )


def contract(coarsened: CoarsenedProblem, *, is_contiguous: bool, is_memory_free: bool) -> CoarsenedProblem:
    """The same problem with fewer items: some optimal partition has each item whole.

    An item `z` that takes no time anywhere, and no memory (or memory never matters), joins a neighbour `q`
    when the nets of exactly these two cost at least as much as all nets that hold `z` but not `q`. Proof:
    take an optimal partition with `z` on device `a` and `q` on `b`, and move `z` to `b`. Other devices
    keep what they pay, since no set of items of theirs changes. The nets of the two alone were paid by `a`
    and by `b`, and are paid by neither now. A net with both and more was paid by both, as each had some of
    it and not all; so neither pays more for it. A net with `z` but not `q` may now be paid by `b`, or by
    `a` where it was whole there: once each, and by the condition no more than what each has saved. Devices
    that pay no transfers pay as before. So no load grows. Contiguous partitions stay so if `q` is the only
    predecessor of `z` (then it moves to an earlier stage, and all it depends on is there or before) or its
    only successor.

    Args:
        coarsened: The items.
        is_contiguous: Whether only contiguous partitions are looked for.
        is_memory_free: Whether all items together fit on each device.
    """
    while pairs := list(_free_riders(coarsened, is_contiguous, is_memory_free)):
        coarsened = coarsened.joined(pairs)
    return coarsened


def _free_riders(
    coarsened: CoarsenedProblem, is_contiguous: bool, is_memory_free: bool
) -> Iterable[tuple[int, int]]:
    """Pairs of an item that takes nothing and the one that it may join; no item is in two pairs."""
    nets_of: list[list[frozenset[int]]] = [[] for _ in coarsened.members]
    for net in coarsened.nets:
        for item in net:
            nets_of[item].append(net)
    taken: set[int] = set()
    for item, seconds in enumerate(coarsened.seconds):
        if item in taken or any(seconds) or (coarsened.memory_bytes[item] and not is_memory_free):
            continue
        before, after = coarsened.predecessors[item], coarsened.successors[item]
        if is_contiguous:
            hosts = [next(iter(side)) for side in (before, after) if len(side) == 1]
        else:
            hosts = sorted({other for net in nets_of[item] for other in net} - {item})
        for host in hosts:
            shared = coarsened.nets.get(frozenset((item, host)), 0.0)
            others = sum(coarsened.nets[net] for net in nets_of[item] if host not in net)
            if host not in taken and others <= shared:
                taken |= {item, host}
                yield item, host
                break
