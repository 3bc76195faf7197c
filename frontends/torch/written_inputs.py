"""Follows what a forward writes into tensors that ask for a gradient, where autograd does not see it."""

# AOTAutograd has no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import ForwardTokenAOTInput, InputMutationAOTOutput
from torch._functorch._aot_autograd.schemas import JointWithDescriptors

from ...ir import Node, Region, Storage, Trait, UnsupportedError
from ...torch_support.autocast import autocast_state
from ...torch_support.layouts import same_layout
from ...torch_support.tensor_data import TENSOR_DATA
from ...torch_support.written_forms import in_place_form
from .annotation_scopes import Scope
from .fixups.autocast_cache import kept_casts
from .in_place import is_in_place, is_recorded
from .node_traits import draws
from .provenance import location_of, scopes_of
from .traced_results import ROLES, TracedResults, input_target

__all__ = ["pinned_readers", "refuse_stale_checkpoints", "untrack_writes", "written_in_steps"]

_ADD, _CLONE, _DETACH = torch.ops.aten.add.Tensor, torch.ops.aten.clone.default, torch.ops.aten.detach.default


def untrack_writes(joint: JointWithDescriptors) -> None:
    """Takes out of a joint graph what AOTAutograd puts around an input that is written and has a gradient.

    It traces the forward on a copy of the input, and takes a gradient of what is written, too. Under
    `torch.no_grad` eager has neither: all gradients are those of the one leaf.

    Raises:
        UnsupportedError: IRC336 if autograd sees a write, or autocast may keep what was there before it.
    """
    graph = joint.graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    by_description = {repr(node.meta["desc"]): node for node in inputs}
    tangents = {repr(n.meta["desc"].output): n for n in inputs if hasattr(n.meta["desc"], "output")}
    tensors = (n for n in inputs if not isinstance(n.meta["desc"], ForwardTokenAOTInput))
    info = dict(zip(tensors, joint._aot_state.fw_metadata.input_info, strict=False))
    for new, described in TracedResults.of(list(graph.nodes)[-1]).mutations:
        old = by_description[repr(described)]
        if not info[old].requires_grad:
            continue
        (copy,) = old.users
        if copy.target is not _CLONE or not same_layout(copy.meta["val"], old.meta["val"].stride()):
            raise _refused(described, new)
        copy.replace_all_uses_with(old)
        graph.erase_node(copy)
        steps = written_in_steps(new, old)
        is_hidden = steps is not None and not any(map(is_recorded, steps))
        if not (info[old].mutations_under_no_grad_or_inference_mode or is_hidden):
            raise _refused(described, new)
        _refuse_kept_casts(described, (old, *(steps or (new,))))
        if (tangent := tangents.get(repr(InputMutationAOTOutput(described)))) is not None:
            _drop(tangent, described)


def _drop(tangent: fx.Node, described: Any) -> None:
    """Takes the gradient of what is written out of a graph: it is the first term of the leaf's."""
    for user in list(tangent.users):
        if user.op == "output":
            results: Any = user.args[0]
            user.args = ([None if each is tangent else each for each in results],)
            continue
        first, rest = user.args[0], user.args[-1]
        if user.target is not _ADD or first is not tangent or not isinstance(rest, fx.Node):
            raise _refused(described, user)
        user.replace_all_uses_with(rest)
        user.graph.erase_node(user)
    tangent.graph.erase_node(tangent)


def _refuse_kept_casts(described: Any, states: Sequence[fx.Node]) -> None:
    """Refuses that eager reads a cast of what was there before a write, here or in the next forward."""
    casts = [cast for state in states for cast, _ in kept_casts(state)]
    if len(casts) > 1 or (casts and autocast_state()):
        raise UnsupportedError(
            "IRC336",
            f"autocast keeps its cast of {ROLES[type(described)].value} {input_target(described)}, which the "
            "forward writes: eager may read the old numbers",
            at=location_of(casts[-1]),
            help="turn that off: torch.autocast(..., cache_enabled=False)",
        )


def _refused(described: Any, node: fx.Node) -> UnsupportedError:
    return UnsupportedError(
        "IRC336",
        f"the module writes into {ROLES[type(described)].value} {input_target(described)}, which requires a "
        "gradient, where autograd may see it",
        at=location_of(node),
        help="write under torch.no_grad(), or into a copy (clone())",
    )


def written_in_steps(new: fx.Node, old: fx.Node) -> list[fx.Node] | None:
    """Returns the operations that wrote an input as a whole, the last one first; None if others did."""
    steps: list[fx.Node] = []
    node = new
    while node is not old:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node):
            return None
        if node.target is not _DETACH:
            if not _writes_whole(node, old):
                return None
            steps.append(node)
        node = before
    states = {old, *steps}
    others = (_base(each) for step in steps for each in step.all_input_nodes if each is not step.args[0])
    reads = (sum(_base(each) in states for each in step.args if isinstance(each, fx.Node)) for step in steps)
    return None if any(each in states for each in others) or any(count > 1 for count in reads) else steps


def refuse_stale_checkpoints(forward: Set[fx.Node]) -> None:
    """Refuses a checkpoint whose function reads what the forward writes over after it.

    Eager's backward runs the function again, on the numbers that are there then.

    Raises:
        UnsupportedError: IRC339 if gradients are computed from what it makes of them.
    """
    for write in filter(is_in_place, forward):
        if _is_view(write):
            continue  # of what was written
        before = write.args[0]
        reads = _readers(_base(before)) if isinstance(before, fx.Node) else ()
        for read in (each for each in reads if each in forward):
            for scope in scopes_of(read):
                if scope in scopes_of(write) or not scope.runs_again:
                    continue
                if _reaches_backward(read, scope, forward):
                    raise UnsupportedError(
                        "IRC339",
                        f"torch.utils.checkpoint{scope.where} reads what the forward writes over afterwards: "
                        "eager reads it again in backward, and gradients are those of another function",
                        at=location_of(write),
                        help="call the function without the checkpoint: a plan recomputes by itself",
                    )


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _reaches_backward(node: fx.Node, scope: Scope, forward: Set[fx.Node]) -> bool:
    """Whether backward of a stretch of the forward reads a result, or what the stretch computes from it."""
    waiting, seen = [node], {node}
    while waiting:
        users = {user for user in waiting.pop().users if scope in scopes_of(user)} - seen
        if not users <= forward:
            return True
        waiting += users
        seen |= users
    return False


def _writes_whole(node: fx.Node, old: fx.Node) -> bool:
    if not is_in_place(node) or draws(node) or in_place_form(str(node.target)) is None:
        return False
    written, before = node.meta["val"], old.meta["val"]
    is_alike = (written.shape, written.dtype) == (before.shape, before.dtype)
    return is_alike and written.stride() == before.stride()


def _base(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def pinned_readers(nodes: Sequence[Node]) -> list[Node]:
    """Pins what reads an input that is written, where running it again would read other numbers unseen.

    Another forward may write again before this one's backward. Autograd notices that if backward itself reads
    the input, but for writes into its `data`: then what reads the last numbers may run again.
    """
    places = {n.values[0].storage: k for k, n in enumerate(nodes) if Trait.EFFECT in n.traits and n.values}
    compared = {s for n in nodes if n.region is Region.BACKWARD and not n.is_view for s in _read(n, places)}
    compared -= {value.storage for node in nodes if node.op == TENSOR_DATA for value in node.values}
    pinned: list[Node] = []
    for index, node in enumerate(nodes):
        read = [] if node.is_view or Trait.EFFECT in node.traits else _read(node, places)
        if node.region is Region.FORWARD and any(index < places[s] or s not in compared for s in read):
            node = replace(node, traits=node.traits | {Trait.PINNED})
        pinned.append(node)
    return pinned


def _read(node: Node, storages: Mapping[Storage, int]) -> list[Storage]:
    return [value.storage for value in node.operands if value.storage in storages]
