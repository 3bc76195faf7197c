"""Finds functions of the model's own whose backward sees which of its gradients are missing."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from ...ir import Location, UnsupportedError
from ...torch_support.autograd_graph import nodes_behind
from ...torch_support.this_thread import replaced_here
from .source_lines import user_line

__all__ = ["Seeing", "noting_seeing_nodes", "reaching_hooks", "refuse_gradients_apart"]

Seeing = dict[Any, str | None]
"""Nodes of autograd that are not given zeros for missing gradients, each with the line that asked for it."""

_DECOMPOSITIONS = {"LinalgSvdBackward0": "svd", "LinalgEighBackward0": "eigh", "LinalgEigBackward0": "eig"}
"""Of all operations in torch's samples, those with a formula of their own for gradients of values alone."""
_GROUP_NORM = "NativeGroupNormBackward0"
"""It returns no gradient at all if that of the normalized tensor is missing, and rounds otherwise if that of
the means or the deviations is there."""
_OF_MODULE_HOOK = "BackwardHookFunctionBackward"
"""The nodes around a module with backward hooks."""


@contextlib.contextmanager
def noting_seeing_nodes() -> Generator[Seeing]:
    """Notes nodes for which this thread's forward calls `set_materialize_grads(False)`."""
    seeing: Seeing = {}
    original = FunctionCtx.set_materialize_grads

    def noting(self: Any, value: bool) -> None:
        original(self, value)
        seeing.pop(self, None)
        if not value:
            seeing[self] = user_line(inspect.currentframe())

    with replaced_here(FunctionCtx, "set_materialize_grads", noting):
        yield seeing


def refuse_gradients_apart(seeing: Seeing, results: Sequence[Tensor]) -> set[str]:
    """Refuses such a node if a loss may use some of what it returns: a plan has zeros for the rest.

    Args:
        seeing: The nodes.
        results: The tensors that the forward returns; no one knows which of them the loss uses.

    Returns:
        The decompositions of which the same is true: zeros make their gradients round in another way.

    Raises:
        UnsupportedError: IRC353.
    """
    behind = nodes_behind(result.grad_fn for result in results)
    nodes = {node for node in behind if node in seeing or node.name() in (*_DECOMPOSITIONS, _GROUP_NORM)}
    reached: dict[Any, dict[int, set[int]]] = {node: {} for node in nodes}
    for place, result in enumerate(results if nodes else ()):
        for node, returned in _edges(result):
            if node in nodes:
                reached[node].setdefault(returned, set()).add(place)
    apart = [node for node, places in reached.items() if len(set(map(frozenset, places.values()))) > 1]
    for node in apart:
        if node in seeing or node.name() == _GROUP_NORM:
            line = Location(source=seeing[node]) if node in seeing else None
            raise UnsupportedError(
                "IRC353",
                f"the backward of {node.name().rpartition('Backward')[0]} sees which gradients are missing, "
                "and that depends on which results the loss uses",
                at=line,
                help="give irc.optimize loss= the function by which the training loop computes its loss from "
                f"the result{', or leave out ctx.set_materialize_grads(False)' if line else ''}",
            )
    return {_DECOMPOSITIONS[node.name()] for node in apart}


def reaching_hooks(results: Mapping[int, Tensor], hooked: Collection[Tensor]) -> set[frozenset[int]]:
    """Returns, for each gradient that a hook within the forward sees, the results that it comes from.

    Eager has none for the hook if the loss uses none of these results, where a plan has zeros.

    Args:
        results: Tensors that the forward returns, by a number of each.
        hooked: Tensors on which the forward has put a hook that makes something of zeros.
    """
    behind = nodes_behind(result.grad_fn for result in results.values())
    if not hooked and not any(node.name() == _OF_MODULE_HOOK for node in behind):
        return set()
    tensors = {(tensor.grad_fn, tensor.output_nr) for tensor in hooked}
    reached: dict[Any, set[int]] = {}
    for number, result in results.items():
        for edge in _edges(result):
            if edge in tensors or (edge[0] is not None and edge[0].name() == _OF_MODULE_HOOK):
                reached.setdefault(edge, set()).add(number)
    return set(map(frozenset, reached.values()))


def _edges(result: Tensor) -> Iterator[tuple[Any, int]]:
    """Yields the nodes on the ways of a result's gradient, each with the places of what it returned."""
    yield result.grad_fn, result.output_nr
    for node in nodes_behind([result.grad_fn]):
        yield from node.next_functions
