"""Walks the graph of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["leaf_of", "nodes_behind"]


def nodes_behind(nodes: Iterable[Any], is_known: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yields nodes and all that their gradients go to, each once.

    Args:
        nodes: Where the walk begins; None stands for what has no history.
        is_known: Whether the walk stops at a node, which is left out.
    """
    waiting, seen = list(nodes), set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or (is_known is not None and is_known(node)):
            continue
        seen.add(node)
        yield node
        waiting += (following for following, _ in node.next_functions)


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node accumulates; None for other nodes."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) else None
