"""Compares what two runs of one script leave behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from irc.compiler.compare import difference, largest

__all__ = ["Difference", "check_same", "state_of"]


class Difference(Exception):
    """The fitted module does something else than the original."""


def state_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of a module's parameters, gradients and buffers, and of the default generator's state."""
    state: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        gradient = parameter.grad
        state[f"parameter {name}"] = _copy(parameter)
        state[f"gradient of {name}"] = None if gradient is None else _copy(gradient)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        state[f"buffer {name}"] = _copy(buffer)
    state["the generator's state"] = torch.get_rng_state()
    return state


def _copy(tensor: Tensor) -> Tensor:
    """A copy; of a tensor that is sharded over ranks, of the whole of it."""
    whole: Any = getattr(tensor, "full_tensor", lambda: tensor)
    return whole().detach().clone()


def check_same(found: object, wanted: object, what: str, tolerance: float = 0.0) -> None:
    """Compares values, types and nesting; tensors also by shape, strides, element type and requires_grad.

    Args:
        found: The fitted module's.
        wanted: The original's.
        what: How to call them.
        tolerance: How far an element of a tensor may be off, as a share of the tensor's largest one. At 0,
            values are equal (both NaN counts as equal).

    Raises:
        Difference: They are not the same.
    """
    if isinstance(wanted, Tensor):
        _check_tensors(found, wanted, what, tolerance)
    elif type(found) is not type(wanted):
        raise Difference(f"{what} is {_type(found)}, the original's is {_type(wanted)}")
    elif isinstance(wanted, Mapping):
        _check_mappings(cast(Any, found), cast(Any, wanted), what, tolerance)
    elif isinstance(wanted, (list, tuple)):
        _check_sequences(cast(Any, found), cast(Any, wanted), what, tolerance)
    elif dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            mine, its = getattr(found, field.name), getattr(wanted, field.name)
            check_same(mine, its, f"{what}, {field.name}", tolerance)
    elif type(wanted).__eq__ is object.__eq__ and hasattr(wanted, "__dict__"):
        check_same(vars(found), vars(wanted), what, tolerance)
    elif found != wanted and not (tolerance and _is_near(found, wanted, tolerance)):
        raise Difference(f"{what} is {found!r}, the original's is {wanted!r}")


def _check_mappings(found: Mapping[Any, Any], wanted: Mapping[Any, Any], what: str, tolerance: float) -> None:
    if list(found) != list(wanted):
        raise Difference(f"{what} has the keys {list(found)}, the original's {list(wanted)}")
    for key in wanted:
        check_same(found[key], wanted[key], f"{what}, {key}", tolerance)


def _check_sequences(found: list[Any], wanted: list[Any], what: str, tolerance: float) -> None:
    if len(found) != len(wanted):
        raise Difference(f"{what} has {len(found)} elements, the original's {len(wanted)}")
    for index, (mine, its) in enumerate(zip(found, wanted, strict=True)):
        check_same(mine, its, f"{what}, {index}", tolerance)


def _is_near(found: object, wanted: object, tolerance: float) -> bool:
    if not isinstance(found, float) or not isinstance(wanted, float):
        return False
    return abs(found - wanted) <= tolerance * max(abs(wanted), 1.0)


def _check_tensors(found: object, wanted: Tensor, what: str, tolerance: float) -> None:
    if type(found) is not type(wanted):
        raise Difference(f"{what} is {_type(found)}, the original's is {_type(wanted)}")
    mine = found
    for kind, one, other in (
        ("of shape", list(mine.shape), list(wanted.shape)),
        ("of type", mine.dtype, wanted.dtype),
        ("of strides", mine.stride(), wanted.stride()),
        ("one with requires_grad", mine.requires_grad, wanted.requires_grad),
    ):
        if one != other:
            raise Difference(f"{what} is {kind} {one}, the original's {other}")
    a, b = mine.detach(), wanted.detach()
    off, scale = difference(b, a), largest(b)
    if not off <= tolerance * scale:
        allowed = f" ({tolerance:.0e} of it is allowed)" if tolerance else ""
        raise Difference(f"{what} is off by {off:.3g}, its largest element is {scale:.3g}{allowed}")


def _type(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"
