"""Refuses other ways to differentiate than one ordinary backward: function transforms, duals, tracers."""

# functorch and forward-mode differentiation tell their state only through private functions.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...ir import UnsupportedError

__all__ = ["UnsupportedTransformError", "refuse_batches", "refuse_second_derivatives", "refuse_transforms"]


class UnsupportedTransformError(UnsupportedError, NotImplementedError):
    """A derivative that a planned step does not have. It is a `NotImplementedError` too, as in torch."""


_functorch: Any = vars(torch._C)["_functorch"]
_NAMES = {
    "Grad": "torch.func.grad (or vjp, jacrev)",
    "Jvp": "torch.func.jvp (or jacfwd, linearize)",
    "Vmap": "torch.func.vmap",
    "Functionalize": "torch.func.functionalize",
}


def refuse_transforms(tensors: Iterable[Tensor]) -> None:
    """Refuses a planned step within a function transform, before anything runs.

    Args:
        tensors: The inputs of the step.

    Raises:
        UnsupportedTransformError: IRC533 within a transform of `torch.func`, for a tensor with a tangent of
            forward-mode differentiation, and under `torch.jit.trace`.
    """
    interpreter = _functorch.peek_interpreter_stack()
    if interpreter is not None:
        kind = str(interpreter.key()).rpartition(".")[2]
        raise _refused(f"within {_NAMES.get(kind, kind)}")
    if forward_ad._current_level >= 0 and any(_has_tangent(tensor) for tensor in tensors):
        raise _refused("for forward-mode differentiation (torch.autograd.forward_ad)")
    if torch.jit.is_tracing():
        raise _refused("under torch.jit.trace")


def refuse_batches(gradients: Iterable[Tensor | None]) -> None:
    """Refuses a backward of many gradients at once, whose memory is not the plan's.

    Raises:
        UnsupportedTransformError: IRC533 under `vmap`, as in `torch.autograd.grad(is_grads_batched=True)`.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    if any(_functorch.is_batchedtensor(g) or _functorch.is_legacy_batchedtensor(g) for g in given):
        raise _refused("for a batch of gradients (vmap, is_grads_batched=True, vectorize=True)")


def refuse_second_derivatives() -> None:
    """Refuses a backward that is itself to be differentiated.

    Raises:
        UnsupportedTransformError: IRC504.
    """
    if torch.is_grad_enabled():
        raise UnsupportedTransformError(
            "IRC504",
            "the backward of a planned module cannot be differentiated again (create_graph=True)",
            help="put what takes gradients of gradients into the forward that is planned: give irc.optimize "
            "a module whose forward calls the model and torch.autograd.grad(..., create_graph=True), and "
            "returns the loss; or use the original module",
        )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _refused(context: str) -> UnsupportedTransformError:
    return UnsupportedTransformError(
        "IRC533",
        f"a planned step has one backward with one gradient of each output; it cannot run {context}",
        help="use the original module there, or call the fitted one in eval() mode or under torch.no_grad(), "
        "which runs the original forward",
    )
