"""Attention as onnxruntime's optimiser writes it: with the projection or its bias, masks and caches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering

_DOMAIN = "com.microsoft"


def _heads(x: Tensor, count: int) -> Tensor:
    """Batch, sequence, features to batch, heads, sequence, size."""
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def _padding_bias(c: Call, index: int, batch: int, queries: int, keys: int, like: Tensor) -> Tensor | None:
    """Returns the bias of a mask for the scores: zero if it allows a key, else `mask_filter_value`."""
    filled = c.float_("mask_filter_value", -10000.0)
    if not c.has(index):
        return None
    mask = c[index]
    if mask.shape == (batch, keys):
        allowed = mask.bool().reshape(batch, 1, 1, keys)
    elif mask.shape == (batch, queries, keys):
        allowed = mask.bool().unsqueeze(1)
    elif mask.shape in ((batch,), (2 * batch,)):
        places = c.literal(lambda: torch.arange(keys))
        allowed = places < mask[:batch].reshape(batch, 1, 1, 1)
        if mask.shape[0] == 2 * batch:
            allowed = allowed & (places >= mask[batch:].reshape(batch, 1, 1, 1))
    else:
        c.refuse(f"with a mask of shape {list(mask.shape)}")
    return torch.where(allowed, 0.0, filled).to(like.dtype)


def _attend(c: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """Batch, queries, features; the last query sees all keys, of those that come after it none."""
    scale = c.float_("scale", 0.0) or 1.0 / math.sqrt(q.shape[-1])
    rows, columns = q.shape[2], k.shape[2]
    added = bias if mask is None else mask if bias is None else mask + bias
    causal = c.flag("unidirectional")
    if causal and (added is not None or rows != columns):
        seen = c.literal(lambda: torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows))
        added = seen if added is None else torch.where(seen, added, torch.finfo(q.dtype).min)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=added, is_causal=causal and added is None, scale=scale
    )
    return y.transpose(1, 2).flatten(2)


@lowering("Attention", domain=_DOMAIN)
def attention(c: Call) -> Result:
    """Self-attention with the projection to queries, keys and values in one matrix."""
    x, weight, heads = c[0], c[1], c.int_("num_heads", 1)
    for name in ("do_rotary", "past_present_share_buffer"):
        if c.int_(name, 0):
            c.refuse(f"with {name}")
    c.int_("rotary_embedding_dim", 0)
    sizes = c.ints_("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3
    projected = F.linear(x, weight.t(), c.optional(2))
    q, k, v = (_heads(part, heads) for part in projected.split(sizes, -1))
    if c.has(4):
        past = c[4]
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    mask = _padding_bias(c, 3, x.shape[0], x.shape[1], k.shape[2], q)
    y = _attend(c, q, k, v, mask, c.optional(5))
    return y, torch.stack([k, v]) if c.wants(1) else None


@lowering("MultiHeadAttention", domain=_DOMAIN)
def multi_head_attention(c: Call) -> Result:
    """Attention of queries, keys and values that lack only the bias of their projection, and of a cache."""
    heads = c.int_("num_heads", 1)
    if c.has(8) or c.has(9):
        c.refuse("with a shared cache")
    if c.wants(3):
        c.refuse("with its scores as an output")
    q, k, v = _projected(c, heads)
    if c.has(6):
        k, v = torch.cat([c[6], k], 2), torch.cat([c[7], v], 2)
    mask = _padding_bias(c, 4, q.shape[0], q.shape[2], k.shape[2], q)
    return _attend(c, q, k, v, mask, c.optional(5)), k, v


def _projected(c: Call, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    bias = c.optional(3)
    if not c.has(1) or not c.has(2):
        c.refuse("with packed operands")
    q, k, v = c[0], c[1], c[2]
    if k.ndim == 4:  # keys and values of another sequence, projected and cut into heads before
        if bias is not None:
            q = q + bias[: q.shape[-1]]
        return _heads(q, heads), k, v
    if bias is not None:
        parts = bias.split([q.shape[-1], k.shape[-1], v.shape[-1]])
        q, k, v = q + parts[0], k + parts[1], v + parts[2]
    return _heads(q, heads), _heads(k, heads), _heads(v, heads)


@lowering("RotaryEmbedding", domain=_DOMAIN)
def rotary_embedding(c: Call) -> Result:
    """Turn pairs of features by an angle that depends on the position: of each token, or counted from one."""
    x, positions, cos, sin = c[0], c[1], c[2], c[3]
    if c.int_("is_packed_batching", 0) or c.float_("scale", 1.0) != 1.0:
        c.refuse("of packed batches or with a scale")
    flat, size, heads = x.ndim == 3, c.int_("rotary_embedding_dim", 0), c.int_("num_heads", 0)
    if flat:
        heads = heads or x.shape[-1] // (size or 2 * cos.shape[-1])
        x = _heads(x, heads)
    size = size or x.shape[-1]
    if positions.numel() == 1:
        steps = c.literal(lambda: torch.arange(x.shape[2]))
        positions = (positions.reshape(()) + steps).unsqueeze(0)
    y = _turned(x, cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1), size, c)
    return y.transpose(1, 2).flatten(2) if flat else y


def _turned(x: Tensor, cos: Tensor, sin: Tensor, size: int, c: Call) -> Tensor:
    """The first `size` features turned in pairs: with the neighbour, or with one half of them further."""
    turned, rest = x[..., :size], x[..., size:]
    if c.flag("interleaved") or c.int_("rotary_interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([y, rest], -1) if rest.shape[-1] else y


_PLAIN_GROUPED = {"smooth_softmax": 0, "qk_output": 0, "sliding_window_cache": 0}


@lowering("GroupQueryAttention", domain=_DOMAIN)
def group_query_attention(c: Call) -> Result:
    """Causal attention of groups of queries that share keys and values, of a whole prompt.

    Refused: a cache that holds something, quantised or not; sinks; norms of queries and keys; the scores.
    """
    heads, groups = c.int_("num_heads", 1), c.int_("kv_num_heads", 1)
    for name, plain in _PLAIN_GROUPED.items():
        if c.int_(name, plain) != plain:
            c.refuse(f"with {name}")
    for name in ("k_quant_type", "v_quant_type"):
        if c.str_(name, "NONE") != "NONE":
            c.refuse(f"with {name}")
    if any(c.has(i) for i in range(11, 16)) or c.wants(3):
        c.refuse("with sinks, norms, a quantised cache or its scores as an output")
    if c.has(3) and c[3].shape[2]:
        c.refuse(f"with a cache of {c[3].shape[2]} positions")
    c.int_("kv_cache_bit_width", 0)
    c.float_("qk_norm_epsilon", 0.0)
    if c.has(1):
        q, k, v = _heads(c[0], heads), _heads(c[1], groups), _heads(c[2], groups)
    else:
        q, k, v = _heads(c[0], heads + 2 * groups).split([heads, groups, groups], 1)
    n = q.shape[2]
    if c.int_("do_rotary", 0):
        if c.has(9):
            cos, sin = (c[i][c[9].long()].unsqueeze(1) for i in (7, 8))
        else:
            cos, sin = c[7].narrow(0, 0, n), c[8].narrow(0, 0, n)
        q, k = (_turned(x, cos, sin, 2 * cos.shape[-1], c) for x in (q, k))
    y = _attend_grouped(c, q, k, v)
    return y.transpose(1, 2).flatten(2), k, v


def _attend_grouped(c: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, window, cap = q.shape[2], c.int_("local_window_size", -1), c.float_("softcap", 0.0)
    causal = c.flag("causal", default=True)
    scale = c.float_("scale", 0.0) or 1.0 / math.sqrt(q.shape[-1])

    def seen() -> Tensor:
        ones = torch.ones(n, n, dtype=torch.bool)
        return ones.tril().triu(1 - window) if window > 0 else ones.tril()

    places = c.literal(lambda: torch.arange(n))
    mask = (places <= c[5].reshape(-1, 1)).reshape(-1, 1, 1, n)
    mask = mask & c.literal(seen) if causal else mask
    if c.has(10) or cap:
        each = q.shape[1] // k.shape[1]
        scores = torch.matmul(q, k.repeat_interleave(each, 1).transpose(-1, -2)) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores + c[10] if c.has(10) else scores
        scores = scores.masked_fill(~mask, -math.inf)
        return torch.matmul(torch.softmax(scores, -1), v.repeat_interleave(each, 1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
