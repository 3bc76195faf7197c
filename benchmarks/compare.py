"""Compares the numbers of one training step of two modules: outputs, gradients, buffers, generator."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from irc.compiler.model_source import training_loss
from irc.torch_support.pytree import flatten

__all__ = ["TOLERANCE", "Numbers", "compare_step", "compare_training", "difference", "largest"]

TOLERANCE = 1e-5
"""How far numbers may be off, as a share of the largest of their kind (outputs, gradients, buffers)."""

_OWN_TOLERANCE = 1e-4
_SMALL = 1e-6


@dataclass(frozen=True, slots=True)
class Numbers:
    """One step of two modules from the same state: the largest differences and the scale of what differs.

    Args:
        outputs: Largest difference of an output's element; infinite where one is NaN and the other is not.
        gradients: The same for gradients.
        buffers: The same for buffers after the step.
        output_scale: Largest element of an output of the original.
        gradient_scale: Largest element of a gradient of the original.
        buffer_scale: Largest element of a buffer of the original.
        worst_gradient: Largest difference of a gradient as a multiple of what is allowed to it: 1e-4 of its
            own largest element and 1e-6 of the largest of all, so that small gradients count too.
        bit_equal: Whether outputs, gradients and buffers are equal bit for bit.
        same_gradients: Whether the same parameters have gradients.
        same_generator: Whether the random generator is in the same state after the step.
    """

    outputs: float
    gradients: float
    buffers: float
    output_scale: float
    gradient_scale: float
    buffer_scale: float
    worst_gradient: float
    bit_equal: bool
    same_gradients: bool
    same_generator: bool

    @property
    def agrees(self) -> bool:
        """Whether all is the same up to `TOLERANCE`, and the generator's state exactly."""
        close = (
            self.outputs <= TOLERANCE * self.output_scale
            and self.gradients <= TOLERANCE * self.gradient_scale
            and self.buffers <= TOLERANCE * self.buffer_scale
            and self.worst_gradient <= 1
        )
        return self.same_gradients and self.same_generator and (close or self.bit_equal)

    def __str__(self) -> str:
        if not self.same_gradients:
            return "other gradients are None"
        parts = [
            f"{name} {off:.2g} of {scale:.2g}"
            for name, off, scale in (
                ("outputs", self.outputs, self.output_scale),
                ("gradients", self.gradients, self.gradient_scale),
                ("buffers", self.buffers, self.buffer_scale),
            )
            if off
        ]
        if not parts:
            parts = ["bit-equal" if self.bit_equal else "signs of zeros"]
        if not self.same_generator:
            parts.append("generator differs")
        return ", ".join(parts)


@dataclass(frozen=True)
class _Outcome:
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor


def compare_step(original: nn.Module, other: nn.Module, args: Sequence[Any], seed: int = 0) -> Numbers:
    """One forward and backward of both, and how far they are apart.

    Buffers and the generator's state are as before afterwards; there are no gradients.

    Args:
        original: The reference.
        other: A module with equal weights and buffers under the same names; they may be the same tensors.
        args: Arguments of the step.
        seed: Of the generator before each of the two steps.
    """
    outcomes: list[_Outcome] = []
    for module in (original, other):
        with _buffers_restored(module):
            outcomes.append(_outcome(module, args, {}, seed, training_loss))
        module.zero_grad(set_to_none=True)
    return _numbers(*outcomes)


def compare_training(
    original: nn.Module,
    other: nn.Module,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    loss: Callable[[Any], Tensor] = training_loss,
    *,
    steps: int = 3,
    rate: float = 0.01,
) -> list[Numbers]:
    """Steps of plain SGD of both side by side, and how far apart each of them is.

    Parameters and buffers change as they do in training; the generator's state is as before afterwards.

    Args:
        original: The reference.
        other: A module with equal weights and buffers of its own under the same names.
        args: Arguments of each step.
        keywords: Keyword arguments of each step.
        loss: A function from the result to a scalar.
        steps: How many.
        rate: The learning rate.
    """
    found: list[Numbers] = []
    for step in range(steps):
        outcomes = [_outcome(module, args, keywords, step, loss) for module in (original, other)]
        found.append(_numbers(*outcomes))
        for module in (original, other):
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=rate)
            module.zero_grad(set_to_none=True)
    return found


@contextlib.contextmanager
def _buffers_restored(module: nn.Module) -> Generator[None]:
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])


def _numbers(expected: _Outcome, found: _Outcome) -> Numbers:
    names = {name for name, gradient in expected.gradients.items() if gradient is not None}
    others = {name for name, gradient in found.gradients.items() if gradient is not None}
    both = sorted(names & others)
    gradients = [(_present(expected.gradients[n]), _present(found.gradients[n])) for n in both]
    pairs = (
        list(zip(expected.outputs, found.outputs, strict=True)),
        gradients,
        [(value, found.buffers[name]) for name, value in expected.buffers.items()],
    )
    differences = [max((difference(a, b) for a, b in kind), default=0.0) for kind in pairs]
    scales = [max((largest(a) for a, _ in kind), default=0.0) for kind in pairs]
    return Numbers(
        *differences,
        *scales,
        worst_gradient=max((_excess(a, b, scales[1]) for a, b in gradients), default=0.0),
        bit_equal=all(_same_bits(a, b) for kind in pairs for a, b in kind),
        same_gradients=names == others,
        same_generator=torch.equal(expected.generator, found.generator),
    )


def _outcome(
    module: nn.Module,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    seed: int,
    loss: Callable[[Any], Tensor],
) -> _Outcome:
    """One step, its gradients left at the parameters."""
    module.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = module(*args, **keywords)
        loss(result).backward()
        generator = torch.get_rng_state()
    outputs = [leaf.detach().clone() for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    after = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return _Outcome(outputs, gradients, after, generator)


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def _excess(expected: Tensor, found: Tensor, scale: float) -> float:
    """The difference as a multiple of what is allowed, among gradients whose largest element is `scale`."""
    off = difference(expected, found)
    allowed = _OWN_TOLERANCE * largest(expected) + _SMALL * scale
    return 0.0 if off == 0 else off / allowed if allowed else math.inf


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements; infinite where one is NaN only, or the shapes differ."""
    if _same_bits(a, b):
        return 0.0
    if a.shape != b.shape:
        return math.inf
    off = largest(a.double() - b.double())
    return math.inf if math.isnan(off) else off


def largest(tensor: Tensor) -> float:
    """The largest absolute element; 0 for a tensor without elements."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
