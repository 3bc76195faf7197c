"""Compares the numbers of one training step of two modules: outputs, gradients, buffers, generator states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ir import Delivery, Input, InputRole, Origin
from ..torch_support.bits import same_bits

__all__ = [
    "TOLERANCE",
    "Differences",
    "Numbers",
    "Outcome",
    "difference",
    "differing",
    "largest",
    "names_in_plan",
    "numbers_of",
]

TOLERANCE = 1e-5
"""The largest difference that passes, as a share of the largest number of its kind."""

_OWN_TOLERANCE = 1e-4
_SMALL = 1e-6


@dataclass
class Differences:
    """The differences between tensors of one kind.

    Args:
        largest: The largest absolute difference of an element; infinite if one of them is not a number and
            the other is.
        scale: The largest absolute element of the original's.
        worst: The largest difference as a multiple of what is allowed: 1e-4 of a tensor's own largest element
            and 1e-6 of the largest of all, so that small tensors count beside large ones.
    """

    largest: float = 0.0
    scale: float = 0.0
    worst: float = 0.0

    def add(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Counts tensors, each of the original with the other's."""
        found = [(difference(expected, other), largest(expected)) for expected, other in pairs]
        self.largest = max([self.largest, *(off for off, _ in found)])
        self.scale = max([self.scale, *(own for _, own in found)])
        for off, own in found:
            allowed = _OWN_TOLERANCE * own + _SMALL * self.scale
            self.worst = max(self.worst, 0.0 if off == 0 else off / allowed if allowed else math.inf)


@dataclass(frozen=True, slots=True)
class Numbers:
    """One step of two modules from the same state: the largest differences and the scale of what differs.

    Args:
        outputs: Largest difference of an output's element; infinite if one is NaN and the other is not.
        gradients: The same for gradients of parameters and inputs.
        buffers: The same for buffers after the step; infinite if a buffer of whole numbers differs.
        output_scale: Largest element of an output of the original.
        gradient_scale: Largest element of a gradient of the original.
        buffer_scale: Largest element of a floating-point buffer of the original.
        worst_gradient: Largest difference of a gradient as a multiple of what is allowed (see `Differences`).
        bit_equal: Whether outputs, gradients and buffers are equal bit for bit.
        same_gradients: Whether the same parameters and inputs have gradients.
        same_generator: Whether the random generators are in the same state after the step.
        off: The largest difference of each tensor whose bits differ, as a fraction of its largest element:
            `output 0`, a parameter or `input 0` for its gradient, or a buffer.
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
    off: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def agrees(self) -> bool:
        """Whether all is the same up to `TOLERANCE`, and the generators' states exactly."""
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
class Outcome:
    """The tensors that a step leaves.

    Args:
        outputs: The tensors of the result.
        gradients: Of parameters by name, and of inputs.
        buffers: By name.
        generators: The states of the random generators.
    """

    outputs: Sequence[Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    generators: Sequence[Tensor]


def numbers_of(expected: Outcome, found: Outcome) -> Numbers:
    """Returns the differences between the outcome of a step and the original's.

    Buffers that only one of the two has are left out. Another number of outputs is an infinite difference.
    """
    outputs = list(zip(expected.outputs, found.outputs, strict=False))
    if len(expected.outputs) != len(found.outputs):
        outputs.append((torch.ones(1), torch.full((1,), math.nan)))
    own = {n: (g, found.gradients[n]) for n, g in expected.gradients.items() if n in found.gradients}
    held = {n: (b, found.buffers[n]) for n, b in expected.buffers.items() if n in found.buffers}
    off = differing({**{f"output {i}": pair for i, pair in enumerate(outputs)}, **own, **held})
    gradients, buffers = list(own.values()), list(held.values())
    whole = [(a, b) for a, b in buffers if not _is_float(a)]
    of_outputs, of_gradients, of_buffers = Differences(), Differences(), Differences()
    of_outputs.add(outputs)
    of_gradients.add(gradients)
    of_buffers.add(buffers)
    return Numbers(
        outputs=of_outputs.largest,
        gradients=of_gradients.largest,
        buffers=math.inf if any(not torch.equal(a, b) for a, b in whole) else of_buffers.largest,
        output_scale=of_outputs.scale,
        gradient_scale=of_gradients.scale,
        buffer_scale=max((largest(a) for a, _ in buffers if _is_float(a)), default=0.0),
        worst_gradient=of_gradients.worst,
        bit_equal=not off,
        same_gradients=expected.gradients.keys() == found.gradients.keys(),
        same_generator=all(map(torch.equal, expected.generators, found.generators)),
        off=off,
    )


def names_in_plan(deliveries: Iterable[Delivery], statics: Sequence[Input]) -> dict[str, str]:
    """Returns the names that a plan has for outputs, by their place among the tensors of the result.

    A buffer that is returned has its own name, and another input `result 0`: its own would mean its gradient.

    Args:
        deliveries: How the result is made.
        statics: The graph's inputs except the tangents, in order.
    """

    def name_of(place: int, delivery: Delivery) -> str:
        if delivery.origin is not Origin.INPUT:
            return f"output {delivery.index}"
        entry = statics[delivery.index]
        return entry.target if entry.role is InputRole.BUFFER else f"result {place}"

    tensors = (delivery for delivery in deliveries if delivery.origin is not Origin.CONSTANT)
    return {f"output {place}": name_of(place, delivery) for place, delivery in enumerate(tensors)}


def differing(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Returns the tensors whose bits differ, with the difference as a fraction of the largest element."""
    found = {name: (a, b) for name, (a, b) in pairs.items() if not same_bits(a, b)}
    off = {name: (difference(a, b), largest(a)) for name, (a, b) in found.items()}
    return {name: by / most if most else (math.inf if by else 0.0) for name, (by, most) in off.items()}


def largest(tensor: Tensor) -> float:
    """The largest absolute finite element; 0 for a tensor without elements."""
    elements = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(elements.double().nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


def difference(expected: Tensor, found: Tensor) -> float:
    """The largest absolute difference of two elements; none if both are nan, or equal infinities.

    Tensors of other shapes are infinitely far apart.
    """
    if expected.shape != found.shape:
        return math.inf
    if expected.numel() == 0 or torch.equal(expected, found):
        return 0.0
    pair = (torch.view_as_real(t) if t.is_complex() else t for t in (expected, found))
    a, b = (t.detach().double() for t in pair)
    differences = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(differences.nan_to_num(math.inf).max())


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
