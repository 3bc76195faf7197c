"""The element types of tensors, as irc names them."""

from __future__ import annotations

from torch import Tensor

from ..ir import DType, UnsupportedError

__all__ = ["element_type"]


def element_type(tensor: Tensor) -> DType:
    """Names the element type of a tensor.

    Raises:
        UnsupportedError: IRC350 for one that irc has no name for.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return DType(name)
    except ValueError:
        raise UnsupportedError(
            "IRC350",
            f"a tensor has elements of type {name}, which irc does not know",
            help="hold them as bytes, tensor.view(torch.uint8), up to the operation that reads them",
        ) from None
