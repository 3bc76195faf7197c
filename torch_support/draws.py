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
    "dropout_backward",
    "dropout_mask",
    "dropout_product",
    "generator_state",
    "state_bytes",
    "takes_generator",
]

DROPOUT_MASK = "irc.dropout_mask.default"
"""The operation (shape, rate) that draws what a dropout on the CPU keeps."""
DROPOUT_PRODUCT = "irc.dropout_product.default"
"""The operation (data, mask, rate) that makes the output of a dropout."""
DROPOUT_BACKWARD = "irc.dropout_backward.default"
"""The operation (gradient, mask, scale) that makes the gradient of a dropout's input."""


def generator_state(device: str) -> Tensor:
    """Copies the state of the generator of a device: bytes on the CPU."""
    return _generator_of(torch.device(device)).get_state()


def state_bytes(device: str) -> int:
    """Returns the bytes of such a state; on another device than the CPU a seed and an offset."""
    return 5056 if torch.device(device).type == "cpu" else 16


def dropout_mask(shape: Sequence[int], rate: float, *, generator: torch.Generator | None = None) -> Tensor:
    """Draws the mask of a dropout on the CPU as `torch.native_dropout` does there."""
    return torch.empty(shape, dtype=torch.bool, device="cpu").bernoulli_(1 - rate, generator=generator)


def dropout_product(data: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Returns the output of a dropout on the CPU as `torch.native_dropout` makes it of its mask.

    The bits are the same in single and double precision; nothing is allocated beside the output.
    """
    return torch.empty_like(data).copy_(mask).mul_(data).mul_(1.0 / (1.0 - rate))


def dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns the gradient of a dropout's input as `torch.native_dropout_backward` does.

    The bits are the same in single and double precision; nothing is allocated beside the gradient.
    """
    return torch.empty_like(gradient).copy_(mask).mul_(scale).mul_(gradient)


def draw_again(state: Tensor, device: str, draw: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
    """Runs a draw from a state of the generator, which is afterwards as it was before."""
    place = torch.device(device)
    drawing = _with_generator(draw)
    if drawing is not None:
        generator = torch.Generator(place)
        generator.set_state(state)
        return drawing(*args, **keywords, generator=generator)
    generator = _generator_of(place)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return draw(*args, **keywords)
    finally:
        generator.set_state(now)


def takes_generator(draw: Callable[..., Any]) -> bool:
    """Whether an operation can draw from a generator that it is given."""
    return _with_generator(draw) is not None


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


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]
