"""Finds the literals of a graph that are numbers of the call, by a capture of the call with other numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..backends.torch import NumberSlots, VariedNumbers
from ..backends.torch.guards.module_state import is_equal
from ..frontends.torch import Captured
from ..ir import Graph, Node, Region, Signature, same_graph
from ..ir.scalars import is_same
from ..passes import Program
from ..torch_support.bits import same_bits

__all__ = ["OperationSlots", "number_slots", "slots_of_operations", "slots_within"]

_Place = int | str
_Number = int | float
_Slots = dict[tuple[str, str], Mapping[_Place, int]]
OperationSlots = Mapping[tuple[str, str], Mapping[_Place, int]]
"""The slots of nodes, by name and operation."""


def number_slots(
    program: Program,
    captured: tuple[Captured, Captured],
    prepared: tuple[Program, Program],
    numbers: VariedNumbers,
) -> NumberSlots | None:
    """Finds the scalar operands in a planned graph that a call's numbers are computed to.

    Args:
        program: The planned program.
        captured: The call as a graph, and the call with other numbers.
        prepared: Both, rewritten as the program was.
        numbers: The numbers of the two.

    Returns:
        The slots; None if the graphs differ in anything else, or if a number of the call did not enter all
        the operations that it should have.
    """
    slots = slots_of_operations(captured, prepared, numbers)
    if slots is None:
        return None
    assert program.schedule is not None
    nodes = program.schedule.graph.nodes
    if any((node.name, node.op) not in slots and any(_numbers(node)) for node in nodes):
        return None
    return slots_within(program.schedule.graph, slots)


def slots_of_operations(
    captured: tuple[Captured, Captured], prepared: tuple[Program, Program], numbers: VariedNumbers
) -> OperationSlots | None:
    """Finds the scalar operands in all graphs that a call is planned by; as `number_slots`."""
    first, second = captured
    if not _differ_in_leaves_alone(first, second):
        return None
    found: _Slots = {}
    ours, theirs = (_graphs(each) for each in prepared)
    if len(ours) != len(theirs):
        return None
    for graph, other in zip(ours, theirs, strict=True):
        slots = _slots(graph, other, numbers)
        if slots is None or any(found.get(key, places) != places for key, places in slots.items()):
            return None
        found |= slots
    return None if _uses(ours[-1], found) != Counter(dict(enumerate(numbers.uses))) else found


def slots_within(graph: Graph, slots: OperationSlots) -> NumberSlots:
    """The slots of the operations of one graph."""
    return {node.name: places for node in graph.nodes if (places := slots.get((node.name, node.op)))}


def _differ_in_leaves_alone(first: Captured, second: Captured) -> bool:
    """Whether two captures have the same constants and calling convention but for the numbers given."""
    mine, its = first.signature, second.signature
    if mine.branches or its.branches or len(mine.deliveries) != len(its.deliveries):
        return False
    if first.mode != second.mode or first.constants.keys() != second.constants.keys():
        return False
    returned = ((a.constant, b.constant) for a, b in zip(mine.deliveries, its.deliveries, strict=True))
    constants = ((first.constants[key], second.constants[key]) for key in first.constants)
    return (
        _without_constants(mine) == _without_constants(its)
        and all(a is b or is_equal(a, b) for a, b in returned)
        and all(a is b or (a.stride() == b.stride() and same_bits(a, b)) for a, b in constants)
    )


def _without_constants(signature: Signature) -> Signature:
    deliveries = tuple(replace(each, constant=None) for each in signature.deliveries)
    return replace(signature, leaves=(), deliveries=deliveries)


def _graphs(program: Program) -> list[Graph]:
    """Returns the graphs of whose operations a planned one consists, that of capture last."""
    return [program.graph] if program.original is None else [program.graph, program.original]


def _slots(graph: Graph, other: Graph, numbers: VariedNumbers) -> _Slots | None:
    """Returns the slots of all nodes by name and operation; None if the graphs differ elsewhere."""
    if len(graph.nodes) != len(other.nodes):
        return None
    found: _Slots = {}
    alike: list[Node] = []
    for node, its in zip(graph.nodes, other.nodes, strict=True):
        places: dict[_Place, int] = {}
        theirs = dict(_numbers(its))
        for place, number in _numbers(node):
            if place not in theirs or is_same(number, theirs[place]):
                continue
            index = _index(number, theirs[place], numbers)
            if index is None or node.is_view:
                return None
            places[place] = index
        key = node.name, node.op
        if key in found:
            return None
        found[key] = places
        alike.append(_with_numbers(its, {place: dict(_numbers(node))[place] for place in places}))
    counted = {
        "loss_bytes": graph.loss_bytes,
        "loss_held_bytes": graph.loss_held_bytes,
        "loss_saved_bytes": graph.loss_saved_bytes,
    }
    return found if same_graph(graph, replace(other, nodes=tuple(alike), **counted)) else None


def _index(number: _Number, other: _Number, numbers: VariedNumbers) -> int | None:
    """Returns the index of the expression that has these values in the two calls."""
    pairs = enumerate(zip(numbers.values, numbers.others, strict=True))
    return next((k for k, (a, b) in pairs if is_same(a, number) and is_same(b, other)), None)


def _numbers(node: Node) -> Iterator[tuple[_Place, _Number]]:
    """Yields the numbers among the arguments of a node, with their places."""
    places: list[tuple[_Place, Any]] = [*enumerate(node.arguments), *node.keywords]
    for place, argument in places:
        if isinstance(argument, int | float) and not isinstance(argument, bool):
            yield place, argument


def _with_numbers(node: Node, numbers: Mapping[_Place, _Number]) -> Node:
    arguments = tuple(numbers.get(k, argument) for k, argument in enumerate(node.arguments))
    keywords = tuple((key, numbers.get(key, argument)) for key, argument in node.keywords)
    return replace(node, arguments=arguments, keywords=keywords)


def _uses(graph: Graph, slots: OperationSlots) -> Counter[int]:
    """Counts the operations of forward that take each number."""
    forward = (node for node in graph.nodes if node.region is Region.FORWARD)
    return Counter(index for node in forward for index in slots[node.name, node.op].values())
