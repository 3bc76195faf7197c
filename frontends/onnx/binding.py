"""The shapes of the inputs: what the graph says, what the user adds, and where the two disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir
import torch
from torch import Tensor

from ...ir.errors import UnsupportedError, UsageError
from .bounds import MOST_BYTES, too_large
from .tensors import torch_dtype

__all__ = ["Constant", "InputSpec", "bind_constants", "bind_inputs"]

Constant: TypeAlias = "Tensor | bool | float | Sequence[Constant]"
"""A tensor, a number, or numbers in nested lists."""

InputSpec = tuple[str, "tuple[int, ...] | None", "torch.dtype | None"]
"""Name, shape and element type; without a shape it is a list of tensors, a value that may be absent, or
strings, which have no element type."""


def bind_constants(graph: ir.Graph, constants: Mapping[str, Constant]) -> dict[str, Tensor]:
    """The values that are given for inputs, as tensors of their types.

    Raises:
        UsageError: IRC314 when there is no such input, IRC315 when its value does not fit.
        UnsupportedError: IRC304 for an element type that torch lacks.
    """
    values = {v.name or "": v for v in graph.inputs if not v.is_initializer()}
    settled: dict[str, Tensor] = {}
    for name, constant in constants.items():
        if name not in values:
            raise _no_input(name, list(values))
        _, _, dtype = _spec(values[name], {name: ()}, {}, None)
        if dtype is None:
            raise UnsupportedError(
                "IRC304",
                f"the input {name!r} is of strings, which do not settle",
                help="give them to each call",
            )
        try:
            tensor = torch.as_tensor(constant)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                "IRC315", f"the value of the input {name!r} is no tensor: {error}", help="give numbers"
            ) from error
        if not torch.can_cast(tensor.dtype, dtype):
            raise UsageError(
                "IRC315",
                f"the value of the input {name!r} is of {tensor.dtype}, where the file has {dtype}",
                help="give a value of that type",
            )
        settled[name] = tensor.detach().to(dtype)
    return settled


def _no_input(name: str, names: Sequence[str]) -> UsageError:
    return UsageError(
        "IRC314",
        f"the model has no input {name!r}",
        help=f"its inputs are {', '.join(map(repr, names))}",
    )


def bind_inputs(
    graph: ir.Graph, batch: int | None = None, inputs: Mapping[str, Sequence[int]] | None = None
) -> list[InputSpec]:
    """Name, shape and element type of each input, with no axis of a tensor left open.

    A symbol stands for one size: bound in one input, it is bound in all. Initializers that older files also
    list as inputs are weights, not inputs.

    Args:
        graph: The graph.
        batch: Size of the leading axis of every input that leaves it open.
        inputs: Whole shapes by input name.

    Raises:
        UsageError: IRC314 to IRC317, see each message.
        UnsupportedError: IRC304 for an element type that torch lacks.
    """
    values = [v for v in graph.inputs if not v.is_initializer()]
    inputs = dict(inputs or {})
    names = [v.name or "" for v in values]
    for name in inputs:
        if name not in names:
            raise _no_input(name, names)
    symbols: dict[str, int] = {}
    for value in values:
        if value.name is not None and value.name in inputs:
            _match(value, tuple(inputs[value.name]), symbols)
    if batch is not None:
        _bind_batch(values, batch, inputs, symbols)
    return [_spec(v, inputs, symbols, batch) for v in values]


def describe(value: ir.Value) -> str:
    """An input's shape as the graph gives it, such as `[batch, 3, ?]`."""
    if value.shape is None:
        return "of any rank"
    return (
        "["
        + ", ".join(str(_size(d)) if _size(d) is not None else _symbol(d) or "?" for d in value.shape)
        + "]"
    )


def _size(dim: int | ir.SymbolicDim) -> int | None:
    """The size of an axis; `None` where it is open, which some exporters write as -1."""
    return dim if isinstance(dim, int) and dim >= 0 else None


def _symbol(dim: int | ir.SymbolicDim) -> str | None:
    """The symbol of an axis; `?` is how some exporters write that it has none."""
    return dim.value if isinstance(dim, ir.SymbolicDim) and dim.value != "?" else None


def _match(value: ir.Value, shape: tuple[int, ...], symbols: dict[str, int]) -> None:
    def contradicts(why: str) -> UsageError:
        return UsageError(
            "IRC315",
            f"shape {list(shape)} contradicts the input {value.name!r} {describe(value)}: {why}",
            help="give every axis its size; fixed sizes cannot change",
        )

    if any(n < 0 for n in shape):
        raise contradicts("sizes are not negative")
    if value.shape is None:
        return
    if len(shape) != len(value.shape):
        raise contradicts(f"{len(shape)} axes for {len(value.shape)}")
    for axis, (n, dim) in enumerate(zip(shape, value.shape, strict=True)):
        fixed, symbol = _size(dim), _symbol(dim)
        if fixed is not None and fixed != n:
            raise contradicts(f"axis {axis} is fixed at {fixed}")
        if symbol is not None and symbols.setdefault(symbol, n) != n:
            raise contradicts(f"{symbol} is already {symbols[symbol]}")


def _bind_batch(
    values: Sequence[ir.Value], batch: int, inputs: Mapping[str, Sequence[int]], symbols: dict[str, int]
) -> None:
    if batch < 1:
        raise UsageError("IRC316", f"a batch of {batch} is not possible", help="give a batch of at least 1")
    leading = [(v, v.shape[0]) for v in values if v.shape is not None and len(v.shape) > 0]
    open_ = [(v, d) for v, d in leading if _size(d) is None]
    for value, dim in open_:
        symbol = _symbol(dim)
        name = value.name or ""
        known = inputs[name][0] if name in inputs else symbols.get(symbol or "", batch)
        if known != batch:
            raise UsageError(
                "IRC316",
                f"a batch of {batch} contradicts the input {value.name!r}, whose axis 0 is bound to {known}",
                help="leave out one of the two",
            )
        if symbol is not None:
            symbols[symbol] = batch
    if not open_ and not any(_size(d) == batch for _, d in leading):
        fixed = ", ".join(f"{v.name!r} {describe(v)}" for v in values)
        raise UsageError(
            "IRC316",
            f"there is no open batch axis to bind to {batch}: the inputs are {fixed}",
            help="leave out the batch, or export the model with a symbolic leading axis",
        )


def _spec(
    value: ir.Value, inputs: Mapping[str, Sequence[int]], symbols: Mapping[str, int], batch: int | None
) -> InputSpec:
    name = value.name or ""
    kind = value.type
    if isinstance(kind, ir.SparseTensorType):
        raise UnsupportedError(
            "IRC304", f"the input {name!r} is a sparse tensor", help="export the model with dense tensors"
        )
    if isinstance(kind, ir.TensorType) and kind.dtype is ir.DataType.STRING:
        return name, None, None
    dtype = torch_dtype(None if kind is None else kind.dtype)
    if dtype is None:
        named = "no element type" if kind is None else kind.dtype.name
        raise UnsupportedError(
            "IRC304",
            f"the input {name!r} has {named}, which torch has not",
            help="export the model with another type",
        )
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        return name, None, dtype
    if name in inputs:
        return name, _checked(name, tuple(inputs[name]), dtype), dtype
    if value.shape is None:
        raise UsageError(
            "IRC317",
            f"the input {name!r} has no shape in the file",
            help=f"give it one, as --input {name}=1,3,224,224",
        )
    sizes: list[int] = []
    for axis, dim in enumerate(value.shape):
        fixed, symbol = _size(dim), _symbol(dim)
        size = fixed if fixed is not None else symbols.get(symbol or "")
        if size is None and axis == 0:
            size = batch
        if size is None:
            raise UsageError(
                "IRC317",
                f"axis {axis} ({symbol or 'unnamed'}) of the input {name!r} {describe(value)} has no size",
                help=("add --batch N, or " if axis == 0 else "")
                + f"bind it with --input {name}={_example(value)}",
            )
        sizes.append(size)
    return name, _checked(name, tuple(sizes), dtype), dtype


def _checked(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_BYTES:
        raise too_large(
            f"the input {name!r} of shape {list(shape)} takes {size:,} B, and at most {MOST_BYTES:,} B can"
            " run",
            help="give it another shape where the file leaves it open, or mend the file",
        )
    return shape


def _example(value: ir.Value) -> str:
    assert value.shape is not None
    return ",".join(
        str(_size(d)) if _size(d) is not None else (_symbol(d) or "N").upper() for d in value.shape
    )
