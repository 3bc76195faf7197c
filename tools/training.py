"""Trains a few steps, measures memory and time, and compares with the original model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..passes.profile import peak_bytes
from .loading import training_loss

__all__ = ["Comparison", "Step", "compare", "measured_peak_bytes", "train"]

_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Args:
        loss: Value of the loss.
        seconds: Time of forward, loss and backward: processor seconds on CPU, else seconds of the clock.
    """

    loss: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Steps of two modules side by side, from the same weights, on the same inputs.

    Args:
        original: The original's steps.
        fitted: The fitted module's steps.
        gradient_difference: Largest absolute difference of a gradient's element, over all steps.
        gradient_scale: Largest absolute element of a gradient of the original.
        buffer_difference: Largest absolute difference of a buffer's element after the last step.
        same_gradients: Whether the same parameters had gradients.
        same_generator: Whether the random generator was in the same state after each step.
    """

    original: tuple[Step, ...]
    fitted: tuple[Step, ...]
    gradient_difference: float
    gradient_scale: float
    buffer_difference: float
    same_gradients: bool
    same_generator: bool

    @property
    def agrees(self) -> bool:
        """Whether the numbers are the same, up to 1e-5 of the largest gradient."""
        close = self.gradient_difference <= 1e-5 * self.gradient_scale
        return close and self.same_gradients and self.same_generator and self.buffer_difference <= 1e-5

    @property
    def is_equal(self) -> bool:
        """Whether gradients and buffers are the same bit for bit."""
        return self.agrees and self.gradient_difference == 0 and self.buffer_difference == 0

    @property
    def time_ratio(self) -> float:
        """Best step of the fitted module over best step of the original, interleaved."""
        return min(s.seconds for s in self.fitted) / min(s.seconds for s in self.original)


def train(module: nn.Module, inputs: Sequence[Any], steps: int) -> list[Step]:
    """Trains `steps` steps of plain SGD on the same inputs."""
    return [_step(module, inputs) for _ in range(steps)]


def measured_peak_bytes(module: nn.Module, inputs: Sequence[Any], static_bytes: int) -> int:
    """The peak of one training step, from allocator events, with what exists before it, in bytes.

    The module's numbers are as before afterwards: gradients, buffers and the generator are put back.

    Args:
        module: A module that has run at least once (kernels choose their workspaces on the first run).
        inputs: Arguments of the step.
        static_bytes: Bytes of parameters, buffers and inputs, which the events do not show.
    """
    module.zero_grad(set_to_none=True)
    before = [buffer.clone() for buffer in module.buffers()]
    with torch.random.fork_rng():
        on_cuda = any(parameter.is_cuda for parameter in module.parameters())
        run = _forward_backward(module, inputs)
        peak = _cuda_peak_bytes(run) if on_cuda else peak_bytes(run)
    module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)
    return peak + static_bytes


def compare(original: nn.Module, fitted: nn.Module, inputs: Sequence[Any], steps: int) -> Comparison:
    """Trains both side by side, one step of the one and one of the other.

    Args:
        original: The original; its weights and buffers must equal the fitted module's.
        fitted: The fitted module, with its own weights.
        inputs: Arguments of each step.
        steps: How many.
    """
    of_original: list[Step] = []
    of_fitted: list[Step] = []
    difference = scale = 0.0
    same_gradients = same_generator = True
    for _ in range(steps):
        generator = torch.get_rng_state()
        of_original.append(_step(original, inputs, update=False))
        after = torch.get_rng_state()
        torch.set_rng_state(generator)
        of_fitted.append(_step(fitted, inputs, update=False))
        same_generator &= torch.equal(after, torch.get_rng_state())
        mine = dict(fitted.named_parameters())
        for name, parameter in original.named_parameters():
            expected, found = parameter.grad, mine[name].grad if name in mine else None
            if expected is None or found is None:
                same_gradients &= expected is found
                continue
            difference = max(difference, _largest(expected - found))
            scale = max(scale, _largest(expected))
        _update(original)
        _update(fitted)
    buffers = dict(fitted.named_buffers())
    buffer_difference = max(
        (_largest(value.double() - buffers[name].double()) for name, value in original.named_buffers() if name in buffers),
        default=0.0,
    )
    return Comparison(
        tuple(of_original),
        tuple(of_fitted),
        difference,
        scale,
        buffer_difference,
        same_gradients,
        same_generator,
    )


def _step(module: nn.Module, inputs: Sequence[Any], *, update: bool = True) -> Step:
    module.zero_grad(set_to_none=True)
    on_cuda = any(parameter.is_cuda for parameter in module.parameters())
    clock = time.perf_counter if on_cuda else time.process_time
    start = clock()
    loss = _forward_backward(module, inputs)()
    if on_cuda:
        torch.cuda.synchronize()
    seconds = clock() - start
    if update:
        _update(module)
    return Step(loss.item(), seconds)


def _forward_backward(module: nn.Module, inputs: Sequence[Any]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        loss = training_loss(module(*inputs))
        loss.backward()
        return loss.detach()

    return run


def _update(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=_RATE)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _cuda_peak_bytes(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before

