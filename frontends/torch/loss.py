"""The memory that a caller's loss takes between forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir import UsageError, allocation_bytes
from ...torch_support.allocated import allocated_bytes
from .alive_bytes import following_states
from .dry_run import dry_run
from .fixups.fake_kernels import fake_kernels_of_eager
from .fixups.foreign_writes import ForeignWrites
from .fixups.value_checks import PassedChecks
from .loss_run import Arriving, LossTrace, Measure, as_result, gradients_of, measured_bytes
from .loss_terms import KERNEL_NUMBERS_BYTES

__all__ = ["Loss", "described_loss", "has_own_loss", "loss_bytes", "loss_gradients", "own_loss"]

Loss = Callable[[Any], Tensor]


def loss_bytes(
    loss: Loss | None, result_leaves: list[Any], result_tree: Any, measure: Measure | None = None
) -> tuple[int, int, int]:
    """Returns the bytes of a loss beyond outputs and gradients: its peak, after it, and before its backward.

    Args:
        loss: A function from the module's result to a scalar. None stands for a loss that takes twice the
            outputs' bytes, as cross entropy does in the outputs' own element type, and six times those in
            half precision under autocast, and then computes in float32; a scalar output is a loss.
        result_leaves: The leaves of that result as traced; only the tensors' types are looked at.
        result_tree: The nesting of the leaves.
        measure: Measures runs. None models the memory of the loss, as does one that has no room for it, and
            a loss that cannot run beside the steps.

    Returns:
        Bytes at the loss's own peak; bytes that stay until backward returns: the loss and its gradient; and
        bytes that it holds between its forward and its backward, with its own gradient: one backward of
        several losses makes those first.
    """
    if loss is None:
        return _unknown_bytes(result_leaves)
    modelled, touched_bytes = _modelled_bytes(loss, result_leaves, result_tree)
    if measure is None or loss is own_loss or touched_bytes is None:
        return modelled
    return measured_bytes(loss, result_leaves, result_tree, measure, touched_bytes) or modelled


def _unknown_bytes(result_leaves: list[Any]) -> tuple[int, int, int]:
    with _tracing():
        outputs = [leaf for leaf in _stand_ins(result_leaves) if isinstance(leaf, Tensor)]
        trained = [leaf for leaf in outputs if leaf.requires_grad]
        transient = sum(_times(leaf) * allocated_bytes(leaf) for leaf in trained if leaf.dim())
        relaid = sum(allocated_bytes(leaf) for leaf in trained if not leaf.is_contiguous())
        scalars = _SCALARS * max((allocation_bytes(8, str(leaf.device)) for leaf in trained), default=8)
        saved = transient + scalars
        return saved + relaid, relaid + scalars, saved


def _modelled_bytes(
    loss: Loss, result_leaves: list[Any], result_tree: Any
) -> tuple[tuple[int, int, int], int | None]:
    """Models what `loss_bytes` returns, without computing anything.

    Returns:
        What that returns, and all that is alive at the peak; None if the loss cannot run beside the steps.
    """
    with _tracing() as mode:
        trace = LossTrace(mode)
        leaves = _stand_ins(result_leaves)
        outputs = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        trained = [leaf for leaf in outputs if leaf.requires_grad]
        for output in outputs:
            trace.ignore(output)
        with trace, following_states(trace):
            scalar = _called(loss, as_result(leaves, result_tree))
            torch.clear_autocast_cache()  # as at the end of autocast, which is before backward
            numbers = trace.number_bytes
            seed = torch.ones_like(scalar)
            saved = trace.alive_bytes + numbers
            with dry_run(loss):
                gradients = gradients_of(scalar, trained, seed)
        arriving = Arriving.of(gradients, trained)
        peak = trace.peak_bytes + (0 if loss is own_loss else numbers + KERNEL_NUMBERS_BYTES)
        touched = sum(map(allocated_bytes, outputs)) + peak
        return (*arriving.beyond(peak, trace.alive_bytes), saved), touched if trace.can_run else None


def own_loss(result: Any) -> Tensor:
    """The loss that a result has, as of `has_own_loss`."""
    return result.loss


def described_loss(loss: Loss | None, *, is_scalar: bool = False) -> str:
    """Tells which loss is assumed.

    Args:
        loss: The loss; None if nobody has given one.
        is_scalar: Whether a scalar is all that the model returns.
    """
    if loss is None and is_scalar:
        return "the scalar that the model returns"
    if loss is None:
        return "not known: counted by the bytes of the outputs"
    return "the result's .loss alone" if loss is own_loss else "as given"


def has_own_loss(result: object) -> bool:
    """Whether a result is a `ModelOutput` of Hugging Face with a scalar `loss`, which labels make it have.

    The loss of a class of the user's own may be one of several terms.
    """
    if all(kind.__name__ != "ModelOutput" for kind in type(result).__mro__):
        return False
    found = getattr(result, "loss", None)
    return isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad


@contextlib.contextmanager
def _tracing() -> Generator[FakeTensorMode]:
    """Lets a loss run on tensors without data; its backward stays in this thread on a GPU too.

    Anomalies are not looked for: that reads gradients.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    one_thread, unread = (
        torch.autograd.set_multithreading_enabled(False),
        torch.autograd.set_detect_anomaly(False),
    )
    modes = fake, ForeignWrites(fake), PassedChecks()
    with fake_kernels_of_eager(), contextlib.ExitStack() as stack, torch.enable_grad(), one_thread, unread:
        for mode in modes:
            stack.enter_context(mode)
        yield fake


def loss_gradients(
    loss: Loss, result_leaves: list[Any], result_tree: Any
) -> dict[int, tuple[int, ...] | None]:
    """The layouts of the gradients of a result's tensors that could have one.

    Args:
        loss: A function from the module's result to a scalar.
        result_leaves: The leaves of that result as traced; only the tensors' types are looked at.
        result_tree: The nesting of the leaves.

    Returns:
        Strides by the tensors' places among the result's tensors; None where the loss makes no gradient.

    Raises:
        UsageError: IRC341 when the loss fails, or is not a scalar that depends on the result.
    """
    with _tracing():
        leaves = _stand_ins(result_leaves)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for output, leaf in zip(outputs, filter(_is_tensor, result_leaves), strict=True):
            output.requires_grad_(leaf.requires_grad)
        trained = {index: output for index, output in enumerate(outputs) if output.requires_grad}
        if not trained:
            return {}
        scalar = _called(loss, as_result(leaves, result_tree))
        with dry_run(loss):
            gradients: Any = torch.autograd.grad(scalar, list(trained.values()), allow_unused=True)
    return {
        index: None if gradient is None else tuple(gradient.stride())
        for index, gradient in zip(trained, gradients, strict=True)
    }


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


_SCALARS = 4
"""Scalars of at most eight bytes each: a loss, its gradient, and those of a scaled loss."""


def _times(output: Tensor) -> int:
    """Returns how often an output's bytes are counted for an unknown loss."""
    is_cast = output.dtype in (torch.bfloat16, torch.float16)
    return 6 if is_cast and torch.is_autocast_enabled(output.device.type) else 2


def _called(loss: Loss, result: Any) -> Tensor:
    """The loss of a result.

    Raises:
        UsageError: IRC341 when it fails, or is not a scalar that depends on the result.
    """
    help = "give a function from the module's result to a scalar tensor"
    try:
        with dry_run(loss):
            scalar = cast(object, loss(result))
    except Exception as error:
        raise UsageError("IRC341", f"the loss fails: {type(error).__name__}: {error}", help=help) from error
    if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not scalar.requires_grad:
        shown = (
            f"a tensor of shape {list(scalar.shape)}" if isinstance(scalar, Tensor) else type(scalar).__name__
        )
        raise UsageError(
            "IRC341", f"the loss returns {shown}, no scalar that depends on the result", help=help
        )
    return scalar


def _stand_ins(leaves: list[Any]) -> list[Any]:
    """The leaves of a result with others in place of its tensors; one that is there twice stays one."""
    made = {id(leaf): _stand_in(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    return [made.get(id(leaf), leaf) for leaf in leaves]


def _stand_in(leaf: Tensor) -> Tensor:
    strides = tuple(leaf.stride())
    stand_in = torch.empty_strided(tuple(leaf.shape), strides, dtype=leaf.dtype, device=leaf.device)
    return stand_in.requires_grad_(leaf.dtype.is_floating_point)
