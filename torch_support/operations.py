"""The functions that run the operations of a program."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload

from ..ir import GENERATOR_STATE, VerificationError, printable
from .class_checks import CHECK_CLASSES, check_classes
from .draws import (
    DROPOUT_BACKWARD,
    DROPOUT_MASK,
    DROPOUT_PRODUCT,
    dropout_backward,
    dropout_mask,
    dropout_product,
    generator_state,
)
from .recurrent_kernels import LSTM_KERNEL, run_lstm_kernel
from .tensor_data import TENSOR_DATA, tensor_data

__all__ = ["OWN_FUNCTIONS", "function_name", "function_of", "overload_of"]

OWN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    LSTM_KERNEL: run_lstm_kernel,
    GENERATOR_STATE: generator_state,
    DROPOUT_MASK: dropout_mask,
    DROPOUT_PRODUCT: dropout_product,
    DROPOUT_BACKWARD: dropout_backward,
    CHECK_CLASSES: check_classes,
    TENSOR_DATA: tensor_data,
}
"""The functions of irc that run operations for which torch has none."""

_NAMESAKES = (
    *(
        "_log_softmax",
        "_softmax",
        "addmm",
        "bmm",
        "cat",
        "clone",
        "detach",
        "embedding",
        "exp",
        "log",
        "maximum",
    ),
    *("mean", "minimum", "mm", "native_layer_norm", "neg", "permute", "relu", "rsqrt", "sigmoid", "sqrt"),
    *("stack", "sum", "t", "tanh", "unsqueeze"),
)
_FUNCTIONS = {
    **{f"aten.{name}.Tensor": f"torch.{name}" for name in ("add", "sub", "mul", "div")},
    **{f"aten.{name}.default": f"torch.{name}" for name in _NAMESAKES},
    "aten.expand.default": "torch.Tensor.expand",
    "aten.view.default": "torch.Tensor.view",
    "aten.narrow.default": "torch.narrow",
    "aten.select.int": "torch.select",
    "aten.squeeze.dim": "torch.squeeze",
    "aten.transpose.int": "torch.transpose",
    "aten.sum.dim_IntList": "torch.sum",
    "aten.where.self": "torch.where",
}
"""Functions of torch that call an operation in half of the time that its entry in `torch.ops` takes."""


def function_name(op: str) -> str:
    """Returns the name of the function that runs an operation: from `torch` on, or of irc's own."""
    own = OWN_FUNCTIONS.get(op)
    return _FUNCTIONS.get(op, f"torch.ops.{op}") if own is None else own.__name__


def overload_of(op: str) -> Any:
    """Returns the operation of torch that a text names; None if it names anything else in `torch.ops`."""
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None


def function_of(op: str) -> Callable[..., Any]:
    """Returns the function that runs an operation, without gradients.

    Raises:
        VerificationError: IRC132 if the text, which may come from a file, names anything else in torch.
    """
    if op in OWN_FUNCTIONS:
        return OWN_FUNCTIONS[op]
    if overload_of(op) is None:
        raise VerificationError("IRC132", f"{printable(op)} is not an operation of torch")
    return attrgetter(function_name(op).removeprefix("torch."))(torch)
