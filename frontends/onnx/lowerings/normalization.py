"""Normalisation layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering


@lowering("BatchNormalization")
def batch_normalization(c: Call) -> Result:
    """In train mode the statistics of the batch, which update the running ones; in eval mode those.

    ONNX keeps `momentum` of the old value and torch `1 - momentum`. The module's mode decides, not the node's
    `training_mode`: what was exported from training evaluates, and what was exported for inference trains.
    """
    if c.node.version < 9 and not c.int_("spatial", 1):
        c.refuse("with spatial=0")
    x, scale, bias, mean, var = (c[i] for i in range(5))
    momentum, eps = 1.0 - c.float_("momentum", 0.9), c.float_("epsilon", 1e-5)
    if c.node.version >= 14 and c.training and (c.wants(1) or c.wants(2)):
        return _with_running_outputs(x, scale, bias, mean, var, momentum, eps)
    if c.node.version < 14 and any(c.wants(i) for i in range(1, 5)):
        c.refuse("with its statistics as outputs")
    # Statistics that are themselves computed cannot be updated; they are used as they are.
    update = c.training and c.is_weight(3) and c.is_weight(4)
    if x.dtype is scale.dtype is mean.dtype:
        return F.batch_norm(x, mean, var, scale, bias, update, momentum, eps), mean, var
    wide = mean.dtype
    if not (x.element_size() <= wide.itemsize and scale.element_size() <= wide.itemsize):
        c.refuse(f"of {x.dtype} data with {scale.dtype} scale and {mean.dtype} statistics")
    y = F.batch_norm(x.to(wide), mean, var, scale.to(wide), bias.to(wide), update, momentum, eps)
    return y.to(x.dtype), mean, var


def _with_running_outputs(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> Result:
    """The node's own account of its new statistics, for graphs that read them; the buffers stay."""
    axes, wide = [0, *range(2, x.ndim)], x.to(mean.dtype)
    new_var, new_mean = torch.var_mean(wide, axes, correction=0)
    y = F.batch_norm(wide, None, None, scale.to(wide.dtype), bias.to(wide.dtype), True, momentum, eps)
    return y.to(x.dtype), torch.lerp(mean, new_mean, momentum), torch.lerp(var, new_var, momentum)


@lowering("LayerNormalization", since=17)
def layer_normalization(c: Call) -> Result:
    """Over the trailing axes; the mean and the inverse deviation are outputs too."""
    x, scale, bias = c[0], c[1], c.optional(2)
    axis = c.int_("axis", -1) % x.ndim
    shape, eps = x.shape[axis:], c.float_("epsilon", 1e-5)
    fits = scale.shape == shape and (bias is None or bias.shape == shape)
    if fits and not (c.wants(1) or c.wants(2)):
        return F.layer_norm(x, shape, scale, bias, eps)
    if c.int_("stash_type", 1) != 1:
        c.refuse(f"with stash_type={c.int_('stash_type', 1)}")
    # 16-bit floats are widened for the statistics, and rounded before they are scaled.
    wide = x.float() if x.element_size() == 2 else x
    y, mean, rstd = torch.native_layer_norm(wide, shape, None, None, eps)
    y = y.to(x.dtype) * scale if bias is None else y.to(x.dtype) * scale + bias
    keep = [*x.shape[:axis], *[1] * len(shape)]
    return y, mean.reshape(keep).float(), rstd.reshape(keep).float()


@lowering("RMSNormalization", since=23)
def rms_normalization(c: Call) -> Result:
    """Over the trailing axes, without the mean."""
    x, scale = c[0], c[1]
    shape, eps = x.shape[c.int_("axis", -1) % x.ndim :], c.float_("epsilon", 1e-5)
    if scale.shape == shape and scale.dtype is x.dtype:
        return F.rms_norm(x, shape, scale, eps)
    return (F.rms_norm(x, shape, None, eps) * scale).to(scale.dtype)


@lowering("InstanceNormalization")
def instance_normalization(c: Call) -> Result:
    """Over each plane of each sample, in train mode and in eval mode alike."""
    return F.instance_norm(c[0], None, None, c[1], c[2], True, 0.0, c.float_("epsilon", 1e-5))


@lowering("GroupNormalization", since=18)
def group_normalization_18(c: Call) -> Result:
    """Scale and bias are one number a group."""
    groups = c.int_("num_groups", 1)
    each = c[0].shape[1] // groups
    scale, bias = c[1].repeat_interleave(each), c[2].repeat_interleave(each)
    return F.group_norm(c[0], groups, scale, bias, c.float_("epsilon", 1e-5))


@lowering("GroupNormalization", since=21)
def group_normalization(c: Call) -> Result:
    """Scale and bias are one number a channel."""
    return F.group_norm(c[0], c.int_("num_groups", 1), c[1], c[2], c.float_("epsilon", 1e-5))


@lowering("LRN")
def lrn(c: Call) -> Result:
    """Across channels; the larger half of an even window lies after, while torch has it before."""
    x, size = c[0], c.int_("size", 1)
    alpha, beta, bias = c.float_("alpha", 1e-4), c.float_("beta", 0.75), c.float_("bias", 1.0)
    if size % 2:
        # torch has no such averages of 16-bit floats on a CPU.
        wide = x.float() if x.element_size() == 2 and x.device.type == "cpu" else x
        return F.local_response_norm(wide, size, alpha, beta, bias).to(x.dtype)
    square = F.pad((x * x).movedim(1, -1), ((size - 1) // 2, size // 2))
    total = square.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (bias + alpha / size * total) ** beta


@lowering("MeanVarianceNormalization", since=9)
def mean_variance_normalization(c: Call) -> Result:
    """Zero mean and unit variance over the axes."""
    x = c[0]
    axes = c.ints_("axes") or [0, 2, 3]
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return (x - mean) / (torch.sqrt(var) + 1e-9)


@lowering("LpNormalization")
def lp_normalization(c: Call) -> Result:
    """Unit norm along one axis; zero stays zero."""
    x, axis, p = c[0], c.int_("axis", -1), c.int_("p", 2)
    c.require(p in (1, 2), f"has p={p}; it is 1 or 2")
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)
