"""Draws from torch's generators that can run again, bit for bit, from a state that was copied before."""

# Schemas of operations have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = [
    "DROPOUT_BACKWARD",
    "DROPOUT_MASK",
    "DROPOUT_PRODUCT",
    "draw_again",
    "draw_first",
    "dropout_backward",
    "dropout_mask",
    "dropout_product",
    "generator_state",
]

DROPOUT_MASK = "irc.dropout_mask.default"
"""The operation (shape, strides, rate) that draws what a dropout on the CPU keeps."""
DROPOUT_PRODUCT = "irc.dropout_product.default"
"""The operation (data, mask, rate) that makes the output of a dropout."""
DROPOUT_BACKWARD = "irc.dropout_backward.default"
"""The operation (gradient, mask, scale) that makes the gradient of a dropout's input."""


def generator_state(source: str | torch.Generator) -> Tensor:
    """Copies the state of a generator, or of a device's own: bytes on the CPU."""
    return _generator_of(source).get_state()


def dropout_mask(
    shape: Sequence[int], strides: Sequence[int], rate: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draws the mask of a dropout on the CPU as `torch.native_dropout` does there."""
    mask = torch.empty_strided(shape, strides, dtype=torch.bool, device="cpu")
    return mask.bernoulli_(1 - rate, generator=generator)


def dropout_product(data: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Returns the output of a dropout on the CPU as `torch.native_dropout` makes it of its mask.

    The bits are the same in all types; nothing is allocated beside the output.
    """
    return torch.empty_like(data).copy_(mask).mul_(1.0 / (1.0 - rate)).mul_(data)


def dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns the gradient of a dropout's input as `torch.native_dropout_backward` does.

    The bits are the same in all types; nothing is allocated beside the gradient.
    """
    return torch.empty_like(gradient).copy_(mask).mul_(gradient).mul_(scale)


def draw_first(
    state: Tensor,
    source: str | torch.Generator,
    draw: Callable[..., Any],
    /,
    *args: Any,
    **keywords: Any,
) -> Any:
    """Runs a draw from a copied state of a generator, and leaves the generator where the draw ends.

    The draw has a generator of its own meanwhile: the bits are those of `draw_again`, even if another thread
    draws from the generator at the same time. A kernel that takes no generator draws from the device's, which
    is put to the state right before.
    """
    shared, drawing = _generator_of(source), _with_generator(draw)
    if drawing is None:
        shared.set_state(state)
        return draw(*args, **keywords)
    generator = _generator_in(state, shared.device)
    drawn = drawing(*args, **keywords, generator=generator)
    shared.set_state(generator.get_state())
    return drawn


def draw_again(state: Tensor, device: str, draw: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
    """Runs a draw from a copied state of a generator of a device, which is afterwards as it was before."""
    place = torch.device(device)
    drawing = _with_generator(draw)
    if drawing is not None:
        return drawing(*args, **keywords, generator=_generator_in(state, place))
    shared = _generator_of(device)
    now = shared.clone_state()
    shared.set_state(state)
    try:
        return draw(*args, **keywords)
    finally:
        shared.set_state(now.get_state())


def _generator_in(state: Tensor, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


@lru_cache(maxsize=256)
def _with_generator(draw: Callable[..., Any]) -> Callable[..., Any] | None:
    """The operation itself or the overload of it that takes a generator; None if there is none."""
    if not isinstance(draw, OpOverload) or _generator_argument(draw):
        return draw
    wanted = [(each.name, str(each.type)) for each in draw._schema.arguments]
    packet = draw.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        found = [(each.name, str(each.type)) for each in other._schema.arguments]
        if _generator_argument(other) and [each for each in found if each[0] != "generator"] == wanted:
            return other
    return None


def _generator_argument(draw: Any) -> bool:
    return any(each.name == "generator" for each in draw._schema.arguments)


def _generator_of(source: str | torch.Generator) -> torch.Generator:
    if isinstance(source, torch.Generator):
        return source
    device = torch.device(source)
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]
