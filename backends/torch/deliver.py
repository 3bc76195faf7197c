"""Makes the user's result of the outputs of a planned step."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...ir import BackwardError, Delivery, Origin, Sharing

__all__ = ["Watched", "deliver", "deliver_leaf", "refuse_hooks_on_results"]


@dataclass(frozen=True, slots=True)
class Watched:
    """A result that other results are computed from.

    Attributes:
        index: The index of the output that the result is, or is a view of.
        hooks: The table of its hooks, which the autograd node reads too.
        tensor: The result.
    """

    index: int
    hooks: Mapping[int, Any]
    tensor: weakref.ref[Tensor]


def deliver(deliveries: Sequence[Delivery], inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> list[Any]:
    """Makes the leaves of the user's result of the program's static inputs and forward outputs.

    A hook on one of several results is called if the loss uses that one, as in eager. Results that others are
    computed from are noted with their autograd node, for `refuse_hooks_on_results`.
    """
    own = {d.index: deliver_leaf(d, inputs, outputs) for d in deliveries if d.sharing is Sharing.OWN}
    leaves = [
        # a tensor that is returned twice is one
        own[delivery.index] if delivery.sharing is Sharing.OWN else deliver_leaf(delivery, inputs, outputs)
        for delivery in deliveries
    ]
    made = [
        (delivery.index, leaf)
        for delivery, leaf in zip(deliveries, leaves, strict=True)
        if delivery.origin in (Origin.COMPUTED, Origin.OUTPUT) and leaf.grad_fn is not None
    ]
    if len(made) > 1:
        for index, leaf in made:
            hooks, node = _hooks_of(leaf), outputs[index].grad_fn
            if index in cast("Any", node).program.feeds:
                cast("Any", node).watched.append(Watched(index, hooks, weakref.ref(leaf)))
    return leaves


def deliver_leaf(delivery: Delivery, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> Any:
    """Makes one leaf of the user's result."""
    match delivery.origin:
        case Origin.CONSTANT:
            return delivery.constant
        case Origin.COMPUTED:
            leaf = outputs[delivery.index]
        case Origin.INPUT | Origin.OUTPUT:
            leaf = (inputs if delivery.origin is Origin.INPUT else outputs)[delivery.index]
    if delivery.sharing in (Sharing.DETACHED, Sharing.NO_GRAD):
        leaf = leaf.detach()
    if delivery.view is not None:
        leaf = leaf.as_strided(*delivery.view)
    match delivery.sharing:
        case Sharing.NO_GRAD:
            return leaf.requires_grad_()
        case Sharing.OWN:
            return _Own.apply(leaf)
        case _:
            return leaf


class _Own(torch.autograd.Function):
    """Hands on a result whose gradient is the graph's, though it shares memory with others.

    For torch it is a view that a custom function has made, and torch lets nobody write into such a view.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0]


def _hooks_of(tensor: Tensor) -> Mapping[int, Any]:
    """Returns the table of a tensor's hooks; makes it as the tensor's first hook would."""
    if tensor._backward_hooks is None:
        tensor._backward_hooks = cast("OrderedDict[int, Any]", _Hooks())
        cast("Any", tensor.grad_fn)._register_hook_dict(tensor)
    return tensor._backward_hooks


_COUNTING = "inner_hook"
"""The name of the hook of `torch.autograd.graph.register_multi_grad_hook`, which waits for all results."""


class _Hooks(OrderedDict[int, Callable[[Tensor], Any]]):
    """The hooks of one result of several. Their autograd node calls all hooks in each of its backwards."""

    def __setitem__(self, key: int, hook: Callable[[Tensor], Any]) -> None:
        counts_calls = getattr(hook, "__name__", None) == _COUNTING and hook.__module__.startswith("torch.")
        super().__setitem__(key, hook if counts_calls else _HookOfGradient(hook))


@dataclass(frozen=True, slots=True)
class _HookOfGradient:
    """A hook that is called if there is a gradient."""

    hook: Callable[[Tensor], Any]

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)

    def __repr__(self) -> str:
        return repr(self.hook)


def refuse_hooks_on_results(
    watched: Iterable[Watched], feeds: Mapping[int, frozenset[int]], given: frozenset[int]
) -> None:
    """Refuses a backward in which a hook would see less of a gradient than in eager.

    If one result is computed from another, the part of the gradient that flows between them stays within the
    planned step.

    Args:
        watched: The results that others are computed from.
        feeds: The outputs that are computed from each such output.
        given: The outputs that the loss uses.

    Raises:
        BackwardError: IRC526 for a hook, or `retain_grad()`.
    """
    for each in watched:
        others = feeds[each.index] & given
        tensor = each.tensor()
        retains = tensor is not None and tensor.retains_grad
        if others and (each.hooks or retains):
            hook = f"a hook ({next(iter(each.hooks.values()))!r})" if each.hooks else "retain_grad()"
            raise BackwardError(
                "IRC526",
                f"a result of the module (output {each.index}) has {hook}, and the loss uses output "
                f"{min(others)}, which the module computes from it: the gradient that comes from there "
                "stays within the planned step",
                help="let the module return that result alone, and compute the other from it outside",
            )
