"""Selects the part of an optimizer's state that can live in a tier: plans count it, and modules move it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from ..ir.types import DType, TensorType

__all__ = ["moving_state"]

_LEAST_BYTES = 1 << 12
"""Smaller tensors stay on the device: a copy costs more than it frees."""


def moving_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The tensors of an optimizer's state for a parameter that can live in a tier, by their keys.

    They are on the parameter's device, of 4 KiB at least, and each is one block of memory of its own.
    """
    held = optimizer.state.get(parameter, {}).items()
    return {key: tensor for key, tensor in held if isinstance(tensor, Tensor) and _moves(tensor, parameter)}


def _moves(tensor: Tensor, parameter: nn.Parameter) -> bool:
    layout = TensorType(tuple(tensor.shape), DType.UINT8, tuple(tensor.stride()))
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return alone and tensor.nbytes >= _LEAST_BYTES and layout.is_dense and tensor.device == parameter.device
