"""Watches a forward for writes into tensors that a trace does not see, or not as they are."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...ir import THROUGH_DYNAMO, Location, UnsupportedError
from .in_place import note_data, owner_of_data
from .source_lines import user_line

__all__ = ["DataAssignedError", "TensorWrites"]

_GET_DATA, _SET_DATA = cast(Any, torch.Tensor.data).__get__, cast(Any, torch.Tensor.data).__set__
_SWITCHES = torch.Tensor.requires_grad_, cast(Any, torch.Tensor.requires_grad).__set__


class DataAssignedError(UnsupportedError):
    """The forward gives a tensor other data, which a first call alone may do."""


class TensorWrites(TorchFunctionMode):
    """Refuses that a forward gives a tensor other data: the graph would go on with what it had before.

    Args:
        parts: Takes the lines that compute in place in a part of a tensor whose elements do not lie together.
            The trace computes them apart, and a function of the result goes through other vectors of the
            processor.

    Raises:
        UnsupportedError: IRC338.
    """

    def __init__(self, parts: set[str]) -> None:
        super().__init__()
        self.parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DATA:
            note_data(data := func(*args), args[0])
            return data
        if func == _SET_DATA and owner_of_data(args[1]) is args[0]:
            return None  # `tensor.data *= 2` has written there
        if func == _SET_DATA:
            line = _line()
            raise DataAssignedError(
                "IRC338",
                "the forward assigns to the data of a tensor, which no trace sees",
                at=None if line is None else Location(source=line),
                help="if the first call alone does so, as of packed layers with biases, call the module once "
                "before irc.optimize; or write into it with copy_(), under torch.no_grad() if it is a "
                f"parameter; or {THROUGH_DYNAMO}",
            )
        if func in _SWITCHES:
            tensor, has_gradient = args[0], bool((kwargs or {}).get("requires_grad", (*args, True)[1]))
            if tensor.requires_grad is has_gradient:
                return tensor  # a traced tensor is no leaf, of which torch would take this
            if not has_gradient and not tensor.is_leaf:
                raise _no_gradient()
        if _computes_in_place(getattr(func, "__name__", "")) and args and _is_loose(args[0]):
            self.parts.add(_line() or "a library")
        return func(*args, **(kwargs or {}))


def _no_gradient() -> UnsupportedError:
    line = user_line(sys._getframe(2))  # pyright: ignore[reportPrivateUsage]
    return UnsupportedError(
        "IRC338",
        "the forward takes requires_grad from an argument or a parameter, or from what is computed",
        at=None if line is None else Location(source=line),
        help="compute with x.detach(), or call requires_grad_(False) before the module is called",
    )


def _line() -> str | None:
    return user_line(sys._getframe(2))  # pyright: ignore[reportPrivateUsage]


def _computes_in_place(name: str) -> bool:
    """Whether a function returns its first argument, changed: `add_`, `__iadd__`."""
    is_method = name.endswith("_") and not name.endswith("__")
    return (is_method and name != "requires_grad_") or (name.startswith("__i") and name != "__init__")


def _is_loose(tensor: object) -> bool:
    """Whether other elements lie between those of a tensor through which gradients may flow."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not torch.is_grad_enabled():
        return False
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and reach + 1 != tensor.numel()
