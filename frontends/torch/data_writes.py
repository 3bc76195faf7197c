"""Refuses assignments to `tensor.data`, which no trace sees."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from ...ir import Location, UnsupportedError
from .source_lines import user_line

__all__ = ["RefusedData"]

_SET = cast(Any, torch.Tensor.data).__set__


class RefusedData(TorchFunctionMode):
    """Refuses that a forward gives a tensor other data: the graph would go on with what it had before.

    Raises:
        UnsupportedError: IRC338.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET:
            line = user_line(sys._getframe())  # pyright: ignore[reportPrivateUsage]
            raise UnsupportedError(
                "IRC338",
                "the forward assigns to the data of a tensor, which no trace sees",
                at=None if line is None else Location(source=line),
                help="write into it with copy_(), under torch.no_grad() if it is a parameter",
            )
        return func(*args, **(kwargs or {}))
