"""Notes, while a module is traced, which operations its code computes in place: a trace makes them anew."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any
from unittest.mock import patch

from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["is_in_place", "noting_writes"]

_KEY = "irc.in_place"


class _Writing(TorchDispatchMode):
    """Tells whether an operation that writes is being traced: it runs before that becomes functional."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        self.depth += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.depth -= 1


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
            node.meta[_KEY] = True
        return node

    with patch.object(fx.Graph, "create_node", noting), writing:
        yield


def is_in_place(node: fx.Node) -> bool:
    """Whether the model's code writes what this traced operation makes over memory that it has."""
    return _KEY in node.meta
