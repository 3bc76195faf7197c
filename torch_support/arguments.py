"""Arguments of operations between the IR and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir import Argument, Symbol, TensorType, Value

__all__ = ["constant_symbol", "empty", "to_torch"]


def to_torch(argument: Argument, given: Callable[[Value | Symbol], Any]) -> Any:
    """Returns an argument as torch takes it.

    Args:
        argument: The argument.
        given: Finds the tensor of a value, and what a symbol that is no constant of torch stands for.
    """
    match argument:
        case tuple():
            return [to_torch(item, given) for item in argument]
        case Symbol("device", name):
            return torch.device(name)
        case Symbol("dtype" | "layout" | "memory_format", name):
            return getattr(torch, name)
        case Value() | Symbol():
            return given(argument)
        case _:
            return argument


def constant_symbol(constant: object) -> Symbol | None:
    """Returns the symbol of a constant of torch; None for anything else."""
    match constant:
        case torch.dtype():
            kind = "dtype"
        case torch.device():
            return Symbol("device", str(constant))
        case torch.layout():
            kind = "layout"
        case torch.memory_format():
            kind = "memory_format"
        case _:
            return None
    return Symbol(kind, str(constant).removeprefix("torch."))


def empty(type: TensorType) -> Tensor:
    """Returns a tensor of a type, without numbers."""
    dtype = getattr(torch, type.dtype.value)
    return torch.empty_strided(type.shape, type.strides, dtype=dtype, device=type.device)
