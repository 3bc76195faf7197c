"""Hooks torch functions that silently do nothing when optimizers run within backward.

Clipping reads every gradient after backward, and a gradient scaler divides it by the scale: both come too
late for a gradient that was applied and freed. The hooks raise for the parameters of planned modules, and
pass everything else on.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from ...ir import UnsupportedError
from ...torch_support.autograd_graph import nodes_behind
from .optimizer_in_backward import OptimizersInBackward

__all__ = ["guard_optimizer_calls"]

_owners: Any = WeakIdKeyDictionary()
"""Parameters whose gradients are applied within backward, each with a weak reference to its owner."""
_CLIPPING = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")


def guard_optimizer_calls(parameters: Iterable[Tensor], in_backward: OptimizersInBackward) -> None:
    """Refuses to clip or scale gradients of these parameters from now on, as long as `in_backward` lives."""
    for parameter in parameters:
        _owners[parameter] = weakref.ref(in_backward)
    _install()


@functools.cache
def _install() -> None:
    for module in (utils, clip_grad):
        for name in _CLIPPING:
            if hasattr(module, name):
                setattr(module, name, _guarded_clipping(getattr(module, name)))
    # functions that were imported by name earlier still call this one
    clip_grad._clip_grads_with_norm_ = _guarded_clipping(clip_grad._clip_grads_with_norm_)
    torch.amp.GradScaler.scale = _guarded_scale(torch.amp.GradScaler.scale)


def _guarded_clipping(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        given = list(parameters)
        for parameter in given:
            owner = _owners.get(parameter)
            if parameter.grad is None and owner is not None and owner() is not None:
                raise UnsupportedError(
                    "IRC512",
                    f"{clip.__name__.strip('_')} comes too late: a parameter of shape "
                    f"{list(parameter.shape)} was updated within backward, and its gradient is freed",
                    help="plan without optimizer_in_backward, and call the optimizer after clipping",
                )
        is_generator = isinstance(parameters, types.GeneratorType)  # torch warns of an empty one
        return clip((parameter for parameter in given) if is_generator else given, *args, **kwargs)

    return guarded


def _guarded_scale(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def guarded(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            tensors = outputs if isinstance(outputs, list | tuple) else [outputs]
            roots = [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor)]
            if any(map(_applies, nodes_behind(roots))):
                raise UnsupportedError(
                    "IRC512",
                    "a gradient scaler scales the loss of a module whose optimizers run within backward: "
                    "they would apply the scaled gradients",
                    help="plan without optimizer_in_backward, or train in bfloat16 without a scaler",
                )
        return scale(self, outputs)

    return guarded


def _applies(node: Any) -> bool:
    in_backward = getattr(node, "in_backward", None)
    return isinstance(in_backward, OptimizersInBackward) and bool(in_backward.optimizers)
