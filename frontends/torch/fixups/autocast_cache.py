"""The casts that autocast makes of parameters: one for all uses in a forward, as in eager."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..cast_caches import CastCache
from ..provenance import (
    cast_cache_of,
    has_gradients,
    is_converted_by_code,
    is_leaf_in_eager,
    location_of,
    scopes_of,
)

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
    back: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=_CAST):
        is_backward = node.meta.get("partitioner_tag") == "is_backward"
        if is_backward and len(node.users) == 1 and not is_converted_by_code(node):
            back[node.meta.get("seq_nr", -1)].append(node)
    for leaf in [node for node in graph.nodes if is_leaf_in_eager(node)]:
        for casts in _casts_of(leaf):
            # a cast and what casts its gradient back have the number of one record of autograd's
            numbers = [cast.meta.get("seq_nr", -1) for cast in casts if has_gradients(cast)]
            cast_back = [node for number in numbers for node in back[number]]
            if cast_back:  # not if no use has a gradient
                _share(graph, casts, cast_back)


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
        if is_cast and cache is not None and cache.keeps_inputs and user.meta["val"].dtype in cache.dtypes:
            yield user, cache


def _reentrant(node: fx.Node) -> tuple[int, ...]:
    """The reentrant checkpoints around a node: each runs its function once more, with a cache of its own."""
    return tuple(scope.number for scope in scopes_of(node) if scope.is_reentrant)


def _share(graph: fx.Graph, casts: list[fx.Node], cast_back: list[fx.Node]) -> None:
    """Leaves the first of some casts, and the last cast of their gradients, which then casts the sum."""
    gradient = _sum_of(cast_back[0])
    sums, arriving = _arriving(gradient)
    back = [node for node in arriving if node in cast_back]
    if not back:
        return  # their sum has other readers
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


def _sum_of(term: fx.Node) -> fx.Node:
    """The sum that autograd has made of a gradient and of those that arrived where it did."""
    node = term
    while len(node.users) == 1:
        (user,) = node.users
        # a sum that arrives as a whole is a term of another tensor's gradient
        if user.target is not _ADD or user.kwargs or (node is not term and user.args[0] is not node):
            break
        node = user
    return node


def _arriving(gradient: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Describes how autograd has summed a gradient: the sums and their terms, each in order of arrival."""
    sums: list[fx.Node] = []
    arriving: list[fx.Node] = []
    node = gradient
    while node.target is _ADD and (node is gradient or len(node.users) == 1) and not node.kwargs:
        nodes = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if not len(nodes) == len(node.args) == 2:
            break
        so_far, new = nodes
        sums.append(node)
        arriving.append(new)
        node = so_far
    return sums[::-1], [node, *reversed(arriving)]


def sums_within_forward(graph: fx.Graph) -> set[str]:
    """The lines at which a forward adds up gradients that it has cast back to float32.

    They are of a tensor that was cast several times: in eager once, if it is a leaf.
    """
    lines, terms = set[str](), dict[Any, bool]()
    for node in graph.nodes:
        if node.meta.get("partitioner_tag") != "is_forward":
            continue
        if node.target is _ADD and all(terms.get(term) for term in node.args):
            terms[node] = True
            where = location_of(node)
            if where is not None:
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
