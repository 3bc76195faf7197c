"""Lays out, while a module is traced, the gradients of views whose memory is written as eager does."""

# Versions, views and functions of gradients have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ...torch_support.layouts import in_layout

__all__ = ["ViewGradients"]

_autograd, _functorch = cast(Any, torch._C)._autograd, cast(Any, torch._C)._functorch


class ViewGradients(TorchFunctionMode):
    """Lays out the gradient of a view as the view is, once something else writes into its memory.

    There eager's autograd puts `as_strided` in place of what made the view; of the tensors of a trace it
    repeats what made the view, which hands on gradients in any layout.
    """

    def __init__(self) -> None:
        super().__init__()
        self._writes = WeakTensorKeyDictionary()
        """The numbers of writes so far into the memory of views that have gradients, by view."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = _counting((args[:1], (kwargs or {}).get("out")))
        before = [operand._version for operand in operands]
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            name = getattr(func, "__name__", "")
            if name.startswith("_foreach_") and name.endswith("_"):
                _count_writes(operands, before)
            for view in _counting(result):
                if view.requires_grad and view._is_view() and _follows_writes(view):
                    self._writes[view] = view._version
            if before != [operand._version for operand in operands]:
                self._lay_out_gradients()
        return result

    def _lay_out_gradients(self) -> None:
        """Lays out the gradients of the views whose memory was written, but for those that were written."""
        for view, writes in list(self._writes.items()):
            if view._version != writes:
                self._writes[view] = view._version
                function: Any = view.grad_fn
                if function is not None and is_non_overlapping_and_dense_or_false(view):
                    function.register_prehook(_laying_out(view.output_nr, view.stride()))


def _laying_out(place: int, strides: Sequence[int]) -> Any:
    """Returns a hook that lays out one of the gradients that a function is given."""

    def hook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        gradient = gradients[place]
        if gradient is None:
            return gradients
        return (*gradients[:place], in_layout(gradient, strides), *gradients[place + 1 :])

    return hook


def _counting(values: object) -> list[Tensor]:
    """Lists the tensors that count writes, without what torch.vmap wraps them in.

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


def _count_writes(written: Sequence[Tensor], before: Sequence[int]) -> None:
    """Counts a write into each tensor of a list, as eager's operations on lists do; traced, they count none.

    Without it, gradients of views of these tensors would pass the operation by.
    """
    for tensor, writes in zip(written, before, strict=True):
        if tensor._version == writes:
            torch.autograd.graph.increment_version(tensor)


def _follows_writes(view: Tensor) -> bool:
    """Whether torch makes the function of a view's gradient anew when the base is written.

    Torch refuses it for views by `unbind`, by functions of the user's and under `no_grad`, as soon as the
    function is asked for: a forward that does not read them afterwards trains.
    """
    return _autograd._get_creation_meta(view) == _autograd.CreationMeta.DEFAULT
