"""Keeps what a run on tensors without data writes out of the tensors that have data."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ForeignWrites"]


class ForeignWrites(TorchDispatchMode):
    """Lets an operation that writes into tensors with data write into others, without data, instead.

    Those of one number are left alone: code may read it.

    Args:
        mode: The mode of the tensors without data.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and func._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]
            args, kwargs = pytree.tree_map_only(Tensor, self._without_data, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _without_data(self, tensor: Tensor) -> Tensor:
        is_kept = isinstance(tensor, FakeTensor) or tensor.numel() == 1
        return tensor if is_kept else self.mode.from_tensor(tensor)
