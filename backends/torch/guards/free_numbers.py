"""Proves that a forward does not look at some numbers among its arguments, or only computes with them.

A number that Dynamo has no guard for, and that the code which it writes does not load (to return or to store
it), makes no difference to the forward. A number that Dynamo computes with as a symbol, and that nothing is
decided by, enters operations of tensors through scalar expressions alone: `x * (1 - t / 1000)`. These
operations run the same way whatever their scalar operand is.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import SymFloat, SymInt, Tensor, fx, nn
from torch.utils import _pytree as pytree

from ....ir.scalars import FUNCTIONS, Leaf, Operand, Scalar, evaluate, leaves_of
from .dynamo_call import Interpretation, TraceAnswers, interpret, is_number
from .symbolic_numbers import Operation

__all__ = [
    "NO_NUMBERS",
    "FreeNumbers",
    "NumberResult",
    "free_numbers",
    "free_numbers_of_graph",
    "take_number_results",
]


@dataclass(frozen=True, slots=True)
class FreeNumbers:
    """The numbers among the arguments of a call that decide nothing in a forward.

    They hold together: what the forward does stays the same whatever all of them are.

    Args:
        unread: The indices among the leaves of numbers that the forward does not look at.
        expressions: The scalar operands of tensors' operations, computed from the others.
        uses: The number of operations that take each expression.
    """

    unread: frozenset[int] = frozenset()
    expressions: tuple[Operand, ...] = ()
    uses: tuple[int, ...] = ()

    @property
    def places(self) -> frozenset[int]:
        """The indices of all of them."""
        return self.unread.union(*map(leaves_of, self.expressions))


NO_NUMBERS = FreeNumbers()
"""None are known to decide nothing."""


def free_numbers(
    module: nn.Module,
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    answers: TraceAnswers,
    varying: frozenset[int],
) -> FreeNumbers:
    """Finds the numbers among the arguments of a call that are proved to decide nothing.

    Args:
        module: The module whose forward is called.
        leaves: The leaves of the positional and keyword arguments.
        tree: Their nesting.
        answers: The answers that capture gave.
        varying: The indices of numbers that are asked for; the others are only looked for among the unread.
    """
    constant = interpret(module, leaves, tree, answers)
    if constant is None:
        return NO_NUMBERS
    texts = [*(source for _, source in constant.guards), *constant.variables]
    unread = frozenset(k for k, name in constant.names.items() if not any(name in text for text in texts))
    symbolic = varying - unread
    if not symbolic:
        return FreeNumbers(unread)
    chosen = [_unspecial(leaf) if place in symbolic else leaf for place, leaf in enumerate(leaves)]
    found = interpret(module, chosen, tree, answers, symbolic)
    entering = None if found is None else _entering(found, {k: found.names[k] for k in symbolic})
    return _counted(unread, entering or ())


def free_numbers_of_graph(graph: fx.Graph, places: Mapping[fx.Node, int]) -> FreeNumbers:
    """Finds the numbers among the arguments of a graph of Dynamo that decide nothing but results of it.

    What they decided in the code that became the graph is a guard of Dynamo's, which has let the call pass.

    Args:
        graph: The graph.
        places: The indices of the arguments that are numbers, by their placeholders.
    """
    operations = (Operation(node, node.args, node.kwargs) for node in graph.nodes if node.op != "output")
    _, entering, deciding = _followed(operations, {node: Leaf(place) for node, place in places.items()})
    free = [leaves_of(each) for each in entering]
    while more := frozenset[int]().union(*(each for each in free if each & deciding)) - deciding:
        deciding |= more
    used = frozenset[int]().union(deciding, *free)
    return _counted(
        frozenset(places.values()) - used, [each for each in entering if not leaves_of(each) & deciding]
    )


class NumberResult(NamedTuple):
    """A result of a graph that is computed from numbers alone.

    Args:
        operand: How it is computed.
        dtype: The element type of the tensor that Dynamo takes it in; None for a number.
    """

    operand: Operand
    dtype: torch.dtype | None

    def of(self, leaves: Sequence[Any]) -> Any:
        """The result of a call with these leaves."""
        number = evaluate(self.operand, leaves)
        return number if self.dtype is None else torch.scalar_tensor(number, dtype=self.dtype)


def take_number_results(graph: fx.Graph, places: Mapping[fx.Node, int]) -> dict[int, NumberResult]:
    """Takes the results that are computed from numbers alone out of a graph, which returns None there.

    Args:
        graph: The graph.
        places: The indices of the arguments that are numbers, by their placeholders.

    Returns:
        What was taken, by the place among the results.
    """
    operations = (Operation(node, node.args, node.kwargs) for node in graph.nodes)
    scalars, _, _ = _followed(operations, {node: Leaf(place) for node, place in places.items()})
    results: dict[int, NumberResult] = {}
    output = graph.output_node()
    if not isinstance(output.args[0], tuple | list):
        return results
    returned: list[Any] = list(output.args[0])
    for place, node in enumerate(returned):
        is_wrapped = isinstance(node, fx.Node) and node.target is torch.scalar_tensor and len(node.users) == 1
        number: Any = node.args[0] if is_wrapped else node
        operand = scalars.get(number)
        if operand is None or any(part.function in ("min", "max") for part in _functions(operand)):
            continue  # what min and max return of two equal numbers is not told by expressions
        dtype: Any = node.kwargs["dtype"] if is_wrapped else None
        results[place] = NumberResult(operand, dtype)
        returned[place] = None
    output.args = (tuple(returned),)
    for node in graph.find_nodes(op="call_function", target=torch.scalar_tensor):
        if not node.users:
            graph.erase_node(node)  # eliminate_dead_code() takes writes out of the graphs of checkpoints
    return results


def _functions(operand: Operand) -> list[Scalar]:
    return [part for part in _parts(operand) if isinstance(part, Scalar)]


def _counted(unread: frozenset[int], entering: Iterable[Operand]) -> FreeNumbers:
    """The numbers that are not read, and what operations take, each with the number of these operations."""
    texts = [(repr(each), each) for each in entering]  # 2 and 2.0 are equal, and are two operands
    uses = Counter(text for text, _ in texts)
    return FreeNumbers(unread, tuple(dict(texts).values()), tuple(uses[text] for text in dict(texts)))


def _unspecial(number: float) -> float:
    """Returns a number that Dynamo does not take for a constant of its own, as it takes 0, 1 and infinity."""
    if isinstance(number, int):
        return number if abs(number) > 16 else number + 37
    return number if 1e-6 < abs(number) < 1e6 and number != 1.0 else 0.6180339


# ---------------------------------------------------------------------- expressions


def _entering(found: Interpretation, names: Mapping[int, str]) -> list[Operand] | None:
    """Returns what is computed from symbolic numbers for each operation of tensors that takes it.

    None stands for numbers that may decide anything.
    """
    if found.symbols.decides or not all(_is_only_an_operand(found, name) for name in names.values()):
        return None
    leaves = {f"L_{name}": Leaf(place) for place, name in names.items()}
    nodes = (operation.node for operation in found.symbols.operations)
    places = {
        node: leaves[str(node.target)] for node in nodes if node.op == "placeholder" and node.target in leaves
    }
    scalars, entering, deciding = _followed(found.symbols.operations, places)
    read = {id(part) for each in entering for part in _parts(each)}
    computed = (each for each in scalars.values() if isinstance(each, Scalar))
    is_read = all(id(each) in read for each in computed)  # what is dropped may still raise
    return entering if is_read and not deciding else None


def _followed(
    operations: Iterable[Operation], numbers: Mapping[fx.Node, Operand]
) -> tuple[dict[fx.Node, Operand], list[Operand], frozenset[int]]:
    """Follows numbers through a graph.

    Returns:
        What is computed from them; what of that operations of tensors take; and the numbers that may decide
        how anything runs.
    """
    scalars = dict(numbers)
    entering: list[Operand] = []
    deciding: set[int] = set()
    for operation in operations:
        operands = [scalars[each] for each in _nodes((operation.args, operation.kwargs), scalars)]
        if not operands:
            continue
        is_scalar = isinstance(operation.node.meta.get("example_value"), SymInt | SymFloat)
        scalar = _scalar(operation, scalars) if is_scalar else None
        if scalar is not None:
            scalars[operation.node] = scalar
        elif not is_scalar and _takes_scalars(operation, scalars):
            entering += operands
        else:
            deciding.update(*map(leaves_of, operands))
    return scalars, entering, frozenset(deciding)


def _parts(operand: Operand) -> Iterator[Operand]:
    """Yields an expression and all that it is made of."""
    yield operand
    if isinstance(operand, Scalar):
        for each in operand.operands:
            yield from _parts(each)


def _is_only_an_operand(found: Interpretation, name: str) -> bool:
    """Whether Dynamo guards a number's class alone, and its code hands the number only to the graph."""
    kinds = [kind for kind, source in found.guards if name in source]
    nodes = [made.node for made in found.symbols.operations]
    graphs = sum(node.op == "placeholder" and node.target == f"L_{name}" for node in nodes)
    loads = sum(name in text for text in found.variables)
    return set(kinds) <= {"TYPE_MATCH"} and loads <= graphs <= 1


_SCALAR_FUNCTIONS: dict[Any, str] = {
    **{getattr(operator, name): name for name in FUNCTIONS if hasattr(operator, name)},
    **{function: f"_sym_{name}" for name in FUNCTIONS if (function := getattr(torch, f"_sym_{name}", None))},
    torch.sym_float: "float",
    torch.sym_min: "min",
    torch.sym_max: "max",
}
"""The names of the functions that Dynamo computes symbols by."""


def _scalar(made: Operation, scalars: Mapping[fx.Node, Operand]) -> Operand | None:
    """Returns a node as an expression; None if it is not one, and if Dynamo takes it for a constant."""
    node = made.node
    if not node.meta["example_value"].node.expr.free_symbols or made.kwargs:
        return None
    if (node.op, node.target) == ("call_method", "item"):  # Dynamo makes a float of a tensor
        (operand,) = made.args
        return scalars[operand] if isinstance(operand, fx.Node) else None
    function = _SCALAR_FUNCTIONS.get(node.target) if node.op == "call_function" else None
    if function is None:
        return None
    operands: list[Operand] = []
    for each in made.args:
        if isinstance(each, fx.Node) and each in scalars:
            operands.append(scalars[each])
        elif isinstance(each, int | float) and is_number(each):
            operands.append(each)
        else:
            return None
    return Scalar(function.removeprefix("_sym_"), tuple(operands))


# ---------------------------------------------------------------------- operations of tensors

_ARITHMETIC = ("add", "sub", "mul", "truediv", "iadd", "isub", "imul", "itruediv")
_OPERATIONS = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide")

_OF_TWO: frozenset[Any] = frozenset(
    (
        *(getattr(operator, name) for name in _ARITHMETIC),
        *(getattr(torch, name) for name in (*_OPERATIONS, "rsub")),
        *_OPERATIONS,
        *(f"{name}_" for name in _OPERATIONS),
    )
)
"""Functions and methods of two operands, either of which may be a scalar, if they are called with no more."""

_FILLING: dict[Any, int] = {
    torch.full: 1,
    torch.full_like: 1,
    "new_full": 2,
    "fill_": 1,
    "masked_fill": 2,
    "masked_fill_": 2,
}
"""Functions and methods that write a scalar, with its place among their arguments."""


def _takes_scalars(made: Operation, scalars: Mapping[fx.Node, Operand]) -> bool:
    """Whether an operation runs the same way whatever the scalars are that it is given."""
    node, args, kwargs = made.node, made.args, made.kwargs
    if node.op not in ("call_function", "call_method"):
        return False
    is_method = node.op == "call_method"
    if not isinstance(node.meta.get("example_value"), Tensor) or is_method != isinstance(node.target, str):
        return False
    if node.target in _OF_TWO:
        return len(args) == 2 and not kwargs and len(_nodes(args, scalars)) == 1
    place = _FILLING.get(node.target)
    if place is None or len(args) <= place or not isinstance(args[place], fx.Node):
        return False
    others = (*args[:place], *args[place + 1 :]), kwargs
    return args[place] in scalars and not _nodes(others, scalars)


def _nodes(arguments: Any, among: Mapping[fx.Node, Operand]) -> list[fx.Node]:
    """Returns the nodes in arguments, nested ones included, that are among some."""
    found: list[fx.Node] = []
    visit: Callable[[fx.Node], None] = found.append
    fx.map_arg(arguments, visit)
    return [each for each in found if each in among]
