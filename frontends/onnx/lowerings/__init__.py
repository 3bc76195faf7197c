"""What each ONNX operator means in torch: one table, versioned by operator set."""

from . import (
    activation,
    arithmetic,
    attention,
    convolution,
    indexing,
    loss,
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
    sampling,
    shape,
)
from .table import Attribute, Call, Lowering, NodeInfo, find, newest_opset, operators

__all__ = [
    "Attribute",
    "Call",
    "Lowering",
    "NodeInfo",
    "activation",
    "arithmetic",
    "attention",
    "convolution",
    "find",
    "indexing",
    "loss",
    "newest_opset",
    "normalization",
    "operators",
    "pooling",
    "recurrent",
    "reduction",
    "resize",
    "sampling",
    "shape",
]
