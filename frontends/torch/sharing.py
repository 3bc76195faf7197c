"""Results that share memory: which of them are plain views, and which need a gradient of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...ir import Sharing
from ...torch_support.autograd_graph import leaf_of

__all__ = ["own_output", "sharings"]


def sharings(
    results: Collection[Tensor], inputs: Iterable[Tensor], hooked: Collection[Tensor]
) -> list[Sharing]:
    """Tells how each of some results of a forward gets its gradient; called while it is traced.

    A planned step makes views of results and inputs anew, outside of the graph, so that torch knows of them
    when somebody writes into one. If a function of the model's or a hook is on the way of a gradient between
    them, the graph must take each gradient.

    Args:
        results: The results that the loss may use, each once.
        inputs: The arguments, parameters and buffers.
        hooked: The tensors that the forward has put hooks on.
    """
    statics = {id(tensor) for tensor in inputs}
    hooked_ids, hooked_memory = {id(tensor) for tensor in hooked}, {_memory(tensor) for tensor in hooked}
    ways = [_way(result, id(result) in statics) for result in results]
    with_own = {_memory(result) for result, way in zip(results, ways, strict=True) if way is Sharing.OWN}
    with_own |= hooked_memory

    def of(result: Tensor, way: Sharing) -> Sharing:
        if id(result) in statics:
            return Sharing.OWN if id(result) in hooked_ids and result.requires_grad else way
        return Sharing.OWN if way is Sharing.VIEW and _memory(result) in with_own else way

    return [of(result, way) for result, way in zip(results, ways, strict=True)]


def own_output(result: Tensor) -> Tensor:
    """The same memory as a result that autograd takes for no view."""
    return torch.ops.aten._unsafe_view.default(result, result.shape)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _way(result: Tensor, is_static: bool) -> Sharing:
    """Follows the gradient of a result to what it is a view of."""
    if is_static:
        return Sharing.VIEW
    if not result.requires_grad:
        return Sharing.DETACHED
    base: Any = result._base
    last = result if base is None else base
    node: Any = result.grad_fn
    while node is not None and (base is None or node is not base.grad_fn):
        if (leaf := leaf_of(node)) is not None:
            return Sharing.VIEW if leaf is last else Sharing.NO_GRAD
        if base is None:
            return Sharing.VIEW
        if isinstance(node, BackwardCFunction) or len(node.next_functions) != 1:
            return Sharing.OWN
        node = node.next_functions[0][0]
    return Sharing.NO_GRAD if node is None else Sharing.VIEW
