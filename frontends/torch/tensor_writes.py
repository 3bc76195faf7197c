"""Watches a forward for writes into tensors that a trace does not see, or not as they are."""

# Versions and views of tensors have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ...ir import THROUGH_DYNAMO, Location, UnsupportedError
from .fixups.kernel_layouts import in_layout
from .source_lines import user_line

__all__ = ["DataAssignedError", "TensorWrites"]

_autograd, _functorch = cast(Any, torch._C)._autograd, cast(Any, torch._C)._functorch
_SET_DATA = cast(Any, torch.Tensor.data).__set__
_SWITCHES = torch.Tensor.requires_grad_, cast(Any, torch.Tensor.requires_grad).__set__


class DataAssignedError(UnsupportedError):
    """The forward gives a tensor other data, which a first call alone may do."""


class TensorWrites(TorchFunctionMode):
    """Refuses that a forward gives a tensor other data: the graph would go on with what it had before.

    The gradient of a view of what is written afterwards is laid out as the view is: there eager's autograd
    puts `as_strided` in place of what made the view.

    Args:
        parts: Takes the lines that compute in place in a part of a tensor whose elements do not lie together.
            The trace computes them apart, and a function of the result goes through other vectors of the
            processor.

    Raises:
        UnsupportedError: IRC338.
    """

    def __init__(self, parts: set[str]) -> None:
        super().__init__()
        self.parts = parts
        self._views = WeakTensorKeyDictionary()
        """Those that have gradients, with the number of writes into their memory so far."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            line = _line()
            raise DataAssignedError(
                "IRC338",
                "the forward assigns to the data of a tensor, which no trace sees",
                at=None if line is None else Location(source=line),
                help="if the first call alone does so, as of packed layers with biases, call the module once "
                "before irc.optimize; or write into it with copy_(), under torch.no_grad() if it is a "
                f"parameter; or {THROUGH_DYNAMO}",
            )
        if func in _SWITCHES:
            tensor, has_gradient = args[0], bool((kwargs or {}).get("requires_grad", (*args, True)[1]))
            if tensor.requires_grad is has_gradient:
                return tensor  # a traced tensor is no leaf, of which torch would take this
            if not has_gradient and not tensor.is_leaf:
                raise _no_gradient()
        if _computes_in_place(getattr(func, "__name__", "")) and args and _is_loose(args[0]):
            self.parts.add(_line() or "a library")
        operands = _tensors((args[:1], (kwargs or {}).get("out")))
        writes = [operand._version for operand in operands]
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            if getattr(func, "__name__", "").startswith("_foreach_") and func.__name__.endswith("_"):
                _count_writes(operands, writes)
            for view in _tensors(result):
                if view.requires_grad and view._is_view() and _follows_writes(view):
                    self._views[view] = view._version
            if writes != [operand._version for operand in operands]:
                self._lay_out_gradients()
        return result

    def _lay_out_gradients(self) -> None:
        """Lays out the gradients of the views whose memory was written, but for those that were written."""
        for view, writes in list(self._views.items()):
            if view._version != writes:
                self._views[view] = view._version
                # torch crashes if a view has hooks before the function of its gradient is made anew
                if is_non_overlapping_and_dense_or_false(view) and view.grad_fn is not None:
                    view.register_hook(partial(in_layout, strides=view.stride()))


def _tensors(values: object) -> list[Tensor]:
    """Those that count writes, without what torch.vmap wraps them in.

    Tensors of inference count none, and torch cannot put hooks on those of torch.func's gradients.
    """
    tensors: list[Tensor] = []
    for tensor in pytree.tree_leaves(values):
        while isinstance(tensor, Tensor) and _functorch.is_batchedtensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if (
            isinstance(tensor, Tensor)
            and not tensor.is_inference()
            and not _functorch.is_functorch_wrapped_tensor(tensor)
        ):
            tensors.append(tensor)
    return tensors


def _count_writes(written: Sequence[Tensor], writes: Sequence[int]) -> None:
    """Counts a write into each tensor of a list, as eager's operations on lists do; traced, they count none.

    Without it, gradients of views of these tensors would pass the operation by.
    """
    for tensor, before in zip(written, writes, strict=True):
        if tensor._version == before:
            torch.autograd.graph.increment_version(tensor)


def _follows_writes(view: Tensor) -> bool:
    """Whether torch makes the function of a view's gradient anew when the base is written.

    Torch refuses it for views by `unbind`, by functions of the user's and under `no_grad`, as soon as the
    function is asked for: a forward that does not read them afterwards trains.
    """
    return _autograd._get_creation_meta(view) == _autograd.CreationMeta.DEFAULT


def _no_gradient() -> UnsupportedError:
    line = user_line(sys._getframe(2))
    return UnsupportedError(
        "IRC338",
        "the forward takes requires_grad from an argument or a parameter, or from what is computed",
        at=None if line is None else Location(source=line),
        help="compute with x.detach(), or call requires_grad_(False) before the module is called",
    )


def _line() -> str | None:
    return user_line(sys._getframe(2))


def _computes_in_place(name: str) -> bool:
    """Whether a function returns its first argument, changed: `add_`, `__iadd__`."""
    is_method = name.endswith("_") and not name.endswith("__")
    return (is_method and name != "requires_grad_") or (name.startswith("__i") and name != "__init__")


def _is_loose(tensor: object) -> bool:
    """Whether other elements lie between those of a tensor through which gradients may flow."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not torch.is_grad_enabled():
        return False
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and reach + 1 != tensor.numel()
