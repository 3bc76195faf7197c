"""Products and activations that onnxruntime's optimiser makes of several operators (domain com.microsoft)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import gemm
from .convolution import conv
from .table import Call, Result, lowering

_DOMAIN = "com.microsoft"

# Each with the parameters that it takes, in order.
_ACTIVATIONS: dict[str, Callable[[Tensor, Sequence[float]], Tensor]] = {
    "": lambda y, _: y,
    "Clip": lambda y, p: torch.clamp(y, p[0], p[1]),
    "HardSigmoid": lambda y, p: torch.clamp(p[0] * y + p[1], 0.0, 1.0),
    "LeakyRelu": lambda y, p: F.leaky_relu(y, p[0]),
    "Relu": lambda y, _: F.relu(y),
    "Sigmoid": lambda y, _: torch.sigmoid(y),
    "Tanh": lambda y, _: torch.tanh(y),
}
_PARAMETERS = {"Clip": 2, "HardSigmoid": 2, "LeakyRelu": 1}


def _activated(c: Call, y: Tensor, parameters: Sequence[float]) -> Tensor:
    name = c.str_("activation", "")
    if name not in _ACTIVATIONS or len(parameters) < _PARAMETERS.get(name, 0):
        c.refuse(f"with activation={name} of {len(parameters)} parameters")
    return _ACTIVATIONS[name](y, parameters)


@lowering("FusedConv", domain=_DOMAIN)
def fused_conv(c: Call) -> Result:
    """A convolution, a sum and an activation."""
    y = conv(c)
    assert isinstance(y, Tensor)
    y = y + c[3] if c.has(3) else y
    given = c.attribute("activation_params")
    return _activated(c, y, [float(p) for p in given] if isinstance(given, tuple) else [])


@lowering("FusedGemm", domain=_DOMAIN)
def fused_gemm(c: Call) -> Result:
    """A Gemm and an activation."""
    y = gemm(c)
    assert isinstance(y, Tensor)
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    return _activated(c, y, [c.float_(name, 0.0) for name in names if c.given(name)])


@lowering("FusedMatMul", "TransposeMatMul", domain=_DOMAIN)
def fused_matmul(c: Call) -> Result:
    """A product of operands that are transposed as asked, times a number."""
    a, b, alpha = c[0], c[1], c.float_("alpha", 1.0)
    # The first axis of all goes before the last; then the last two are exchanged, which a vector has not.
    a = a.movedim(0, -2) if c.flag("transBatchA") else a
    b = b.movedim(0, -2) if c.flag("transBatchB") else b
    a = a.transpose(-1, -2) if c.flag("transA") and a.ndim > 1 else a
    b = b.transpose(-1, -2) if c.flag("transB") and b.ndim > 1 else b
    y = torch.matmul(a, b)
    return y if alpha == 1.0 else alpha * y


@lowering("Gelu", "BiasGelu", domain=_DOMAIN)
def gelu(c: Call) -> Result:
    """Exact, of a sum or of the operand."""
    return F.gelu(c[0] + c[1] if c.has(1) else c[0])


@lowering("FastGelu", domain=_DOMAIN)
def fast_gelu(c: Call) -> Result:
    """By tanh, of a sum or of the operand."""
    return F.gelu(c[0] + c[1] if c.has(1) else c[0], approximate="tanh")


@lowering("QuickGelu", domain=_DOMAIN)
def quick_gelu(c: Call) -> Result:
    """`x * sigmoid(alpha * x)`."""
    return c[0] * torch.sigmoid(c.float_("alpha", 1.702) * c[0])
