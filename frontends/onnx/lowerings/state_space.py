"""Layers that carry a state from token to token, and the cache that attention reads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering

_GATED = ("gated", "gated_delta")
_DELTA = ("delta", "gated_delta")


def _heads(x: Tensor, heads: int) -> Tensor:
    """Batch, heads, time, size."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


@lowering("LinearAttention", since=27)
def linear_attention(c: Call) -> Result:
    """A matrix of keys and values that each token decays, corrects and reads; in float32 at least."""
    query_heads, heads = c.int_("q_num_heads", 0), c.int_("kv_num_heads", 0)
    rule = c.str_("update_rule", "gated_delta")
    c.int_("chunk_size", 64)  # of the work's order alone
    if rule not in ("linear", *_GATED, *_DELTA) or heads < 1 or query_heads % heads:
        c.refuse(f"with update_rule={rule} on {query_heads} query heads and {heads} key heads")
    if (rule in _GATED) != c.has(4) or (rule in _DELTA) != c.has(5):
        c.refuse(f"with update_rule={rule} and {'a' if c.has(4) else 'no'} decay")
    wide = torch.float64 if c[0].dtype is torch.float64 else torch.float32
    q = _heads(c[0], query_heads).to(wide)
    k, v = (_heads(c[i], heads).to(wide) for i in (1, 2))
    if c.has(3):
        state, kept = c[3].to(wide), c[3].dtype
    else:
        state, kept = q.new_zeros(k.shape[0], heads, k.shape[-1], v.shape[-1]), c[0].dtype
    decay = _heads(c[4], heads).to(wide).exp() if c.has(4) else None
    rate = _heads(c[5], c[5].shape[-1]).to(wide) if c.has(5) else None
    reads: list[Tensor] = []
    for t in range(k.shape[2]):
        key, value = k[:, :, t, :, None], v[:, :, t, None]
        if decay is not None:
            state = state * decay[:, :, t, :, None]
        if rate is not None:
            value = rate[:, :, t, :, None] * (value - (state * key).sum(2, keepdim=True))
        state = state + key * value
        # Each state serves a group of queries.
        asked = q[:, :, t].unflatten(1, (heads, -1))
        reads.append((asked @ state).flatten(1, 2))
    y = torch.stack(reads, 2) if reads else q.new_zeros(*q.shape[:3], v.shape[-1])
    y = y * (c.float_("scale", 0.0) or 1.0 / math.sqrt(q.shape[-1]))
    return y.transpose(1, 2).flatten(2).to(c[0].dtype), state.to(kept)


@lowering("CausalConvWithState", since=27)
def causal_conv_with_state(c: Call) -> Result:
    """A depthwise convolution that looks back only, after the inputs that came before."""
    x, weight, bias = c[0], c[1], c.optional(2)
    activation, reach = c.str_("activation", "none"), weight.shape[-1] - 1
    if activation not in ("none", "silu", "swish"):
        c.refuse(f"with activation={activation}")
    x = torch.cat([c[3], x], 2) if c.has(3) else F.pad(x, (reach, 0))
    y = F.conv1d(x, weight, bias, groups=x.shape[1])
    if activation != "none":
        y = F.silu(y)
    return y, x[:, :, x.shape[2] - reach :]


@lowering("TensorScatter", since=24)
def tensor_scatter(c: Call) -> Result:
    """Write new entries into a cache, from a place of its own in each sample."""
    cache, update, mode = c[0], c[1], c.str_("mode", "linear")
    axis = c.int_("axis", -2) % cache.ndim
    if mode not in ("linear", "circular") or axis == 0:
        c.refuse(f"with mode={mode} along axis {axis}")
    length, most = update.shape[axis], cache.shape[axis]
    places = c.literal(lambda: torch.arange(length))
    if c.has(2):
        places = places + c[2].reshape(-1, 1)
        if mode == "circular":
            places = places % most
    shape = [1] * cache.ndim
    shape[0], shape[axis] = places.shape[0] if places.ndim == 2 else 1, length
    return cache.scatter(axis, places.reshape(shape).expand(update.shape), update)
