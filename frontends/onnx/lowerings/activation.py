"""Activation functions, softmax and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "HardSwish": F.hardswish,
    "Mish": F.mish,
    "Relu": F.relu,
    "Sigmoid": torch.sigmoid,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Tanh": torch.tanh,
}


@lowering(*_PLAIN)
def plain(c: Call) -> Result:
    """Activations without attributes."""
    return _PLAIN[c.node.op](c[0])


@lowering("LeakyRelu")
def leaky_relu(c: Call) -> Result:
    """A slope below zero."""
    return F.leaky_relu(c[0], c.float_("alpha", 0.01))


@lowering("Elu")
def elu(c: Call) -> Result:
    """An exponential below zero."""
    return F.elu(c[0], c.float_("alpha", 1.0))


@lowering("Celu", since=12)
def celu(c: Call) -> Result:
    """A continuously differentiable exponential below zero."""
    return F.celu(c[0], c.float_("alpha", 1.0))


@lowering("Selu")
def selu(c: Call) -> Result:
    """A scaled exponential below zero; torch's own if the constants are its own."""
    # The first version's defaults have fewer digits than today's.
    first = c.node.version < 6
    alpha = c.float_("alpha", 1.6732 if first else 1.67326319217681884765625)
    gamma = c.float_("gamma", 1.0507 if first else 1.05070102214813232421875)
    return gamma * F.elu(c[0], alpha)


@lowering("PRelu")
def prelu(c: Call) -> Result:
    """A learned slope below zero."""
    x, slope = c[0], c[1]
    if c.node.version < 7 and slope.ndim == 1 and x.ndim > 1:
        slope = slope.reshape(-1, *[1] * (x.ndim - 2))
    per_channel = x.ndim >= 2 and slope.ndim == x.ndim - 1 and slope.numel() == slope.shape[0] == x.shape[1]
    if (slope.numel() == 1 and slope.ndim <= x.ndim) or per_channel:
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, slope * x, x)


@lowering("HardSigmoid")
def hard_sigmoid(c: Call) -> Result:
    """A line cut at zero and one."""
    return torch.clamp(c.float_("alpha", 0.2) * c[0] + c.float_("beta", 0.5), 0.0, 1.0)


@lowering("Gelu", since=20)
def gelu(c: Call) -> Result:
    """Exact, or by tanh."""
    return F.gelu(c[0], approximate=c.str_("approximate", "none"))


@lowering("Swish", since=24)
def swish(c: Call) -> Tensor:
    """`x * sigmoid(alpha * x)`."""
    alpha = c.float_("alpha", 1.0)
    return F.silu(c[0]) if alpha == 1.0 else c[0] * torch.sigmoid(alpha * c[0])


@lowering("SwiGLU", since=28)
def swiglu(c: Call) -> Result:
    """One operand, gated by the Swish of the other."""
    if c[0].shape != c[1].shape:
        c.refuse(f"of shapes {list(c[0].shape)} and {list(c[1].shape)}")
    return swish(c) * c[1]


@lowering("ThresholdedRelu", since=10)
def thresholded_relu(c: Call) -> Result:
    """Zero up to the threshold."""
    return F.threshold(c[0], c.float_("alpha", 1.0), 0.0)


@lowering("Shrink", since=9)
def shrink(c: Call) -> Result:
    """Zero near zero, moved towards zero by the bias elsewhere."""
    x, bias, edge = c[0], c.float_("bias", 0.0), c.float_("lambd", 0.5)
    return torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, torch.zeros_like(x)))


def softmax_like_reference(x: Tensor, axis: int = -1) -> Tensor:
    """Softmax; of float16 on a CPU with each step rounded, as the standard's reference does."""
    if x.dtype is not torch.float16 or x.device.type != "cpu":
        return torch.softmax(x, axis)
    top = x.amax(axis, keepdim=True).detach()
    powers = torch.exp(x - top.masked_fill(top == -math.inf, 0.0))
    return powers / powers.sum(axis, keepdim=True)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)


_SOFT: dict[str, Callable[[Tensor, int], Tensor]] = {
    "Softmax": softmax_like_reference,
    "LogSoftmax": torch.log_softmax,
}


@lowering("Softmax", "LogSoftmax", "Hardmax")
def softmax_flattened(c: Call) -> Result:
    """Normalise over all axes from `axis` on, as one."""
    x = c[0]
    axis = c.int_("axis", 1)
    axis += x.ndim if axis < 0 else 0
    flat = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    y = _hardmax(flat, 1) if c.node.op == "Hardmax" else _SOFT[c.node.op](flat, 1)
    return y.reshape(x.shape)


@lowering("Softmax", "LogSoftmax", "Hardmax", since=13)
def softmax(c: Call) -> Result:
    """Normalise over one axis."""
    axis = c.int_("axis", -1)
    return _hardmax(c[0], axis) if c.node.op == "Hardmax" else _SOFT[c.node.op](c[0], axis)


@lowering("Dropout")
def dropout(c: Call) -> Result:
    """Live in train mode and the identity in eval mode, whatever the node says about training."""
    return _dropout(c, c.float_("ratio", 0.5))


@lowering("Dropout", since=12)
def dropout_by_operand(c: Call) -> Result:
    """Lowers Dropout of later versions, of which the ratio is an operand."""
    return _dropout(c, float(c.number(1, "ratio")) if c.has(1) else 0.5)


def _dropout(c: Call, ratio: float) -> Result:
    x = c[0]
    if not c.wants(1):
        return F.dropout(x, ratio, training=c.training)
    # Before version 10 the mask has the type of the data.
    mask_type = torch.bool if c.node.version >= 10 else x.dtype
    if not c.training or ratio == 0.0:
        return x, torch.ones_like(x, dtype=mask_type)
    y, mask = torch.native_dropout(x, ratio, True)
    return y, mask.to(mask_type)
