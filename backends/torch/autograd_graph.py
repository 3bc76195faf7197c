"""Finds the tensors that autograd holds for operations outside of planned steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ...torch_support.autograd_graph import leaf_of, nodes_behind

__all__ = ["held_by_history"]


def held_by_history(
    tensors: Iterable[Tensor], is_known: Callable[[Any], bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Finds the tensors that the history of some tensors holds for backward.

    Args:
        tensors: The tensors at which the search begins.
        is_known: Whether an autograd node is accounted for: the search stops there.

    Returns:
        The tensors that the nodes on the way have saved, and the leaves that will get a gradient from them.
    """
    nodes = list(nodes_behind((tensor.grad_fn for tensor in tensors), is_known))
    saved = [tensor for node in nodes for tensor in _saved_by(node)]
    return saved, [leaf for node in nodes if (leaf := leaf_of(node)) is not None]


def _saved_by(node: Any) -> Iterator[Tensor]:
    for name in ("saved_tensors", *(n for n in dir(node) if n.startswith("_saved_"))):
        try:
            held = getattr(node, name, None)
        except RuntimeError:  # freed by a backward, or written since: the backward will say so
            continue
        for tensor in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(tensor, Tensor):
                yield tensor
