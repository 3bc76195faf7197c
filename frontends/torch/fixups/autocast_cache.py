"""The casts that autocast makes of parameters: one for all uses in a forward, as in eager."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput

from ..cast_caches import CastCache
from ..provenance import cast_cache_of, is_converted_by_code, location_of, scopes_of

__all__ = ["kept_casts", "share_casts", "sums_within_forward"]

_CAST = torch.ops.aten._to_copy.default
_ADD = torch.ops.aten.add.Tensor


def share_casts(graph: fx.Graph) -> None:
    """Makes one of the casts of a parameter, or of another leaf with a gradient, that autocast would keep.

    A tracer casts anew for each use, and casts the gradient of each use back before it sums them. Eager
    keeps what it has cast until the outermost region of autocast ends: it sums in half precision and casts
    the sum. If a layer is used several times that is another rounding, more memory and more work.

    Args:
        graph: A joint graph. Without casts of autocast's there is nothing to do.
    """
    output = graph.output_node()
    results: Any = output.args[0]
    gradients = {
        described.grad_of: node
        for node, described in zip(results, output.meta["desc"], strict=True)
        if isinstance(described, GradAOTOutput) and node is not None
    }
    for leaf in graph.find_nodes(op="placeholder"):
        gradient = gradients.get(leaf.meta["desc"])
        if gradient is not None:
            for casts in _casts_of(leaf):
                gradient = _share(graph, casts, gradient)


def _casts_of(leaf: fx.Node) -> list[list[fx.Node]]:
    """Autocast's own casts of a leaf to one type in a region, if there are several; it keeps no other."""
    casts: dict[tuple[CastCache, torch.dtype, tuple[int, ...]], list[fx.Node]] = defaultdict(list)
    for cast, cache in kept_casts(leaf):
        casts[cache, cast.meta["val"].dtype, _reentrant(cast)].append(cast)
    return [nodes for nodes in casts.values() if len(nodes) > 1]


def kept_casts(leaf: fx.Node) -> Iterator[tuple[fx.Node, CastCache]]:
    """Yields the casts of a leaf that eager keeps until a region of autocast ends, with the cache."""
    if leaf.meta["val"].dtype != torch.float32:
        return
    for user in leaf.users:
        cache = cast_cache_of(user)
        is_cast = user.target is _CAST and user.kwargs.keys() == {"dtype"} and not is_converted_by_code(user)
        if is_cast and cache is not None and user.meta["val"].dtype in cache.dtypes:
            yield user, cache


def _reentrant(node: fx.Node) -> tuple[int, ...]:
    """The reentrant checkpoints around a node: each runs its function once more, with a cache of its own."""
    return tuple(scope.number for scope in scopes_of(node) if scope.is_reentrant)


def _share(graph: fx.Graph, casts: list[fx.Node], gradient: fx.Node) -> fx.Node:
    """Leaves the first of some casts, and the last cast of their gradients, which then casts the sum.

    Returns:
        The gradient of the leaf.
    """
    numbers = {cast.meta["seq_nr"] for cast in casts}  # those of autograd, which a backward shares
    sums, arriving = _arriving(gradient)
    back = [node for node in arriving if node.meta.get("seq_nr") in numbers and _casts_back(node)]
    if not back:  # uses without a gradient, as under `no_grad`, cast nothing back
        return gradient
    first, *others = casts
    for cast in others:
        cast.replace_all_uses_with(first)
        graph.erase_node(cast)
    total: Any = back[0].args[0]
    for node in back[1:]:
        new = node.args[0]
        assert isinstance(new, fx.Node)
        with graph.inserting_before(node):
            total = _added(graph, total, new, like=node)
    back[-1].args = (total,)
    _refresh(back[-1])
    kept = [
        (node, added) for node, added in zip(arriving, [None, *sums], strict=True) if node not in back[:-1]
    ]
    so_far, _ = kept[0]
    for node, added in kept[1:]:
        assert added is not None
        added.args = (so_far, node)
        _refresh(added)
        so_far = added
    if so_far is not gradient:
        gradient.replace_all_uses_with(so_far)
    for node in [*reversed(sums), *back[:-1]]:
        if not node.users:
            graph.erase_node(node)
    return so_far


def _arriving(gradient: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Describes how autograd has summed a gradient: the sums and their terms, each in order of arrival."""
    sums: list[fx.Node] = []
    arriving: list[fx.Node] = []
    node = gradient
    while node.target is _ADD and len(node.users) == 1 and not node.kwargs:
        nodes = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if not len(nodes) == len(node.args) == 2:
            break
        so_far, new = nodes
        sums.append(node)
        arriving.append(new)
        node = so_far
    return sums[::-1], [node, *reversed(arriving)]


def _casts_back(node: fx.Node) -> bool:
    """Whether a node casts the gradient of a use to the type of the leaf, for its sum alone."""
    return node.target is _CAST and len(node.users) == 1


def sums_within_forward(graph: fx.Graph) -> set[str]:
    """The lines at which a forward adds up gradients that it has cast back to float32.

    They are of a tensor that was cast several times: in eager once, if it is a leaf.
    """
    lines, terms = set[str](), dict[fx.Node, int]()
    for node in graph.nodes:
        if node.meta.get("partitioner_tag") != "is_forward":
            continue
        if node.target is _ADD:
            terms[node] = sum(terms.get(term, 0) for term in node.all_input_nodes)
            where = location_of(node)
            if terms[node] > 1 and where is not None:
                lines.add(where.source or str(where))
        cache = cast_cache_of(node)
        if node.target is _CAST and cache is not None and not is_converted_by_code(node):
            (source,) = node.all_input_nodes
            terms[node] = node.meta["val"].dtype == torch.float32 and source.meta["val"].dtype in cache.dtypes
    return lines


def _added(graph: fx.Graph, total: fx.Node, new: fx.Node, like: fx.Node) -> fx.Node:
    node = graph.call_function(_ADD, (total, new))
    node.meta = {**like.meta}
    _refresh(node)
    return node


def _refresh(node: fx.Node) -> None:
    """Writes down the type of what a node makes now."""
    args: list[Any] = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
    with args[0].fake_mode:
        made: Tensor = node.target(*args, **node.kwargs)  # pyright: ignore[reportCallIssue]
    node.meta["val"] = made
