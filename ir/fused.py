"""Runs of operations that one kernel computes: how a node holds them, and their text, which is compiled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .graph import Argument, Graph, Node, Symbol
from .printable import printable
from .types import DType, TensorType, Value

__all__ = [
    "FUSED",
    "KERNELS_FORM",
    "RESULT",
    "Kernel",
    "Step",
    "count_kernels",
    "fused_arguments",
    "is_plain_argument",
    "operation_of",
    "overwritten",
    "place_of",
    "results_in",
    "steps_of",
    "with_overwritten",
]

FUSED = "irc.fused.default"
"""The operation whose arguments are the operations that it runs, one tuple (name, arguments, keywords) for
each. The keyword `returns` names the results that it returns."""

KERNELS_FORM = 2
"""The way in which kernels are made of operations: costs that were measured of another one do not count."""

RESULT = "result"
"""The kind of a symbol for the result of an operation within: `3`, or `3.1` for one of several."""

_RETURNS = "returns"
_OVERWRITES = "overwrites"
"""The keyword with pairs of an operand and the index of the result that takes its memory."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation within a fused one.

    Args:
        op: Its qualified name.
        arguments: Its arguments: values are operands of the whole, symbols of the kind `result` are results
            of operations before it.
        keywords: Its keyword arguments.
    """

    op: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()


def fused_arguments(
    steps: Iterable[Step], returns: Iterable[Symbol]
) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
    """Returns the arguments and the keywords of a node that runs these operations."""
    arguments = tuple((step.op, step.arguments, step.keywords) for step in steps)
    return arguments, ((_RETURNS, tuple(returns)),)


def steps_of(node: Node) -> tuple[tuple[Step, ...], tuple[Symbol, ...]]:
    """Reads the operations of a fused node, and the results that it returns.

    Raises:
        ValueError: The node does not hold operations in this form, or one reads a result before it is there.
    """
    keywords = dict(node.keywords)
    returns = keywords.pop(_RETURNS, None)
    pairs = keywords.pop(_OVERWRITES, ())
    if node.op != FUSED or keywords or not isinstance(returns, tuple) or not isinstance(pairs, tuple):
        raise ValueError("it is no fused operation")
    steps = tuple(map(_step, node.arguments))
    for index, step in enumerate(steps):
        if not all(place_of(symbol) < index for symbol in results_in((step.arguments, step.keywords))):
            raise ValueError(f"operation {index} reads a result that is not there yet")
    found = tuple(each for each in returns if isinstance(each, Symbol) and each.kind == RESULT)
    if len(set(found)) < len(returns) or not all(place_of(each) < len(steps) for each in found):
        raise ValueError("it returns what is no result of an operation within")
    return steps, found


def operation_of(node: Node) -> str:
    """Returns the name of a node's operation for messages: of a fused one, those that it runs."""
    if node.op != FUSED:
        return node.op
    names = [step.op for step in steps_of(node)[0]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"fused {', '.join(names[:_NAMED])}{more}"


_NAMED = 3
"""The most operations of a fused one that a message names."""


def count_kernels(graph: Graph) -> tuple[int, int]:
    """Returns the numbers of kernels of a graph, and of fused operations that they run."""
    fused = [node for node in graph.operations if node.op == FUSED]
    return len({Kernel.of(node) for node in fused}), len(fused)


def with_overwritten(node: Node, pairs: Mapping[Value, int]) -> Node:
    """Returns a fused node whose results of these indices take the memory of these operands."""
    kept = tuple((key, value) for key, value in node.keywords if key != _OVERWRITES)
    return replace(node, keywords=(*kept, (_OVERWRITES, tuple(pairs.items()))))


def overwritten(node: Node) -> dict[Value, int]:
    """Returns the operands of a node that its results overwrite, each with the index of the result."""
    if node.op != FUSED:
        return {} if (operand := node.written_operand) is None else {operand: 0}
    pairs = dict(node.keywords).get(_OVERWRITES, ())
    found: dict[Value, int] = {}
    for pair in pairs if isinstance(pairs, tuple) else ():
        match pair:
            case (Value() as operand, int() as index) if not isinstance(index, bool):
                found[operand] = index
            case _:
                raise ValueError("what it overwrites is no operand and the index of a result")
    if len(set(found.values())) < len(found):
        raise ValueError("a result overwrites two operands")
    return found


def _step(argument: Argument) -> Step:
    match argument:
        case (str() as op, tuple() as arguments, tuple() as keywords):
            pairs = tuple(_keyword(each) for each in keywords)
            return Step(op, arguments, pairs)
        case _:
            raise ValueError("an operation within is not a name, arguments and keywords")


def _keyword(pair: Argument) -> tuple[str, Argument]:
    match pair:
        case (str() as key, value):
            return key, value
        case _:
            raise ValueError("a keyword within is not a name and a value")


def results_in(argument: Any) -> Iterator[Symbol]:
    """Yields the results of operations within that nested arguments name."""
    if isinstance(argument, Symbol):
        if argument.kind == RESULT:
            yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from results_in(item)


def place_of(symbol: Symbol) -> int:
    """Returns the index of the operation whose result a symbol stands for.

    Raises:
        ValueError: If it is none.
    """
    index, _, which = symbol.name.partition(".")
    if not (index.isdecimal() and (which.isdecimal() or which == "")):
        raise ValueError(f"{printable(symbol.name)} is no result of an operation within")
    return int(index)


@dataclass(frozen=True, slots=True)
class Kernel:
    """The computation of a fused node, without names: equal computations have equal texts.

    Args:
        operands: The types of the tensors that it reads.
        steps: The operations, as of `Step`; operands are symbols of the kind `operand`.
        returns: The results that it returns.
        results: Their types.
        overwrites: Pairs of the index of an operand and that of the result which takes its memory.
    """

    operands: tuple[TensorType, ...]
    steps: tuple[Step, ...]
    returns: tuple[Symbol, ...]
    results: tuple[TensorType, ...]
    overwrites: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(node: Node) -> Kernel:
        """Returns the computation of a fused node.

        Raises:
            ValueError: As `steps_of`, or the node does not name as many results as it returns.
        """
        steps, returns = steps_of(node)
        if len(node.values) != len(returns) or len(node.results) != len(returns):
            raise ValueError("it does not return as many results as it names")
        operands = {value: Symbol("operand", str(k)) for k, value in enumerate(node.operands)}
        plain = tuple(
            Step(
                step.op,
                tuple(_plain(argument, operands) for argument in step.arguments),
                tuple((key, _plain(argument, operands)) for key, argument in step.keywords),
            )
            for step in steps
        )
        types = tuple(value.type for value in node.operands)
        places = {value: index for index, value in enumerate(node.operands)}
        pairs = tuple((places[value], index) for value, index in overwritten(node).items())
        for operand, index in pairs:
            if not 0 <= index < len(returns) or node.values[index].type != types[operand]:
                raise ValueError("a result overwrites an operand of another type")
        return Kernel(types, plain, returns, tuple(value.type for value in node.values), pairs)

    @property
    def text(self) -> str:
        """The computation as JSON."""
        content = {
            "operands": [_type_row(type) for type in self.operands],
            "steps": [
                [step.op, _rows(step.arguments), [[key, _row(value)] for key, value in step.keywords]]
                for step in self.steps
            ],
            "returns": _rows(self.returns),
            "results": [_type_row(type) for type in self.results],
            "overwrites": self.overwrites,
        }
        return json.dumps(content, separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Kernel:
        """Reads the text of a computation.

        Raises:
            ValueError, LookupError, TypeError: It is none.
        """
        content = json.loads(text)
        return Kernel(
            tuple(map(_type_of, content["operands"])),
            tuple(
                Step(op, _arguments(arguments), tuple((key, _argument(value)) for key, value in keywords))
                for op, arguments, keywords in content["steps"]
            ),
            tuple(each for row in content["returns"] if isinstance(each := _argument(row), Symbol)),
            tuple(map(_type_of, content["results"])),
            tuple((int(operand), int(result)) for operand, result in content["overwrites"]),
        )


def _plain(argument: Argument, operands: Mapping[Value, Symbol]) -> Argument:
    if isinstance(argument, Value):
        return operands[argument]
    if isinstance(argument, tuple):
        return tuple(_plain(item, operands) for item in argument)
    return argument


def _type_row(type: TensorType) -> list[Any]:
    return [type.dtype.value, list(type.shape), list(type.strides), type.device]


def _type_of(row: Sequence[Any]) -> TensorType:
    dtype, shape, strides, device = row
    return TensorType(tuple(map(int, shape)), DType(dtype), tuple(map(int, strides)), str(device))


def _rows(arguments: Iterable[Argument]) -> list[Any]:
    return [_row(argument) for argument in arguments]


def _row(argument: Argument) -> Any:
    if isinstance(argument, Symbol):
        return {argument.kind: argument.name}
    return _rows(argument) if isinstance(argument, tuple) else argument


def _arguments(rows: Iterable[Any]) -> tuple[Argument, ...]:
    return tuple(map(_argument, rows))


def _argument(row: Any) -> Argument:
    match row:
        case dict():
            ((kind, name),) = row.items()
            return Symbol(str(kind), str(name))
        case list():
            return _arguments(row)
        case None | bool() | int() | float() | str():
            return row
        case _:
            raise ValueError(f"{row!r} is no argument")


def is_plain_argument(argument: Argument) -> bool:
    """Whether an argument can stand in a fused operation: not a generator, nor a complex number."""
    if isinstance(argument, tuple):
        return all(map(is_plain_argument, argument))
    if isinstance(argument, Symbol):
        return argument.kind in ("dtype", "layout", "memory_format", "device")
    return not isinstance(argument, complex)
