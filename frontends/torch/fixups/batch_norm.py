"""Traces the BatchNorm of cuDNN by the operation that chooses its kernel as eager does."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from .python_kernels import with_kernels

__all__ = ["batch_norm_of_eager"]

_CUDNN: Any = torch.ops.aten.cudnn_batch_norm.default


def batch_norm_of_eager() -> contextlib.AbstractContextManager[None]:
    """Keeps BatchNorm in training on cuDNN: torch's tracer takes torch's own kernel, which rounds otherwise.

    Without running statistics, and in evaluation, it is traced as torch's own kernel.
    """
    theirs = _CUDNN.py_kernels[DispatchKey.Autograd]

    def traced(
        data: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Any:
        if not training or mean is None or variance is None:
            return theirs(data, weight, bias, mean, variance, training, momentum, eps)
        return torch.ops.aten._batch_norm_with_update(data, weight, bias, mean, variance, momentum, eps)

    return with_kernels({_CUDNN: {DispatchKey.Autograd: traced}})
