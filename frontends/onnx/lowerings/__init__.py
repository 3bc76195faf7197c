"""What each ONNX operator means in torch: one table, versioned by operator set."""

from . import (
    activation,
    arithmetic,
    convolution,
    indexing,
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
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
    "convolution",
    "find",
    "indexing",
    "newest_opset",
    "normalization",
    "operators",
    "pooling",
    "recurrent",
    "reduction",
    "resize",
    "shape",
]
