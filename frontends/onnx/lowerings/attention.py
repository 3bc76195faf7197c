"""Attention as one operator, and the rotation of positions into queries and keys."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering


def _heads(c: Call, index: int, count: str) -> Tensor:
    """An operand as batch, heads, sequence, size."""
    x = c[index]
    if x.ndim == 4:
        return x
    heads = c.int_(count, 0)
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


@lowering("Attention", since=23)
def attention(c: Call) -> Result:
    """Scaled dot-product attention, grouped or not, with a mask, causal or both.

    Refused: a cache that is managed outside the operator, windows, softcap, and the scores as an output.
    """
    if c.has(6):
        c.refuse("with nonpad_kv_seqlen")
    if c.wants(3):
        c.refuse("with its scores as an output")
    if c.float_("softcap", 0.0):
        c.refuse("with softcap")
    c.int_("qk_matmul_output_mode", 0)
    for name in ("left_window_size", "right_window_size"):
        if c.int_(name, -1) != -1:
            c.refuse(f"with {name}")
    if c.given("softmax_precision") and c.int_("softmax_precision", 1) != 1:
        c.refuse("with softmax_precision")
    flat = c[0].ndim == 3
    q = _heads(c, 0, "q_num_heads")
    k = _heads(c, 1, "kv_num_heads")
    v = _heads(c, 2, "kv_num_heads")
    past = 0
    if c.has(4):
        past = c[4].shape[2]
        k, v = torch.cat([c[4], k], 2), torch.cat([c[5], v], 2)
    scale = c.float_("scale", 0.0) or 1.0 / math.sqrt(q.shape[-1])
    causal = bool(c.int_("is_causal", 0))
    y = _attend(c, q, k, v, past, scale, causal)
    if flat:
        y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)
    return y, k, v


def _attend(c: Call, q: Tensor, k: Tensor, v: Tensor, past: int, scale: float, causal: bool) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    rows, columns = q.shape[2], k.shape[2]
    mask = c.optional(3)
    if mask is None and (not causal or past == 0):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    if mask is not None and mask.shape[-1] != columns:
        c.refuse("with a mask shorter than the keys")
    if causal:
        allowed = c.literal(lambda: torch.ones(rows, columns, dtype=torch.bool).tril(past))
        if mask is None:
            mask = allowed
        elif mask.dtype is torch.bool:
            mask = mask & allowed
        else:
            mask = torch.where(allowed, mask, -math.inf)
    if mask is not None and mask.ndim == 3:
        mask = mask.unsqueeze(0)  # heads, queries, keys
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


@lowering("RotaryEmbedding", since=23)
def rotary_embedding(c: Call) -> Result:
    """Turn pairs of features by an angle that depends on the position."""
    x, cos, sin = c[0], c[1], c[2]
    flat = x.ndim == 3
    heads = c.int_("num_heads", 0)
    if flat:
        x = x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)
    size = c.int_("rotary_embedding_dim", 0) or x.shape[-1]
    positions = c.optional(3)
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x[..., :size], x[..., size:]
    if c.int_("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    y = torch.cat([y, rest], -1) if rest.shape[-1] else y
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1) if flat else y
