"""Finds the outputs whose gradients a value of backward is computed from, or is zero without."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from .fused import FUSED, RESULT, place_of, steps_of
from .graph import Argument, Graph, InputRole, Node, Symbol, values_in
from .types import Value

__all__ = ["is_linear", "output_dependencies", "zero_without"]

_Outputs = frozenset[int]


def output_dependencies(graph: Graph) -> dict[Value, frozenset[int]]:
    """Returns the values that are computed from tangents, each with the indices of their outputs."""
    reached = _tangents(graph)
    nothing = frozenset[int]()
    for node in graph.nodes:
        through = nothing.union(*(reached.get(value, nothing) for value in node.operands))
        if through:
            reached.update(dict.fromkeys(node.values, through))
    return reached


def zero_without(graph: Graph) -> dict[Value, frozenset[int]]:
    """Returns the values that are known to be zero if none of their outputs has a gradient.

    An operation that is linear in gradients makes zeros of zeros. A user's own backward may not be linear: a
    term that it adds to a gradient is there without one.
    """
    zero = _tangents(graph)
    for node in graph.nodes:
        found = _zero(node, zero)
        if found is not None:
            zero.update(dict.fromkeys(node.values, found))
    return zero


def _tangents(graph: Graph) -> dict[Value, _Outputs]:
    return {i.value: frozenset([int(i.target)]) for i in graph.inputs if i.role is InputRole.TANGENT}


_OF_FIRST = frozenset(
    {
        "_conj",
        "_fft_c2c",
        "_fft_c2r",
        "_fft_r2c",
        "_to_copy",
        "_unsafe_view",
        "alias",
        "as_strided",
        "clone",
        "conj_physical",
        "cumsum",
        "detach",
        "diagonal",
        "expand",
        "flip",
        "gather",
        "imag",
        "index",
        "index_select",
        "mean",
        "neg",
        "permute",
        "real",
        "repeat",
        "reshape",
        "roll",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "sum",
        "t",
        "transpose",
        "tril",
        "triu",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "view_as_complex",
        "view_as_real",
    }
)
"""Operations that are linear in the first argument. torch's backwards are linear in the gradient too."""
_OF_EITHER = frozenset({"bmm", "convolution", "dot", "mm", "mul", "mul_", "mv"})
"""Operations whose result is zero if one of the first two arguments is."""
_OF_ALL = {
    "add.Tensor": (0, 1),
    "cat.default": (0,),
    "copy.default": (1,),
    "div.Tensor": (0,),
    "index_add.default": (0, 3),
    "index_put.default": (0, 2),
    "scatter.src": (0, 3),
    "scatter_add.default": (0, 3),
    "select_scatter.default": (0, 1),
    "slice_scatter.default": (0, 1),
    "stack.default": (0,),
    "sub.Tensor": (0, 1),
    "where.self": (1, 2),
}
"""Operations whose result is zero if the arguments at these positions are."""
_ZEROS = frozenset({"new_zeros", "zeros", "zeros_like"})
_BACKWARDS = ("_backward", "_backward_data")


def _zero(node: Node, zero: dict[Value, _Outputs]) -> _Outputs | None:
    """Returns the outputs without which the results of an operation are zero; None if that is not known."""
    if node.op == FUSED:
        return _zero_of_all(node, zero)
    if (target := node.written_operand) is not None:  # what is not written stays as it was
        plain = replace(node, op=node.plain_op, traits=frozenset())
        outputs = _zero(plain, zero)
        return None if outputs is None or target not in zero else outputs | zero[target]
    namespace, _, overload = node.op.partition(".")
    name = overload.partition(".")[0]
    if namespace not in ("aten", "irc"):
        return None
    if name in _ZEROS:
        return frozenset()
    if name in _OF_EITHER:
        either = [found for each in node.arguments[:2] if (found := _all(each, zero)) is not None]
        return min(either, key=len, default=None)
    is_of_first = name in _OF_FIRST or name.endswith(_BACKWARDS)
    positions = (0,) if is_of_first else _OF_ALL.get(overload)
    if positions is None or max(positions) >= len(node.arguments):
        return None
    found = [_all(node.arguments[position], zero) for position in positions]
    known = [each for each in found if each is not None]
    return frozenset[int]().union(*known) if len(known) == len(found) else None


def is_linear(node: Node, reached: Collection[Value]) -> bool:
    """Whether the results of an operation are known to be linear in these operands, all at once."""
    namespace, _, overload = node.op.partition(".")
    name = overload.partition(".")[0]
    if namespace not in ("aten", "irc") or any(True for _, each in node.keywords for _ in values_in(each)):
        return False
    read = [index for index, each in enumerate(node.arguments) if not _none_of(each, reached)]
    if name in _OF_EITHER:
        return read in ([0], [1])
    is_of_first = name in _OF_FIRST or name.endswith(_BACKWARDS)
    positions = [0] if is_of_first else [*_OF_ALL.get(overload, ())]
    return (
        bool(positions)
        and read == positions
        and all(value in reached for index in read for value in values_in(node.arguments[index]))
    )


def _none_of(argument: Argument, values: Collection[Value]) -> bool:
    return not any(value in values for value in values_in(argument))


def _zero_of_all(node: Node, zero: dict[Value, _Outputs]) -> _Outputs | None:
    """Returns the outputs without which all results of a fused node are zero; None if that is not known."""
    steps, returns = steps_of(node)
    (some, *_) = node.values
    known = dict(zero)
    made = [Value(f"result {index}", some.type, some.storage) for index in range(len(steps))]
    for step, value in zip(steps, made, strict=True):
        arguments = tuple(_of_values(argument, made) for argument in step.arguments)
        found = _zero(Node(value.name, step.op, arguments, (value,)), known)
        if found is not None:
            known[value] = found
    return _all(tuple(made[place_of(each)] for each in returns), known)


def _of_values(argument: Argument, made: Sequence[Value]) -> Argument:
    """Returns an argument of an operation within with a value for each result."""
    if isinstance(argument, tuple):
        return tuple(_of_values(item, made) for item in argument)
    if isinstance(argument, Symbol) and argument.kind == RESULT:
        return made[place_of(argument)]
    return argument


def _all(argument: Argument, zero: dict[Value, _Outputs]) -> _Outputs | None:
    """Returns the outputs without which all tensors in an argument are zero; None if that is not known."""
    values = list(values_in(argument))
    if not values or not all(value in zero for value in values):
        return None
    return frozenset[int]().union(*(zero[value] for value in values))
