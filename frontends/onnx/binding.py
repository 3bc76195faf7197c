"""The shapes of the inputs: what the graph says, what the user adds, and where the two disagree.

An axis that neither binds stays a symbol: each run may give it another size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir
import torch
from torch import Tensor

from ...ir.errors import UnsupportedError, UsageError
from ...ir.printable import printable
from .bounds import MOST_BYTES, too_large
from .tensors import torch_dtype

__all__ = [
    "BoundSpec",
    "Constant",
    "InputSpec",
    "Shape",
    "bind_constants",
    "bind_inputs",
    "bound",
    "check_run",
    "declared_inputs",
    "describe",
    "is_open",
]

Constant: TypeAlias = "Tensor | bool | float | Sequence[Constant]"
"""A tensor, a number, or numbers in nested lists."""

Shape: TypeAlias = tuple[int | str, ...]
"""The size of each axis, or the symbol of one that is open."""

InputSpec = tuple[str, Shape | None, torch.dtype | None]
"""Name, shape and element type; without a shape it is a list of tensors, a value that may be absent, or
strings, which have no element type."""

BoundSpec = tuple[str, tuple[int, ...] | None, torch.dtype | None]
"""The same if no axis is open."""


def bind_constants(graph: ir.Graph, constants: Mapping[str, Constant]) -> dict[str, Tensor]:
    """The values that are given for inputs, as tensors of their types.

    Raises:
        UsageError: IRC314 when there is no such input, IRC315 when its value does not fit.
        UnsupportedError: IRC304 for an element type that torch lacks.
    """
    values = {v.name or "": v for v in graph.inputs if not v.is_initializer()}
    bound_at_import: dict[str, Tensor] = {}
    for name, constant in constants.items():
        if name not in values:
            raise _no_input(name, list(values))
        _, _, dtype = _spec(values[name], {name: ()}, {}, None)
        if dtype is None:
            raise UnsupportedError(
                "IRC304",
                f"the input {name!r} is of strings, which cannot be bound at import",
                help="give them to each call",
            )
        try:
            tensor = torch.as_tensor(constant)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                "IRC315", f"the value of the input {name!r} is not a tensor: {error}", help="give numbers"
            ) from error
        if not torch.can_cast(tensor.dtype, dtype):
            raise UsageError(
                "IRC315",
                f"the value of the input {name!r} is of {tensor.dtype}; in the file it is {dtype}",
                help="give a value of that type",
            )
        bound_at_import[name] = tensor.detach().to(dtype)
    return bound_at_import


def _no_input(name: str, names: Sequence[str]) -> UsageError:
    return UsageError(
        "IRC314",
        f"the model has no input {name!r}",
        help=f"its inputs are {', '.join(map(repr, names))}",
    )


def bind_inputs(
    graph: ir.Graph, batch: int | None, inputs: Mapping[str, Sequence[int]] | None
) -> list[InputSpec]:
    """Name, shape and element type of each input.

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


def declared_inputs(graph: ir.Graph) -> list[InputSpec]:
    """Returns the name of each input and its shape in the graph; None for sequences and optionals."""
    values = [v for v in graph.inputs if not v.is_initializer()]
    kinds = (ir.SequenceType, ir.OptionalType)
    return [(v.name or "", None if isinstance(v.type, kinds) else _declared(v), None) for v in values]


def is_open(shape: Shape | None) -> bool:
    """Whether an axis has no size."""
    return shape is not None and any(isinstance(n, str) for n in shape)


def bound(specs: Sequence[InputSpec], sizes: Mapping[str, int] | None = None) -> list[BoundSpec]:
    """The same inputs without open axes.

    Args:
        specs: The inputs.
        sizes: The sizes of open axes, by symbol.

    Raises:
        UsageError: IRC317 when one is.
    """
    found: list[BoundSpec] = []
    for name, shape, dtype in specs:
        if shape is None:
            found.append((name, None, dtype))
            continue
        shape = tuple((sizes or {}).get(n, n) if isinstance(n, str) else n for n in shape)
        known = tuple(n for n in shape if isinstance(n, int))
        if len(known) < len(shape):
            axis, symbol = next((i, n) for i, n in enumerate(shape) if isinstance(n, str))
            example = ",".join(str(n).upper() for n in shape)
            raise UsageError(
                "IRC317",
                f"axis {axis} ({symbol}) of the input {name!r} {describe(shape)} has no size",
                help=("add --batch N, or " if axis == 0 else "") + f"bind it with --input {name}={example}",
            )
        found.append((name, known, dtype))
    return found


def describe(shape: Shape | None) -> str:
    """A shape for a person, such as `[batch, 3, 224, 224]`."""
    return "of any rank" if shape is None else f"[{', '.join(printable(str(size), 60) for size in shape)}]"


def _declared(value: ir.Value) -> Shape | None:
    """An input's shape as the graph gives it; an axis without a symbol is called after its place."""
    if value.shape is None:
        return None
    sizes = [(_size(dim), _symbol(dim)) for dim in value.shape]
    return tuple(
        size if size is not None else symbol or f"{value.name}_dim_{axis}"
        for axis, (size, symbol) in enumerate(sizes)
    )


def _size(dim: int | ir.SymbolicDim) -> int | None:
    """The size of an axis; `None` if it is open, which some exporters write as -1."""
    return dim if isinstance(dim, int) and dim >= 0 else None


def _symbol(dim: int | ir.SymbolicDim) -> str | None:
    """The symbol of an axis; `?` and `None` are how some exporters write that it has none."""
    return dim.value if isinstance(dim, ir.SymbolicDim) and dim.value not in ("?", "None") else None


def check_run(specs: Sequence[InputSpec], shapes: Sequence[tuple[int, ...] | None]) -> None:
    """Hold what a run is given against what the graph declares.

    Args:
        specs: The inputs with the symbols of the graph.
        shapes: The shape that is given for each.

    Raises:
        UsageError: IRC315.
    """
    symbols: dict[str, int] = {}
    for (name, declared, _), shape in zip(specs, shapes, strict=True):
        why = None if shape is None or declared is None else _contradiction(declared, shape, symbols)
        if why is not None and shape is not None:
            raise _contradicts(
                name,
                declared,
                shape,
                why,
                "a symbol is one size in all inputs; from_onnx(path, batch=N) can change a fixed batch",
            )


def _match(value: ir.Value, shape: tuple[int, ...], symbols: dict[str, int]) -> None:
    declared, why = _declared(value), None
    if any(n < 0 for n in shape):
        why = "sizes are not negative"
    elif declared is not None:
        why = _contradiction(declared, shape, symbols)
    if why is not None:
        help = "give every axis its size; fixed sizes cannot change"
        raise _contradicts(value.name or "", declared, shape, why, help)


def _contradiction(declared: Shape, shape: tuple[int, ...], symbols: dict[str, int]) -> str | None:
    """Why a shape does not fit the declared one; notes the sizes of symbols."""
    if len(shape) != len(declared):
        return f"{len(shape)} axes for {len(declared)}"
    for axis, (n, size) in enumerate(zip(shape, declared, strict=True)):
        if type(n) is not int:  # a symbol of a tracer
            continue
        if isinstance(size, int) and size != n:
            return f"axis {axis} is fixed at {size}"
        if isinstance(size, str) and symbols.setdefault(size, n) != n:
            return f"{size} is already {symbols[size]}"
    return None


def _contradicts(
    name: str, declared: Shape | None, shape: tuple[int, ...], why: str, help: str
) -> UsageError:
    return UsageError(
        "IRC315",
        f"shape {list(shape)} contradicts the input {name!r} {describe(declared)}: {why}",
        help=help,
    )


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
        fixed = ", ".join(f"{v.name!r} {describe(_declared(v))}" for v in values)
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
    declared = _declared(value)
    if declared is None:
        raise UsageError(
            "IRC317",
            f"the input {name!r} has no shape in the file",
            help=f"give it one, as --input {name}=1,3,224,224",
        )
    sizes: list[int | str] = []
    for axis, size in enumerate(declared):
        if isinstance(size, str):
            size = symbols.get(size, size if axis or batch is None else batch)
        sizes.append(size)
    return name, _checked(name, tuple(sizes), dtype), dtype


def _checked(name: str, shape: Shape, dtype: torch.dtype) -> Shape:
    size = math.prod(n for n in shape if isinstance(n, int)) * dtype.itemsize
    if size > MOST_BYTES:
        raise too_large(
            f"the input {name!r} of shape {list(shape)} takes {size:,} B, and at most {MOST_BYTES:,} B can"
            " run",
            help="give it another shape where the file leaves it open, or mend the file",
        )
    return shape
