"""Partition problems made smaller before a search, and the error for those that nothing fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from irc.ir import UsageError
from irc.passes.pipeline.coarsen import Coarse
from irc.passes.pipeline.partition_problem import PartitionProblem

__all__ = ["can_run", "contract", "no_room", "prefixes"]


def can_run(coarse: Coarse) -> bool:
    """Whether each item has a class that all of it may run on."""
    return all(min(each) < math.inf for each in coarse.seconds)


def prefixes(order: Sequence[int]) -> list[int]:
    """The downsets that are the beginnings of one order of the items."""
    found = [0]
    for item in order:
        found.append(found[-1] | 1 << item)
    return found


def no_room(problem: PartitionProblem) -> UsageError:
    """The error for a problem that no partition fits the devices of."""
    total_bytes = sum(node.memory_bytes for node in problem.nodes)
    devices = " and ".join(
        f"{device.count} {device.name} of {device.capacity_bytes:,.0f} bytes" for device in problem.classes
    )
    return UsageError(
        "IRC473",
        f"{problem.name} cannot be divided among its devices: it takes {total_bytes:,} bytes, on {devices}",
        help="give more devices, devices with more memory, or ones that all nodes may run on",
    )


def contract(coarse: Coarse, *, is_contiguous: bool, is_memory_free: bool) -> Coarse:
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
        coarse: The items.
        is_contiguous: Whether only contiguous partitions are looked for.
        is_memory_free: Whether all items together fit on each device.
    """
    while pairs := list(_free_riders(coarse, is_contiguous, is_memory_free)):
        coarse = coarse.joined(pairs)
    return coarse


def _free_riders(coarse: Coarse, is_contiguous: bool, is_memory_free: bool) -> Iterable[tuple[int, int]]:
    """Pairs of an item that takes nothing and the one that it may join; no item is in two pairs."""
    nets_of: list[list[frozenset[int]]] = [[] for _ in coarse.members]
    for net in coarse.nets:
        for item in net:
            nets_of[item].append(net)
    taken: set[int] = set()
    for item, seconds in enumerate(coarse.seconds):
        if item in taken or any(seconds) or (coarse.memory_bytes[item] and not is_memory_free):
            continue
        before, after = coarse.predecessors[item], coarse.successors[item]
        if is_contiguous:
            hosts = [next(iter(side)) for side in (before, after) if len(side) == 1]
        else:
            hosts = sorted({other for net in nets_of[item] for other in net} - {item})
        for host in hosts:
            shared = coarse.nets.get(frozenset((item, host)), 0.0)
            others = sum(coarse.nets[net] for net in nets_of[item] if host not in net)
            if host not in taken and others <= shared:
                taken |= {item, host}
                yield item, host
                break
