"""Follows what a module writes in place while it is traced: a trace makes it anew, laid out as it was."""

# Modes and tensors of the tracer have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...torch_support.layouts import same_layout
from ...torch_support.operations import overload_of
from .fixups.tangent_layouts import is_expanded

__all__ = ["is_data", "is_in_place", "is_recorded", "note_data", "noting_writes", "owner_of_data"]

_KEY = "irc.in_place"
_DATA = "irc.tensor_data"
_OWNER = "_irc_owner_of_data"


class _Writing(TorchDispatchMode):
    """Tells whether an operation that writes is being traced: it runs before that becomes functional."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.is_recorded = False
        """Whether autograd records the write, as one over a tensor that asks for a gradient."""
        self.is_data = False
        """Whether the write goes into the `data` of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        self.depth += 1
        self.is_recorded = torch.is_grad_enabled() and bool(args) and _asks(args[0])
        self.is_data = bool(args) and owner_of_data(args[0]) is not None
        try:
            if func is torch.ops.aten.bernoulli_.float:
                func(_in_memory_order(args[0]), *args[1:], **kwargs)
                return args[0]
            if loose := _laid_out(func, kwargs):
                return _written_beside(func, args, kwargs, loose)
            functional = _laid_out_otherwise(func, args, kwargs)
            return func(*args, **kwargs) if functional is None else args[0].copy_(functional(*args, **kwargs))
        finally:
            self.depth -= 1


def _asks(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.requires_grad


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A view whose elements are in the order in which eager draws them; a trace draws row by row."""
    if is_expanded(tensor.shape, tensor.stride()):
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _laid_out(func: Any, kwargs: Any) -> dict[str, Tensor]:
    """Returns the tensors that are given for results (`out=`) and whose layout a trace would not keep."""
    names = (each.name for each in func._schema.arguments if each.kwarg_only and each.alias_info is not None)
    tensors = {name: kwargs[name] for name in names if isinstance(kwargs.get(name), FunctionalTensor)}
    return {name: tensor for name, tensor in tensors.items() if _is_permuted(tensor)}


def _written_beside(func: Any, args: Any, kwargs: Any, places: dict[str, Tensor]) -> Any:
    """Runs an operation into new tensors, and copies these to their places."""
    rows = {
        name: torch.empty_like(place, memory_format=torch.contiguous_format) for name, place in places.items()
    }
    results = func(*args, **{**kwargs, **rows})
    copied = {id(row): places[name].copy_(row) for name, row in rows.items()}
    return pytree.tree_map(lambda result: copied.get(id(result), result), results)


def _is_permuted(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory, in another order than rows do."""
    return not tensor.is_contiguous() and is_non_overlapping_and_dense_or_false(tensor)


def _laid_out_otherwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the functional form of a write over an operand, if it lays its result out otherwise."""
    operand = args[0] if args else None
    library, name, overload = str(func).split(".")
    # a part is written into the whole, which is laid out as it is
    if not isinstance(operand, FunctionalTensor) or not _is_permuted(operand) or not name.endswith("_"):
        return None
    if torch.Tag.inplace_view in func.tags:
        return None  # `t_` and `resize_` change the layout, and no numbers
    functional = overload_of(f"{library}.{name[:-1]}.{overload}")
    if functional is None:
        return None
    args, kwargs = pytree.tree_map_only(
        FunctionalTensor, lambda tensor: torch._from_functional_tensor(tensor.elem), (args, kwargs)
    )
    with _disable_current_modes():
        result = functional(*args, **kwargs)
    return None if same_layout(result, operand.stride()) else functional


@contextlib.contextmanager
def noting_writes() -> Generator[None]:
    """Meanwhile, the nodes that are traced for an operation that writes are known by `is_in_place`.

    The tracer copies other notes from nodes of forward to those of backward; this one stays with its node.
    """
    create_node = fx.Graph.create_node
    writing = _Writing()

    def noting(graph: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(graph, *args, **kwargs)
        if writing.depth:
            node.meta[_KEY] = writing.is_recorded
            node.meta[_DATA] = writing.is_data
        return node

    with patch.object(fx.Graph, "create_node", noting), writing:
        yield


def note_data(data: Any, tensor: Tensor) -> None:
    """Notes that a tensor is the `data` of another."""
    setattr(data, _OWNER, tensor)


def owner_of_data(tensor: object) -> Tensor | None:
    """Returns the tensor whose `data` this one was noted to be."""
    return getattr(tensor, _OWNER, None) if isinstance(tensor, Tensor) else None


def is_data(node: fx.Node) -> bool:
    """Whether a write went into the `data` of a tensor, whose version does not count it."""
    return node.meta.get(_DATA, False)


def is_in_place(node: fx.Node) -> bool:
    """Whether the model's code writes what this traced operation makes over memory that it has."""
    return _KEY in node.meta


def is_recorded(node: fx.Node) -> bool:
    """Whether autograd records this write."""
    return node.meta[_KEY]
