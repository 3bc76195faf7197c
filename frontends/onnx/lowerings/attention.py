"""Attention as one operator, and the rotation of positions into queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import softmax_like_reference
from .table import Call, Result, lowering

_SIDES = ("left", "right")
_PRECISIONS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}


def _heads(c: Call, index: int, count: str) -> Tensor:
    """An operand as batch, heads, sequence, size."""
    x, heads = c[index], c.int_(count, 0)
    if x.ndim == 4:
        return x
    if not heads:
        c.refuse(f"of operands of rank 3 without {count}")
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Bias:
    """Holds the keys that each query sees, and what is added to its scores.

    Args:
        allowed: True for the keys that the query may look at; `None` if it may look at every key.
        added: A float mask; `None` without one.
        empty_rows: Whether a query may be left with no key at all.
    """

    allowed: Tensor | None
    added: Tensor | None
    empty_rows: bool

    def as_mask(self) -> Tensor | None:
        """Both in one, as torch's operator takes it."""
        if self.added is None or self.allowed is None:
            return self.allowed if self.added is None else self.added
        return torch.where(self.allowed, self.added, -math.inf)

    def as_floats(self, dtype: torch.dtype) -> Tensor | None:
        """Both in one, as numbers to add."""
        if self.added is None and self.allowed is not None:
            return torch.zeros_like(self.allowed, dtype=dtype).masked_fill(~self.allowed, -math.inf)
        return self.as_mask()


@lowering("Attention", since=23)
def attention(c: Call) -> Result:
    """Scaled dot-product attention: grouped or not, masked, causal, in windows, with or without a cache.

    torch's own operator runs if it means the same. Scores that are an output, capped scores and another
    precision of the softmax are computed step by step. So are 16-bit floats on a CPU: the standard says after
    which steps they are rounded.
    """
    if c.has(4) != c.has(5):
        c.refuse("with one of past_key and past_value alone")
    if c.has(6) and c.has(4):
        c.refuse("with nonpad_kv_seqlen and a past")
    flat = c[0].ndim == 3
    q = _heads(c, 0, "q_num_heads")
    k = _heads(c, 1, "kv_num_heads")
    v = _heads(c, 2, "kv_num_heads")
    if not q.dtype is k.dtype is v.dtype:
        c.refuse(f"of {q.dtype} queries, {k.dtype} keys and {v.dtype} values")
    if c.has(4):
        k, v = torch.cat([c[4], k], 2), torch.cat([c[5], v], 2)
    past = c[4].shape[2] if c.has(4) else 0
    scale = c.float_("scale", 0.0) or 1.0 / math.sqrt(q.shape[-1])
    y, scores = _attend(c, q, k, v, past, scale)
    if flat:
        y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)
    return y, k, v, scores


def _attend(
    c: Call, q: Tensor, k: Tensor, v: Tensor, past: int, scale: float
) -> tuple[Tensor, Tensor | None]:
    cap, mode = c.float_("softcap", 0.0), c.int_("qk_matmul_output_mode", 0)
    precision = c.int_("softmax_precision", 0)
    if mode not in range(4) or (precision and precision not in _PRECISIONS):
        c.refuse(f"with qk_matmul_output_mode={mode} and softmax_precision={precision}")
    within = _PRECISIONS[precision] if precision else q.dtype
    grouped = q.shape[1] != k.shape[1]
    short = q.dtype in (torch.float16, torch.bfloat16)
    half = short and q.device.type == "cpu"
    # Of one dtype the literals are the same on every device: the module keeps them by their order.
    sqrt_scale = (
        c.literal(lambda: torch.tensor(math.sqrt(scale), dtype=q.dtype)) if short else math.sqrt(scale)
    )
    fused = not (c.wants(3) or cap > 0.0 or half) and (within is q.dtype or q.element_size() == 2)
    causal, left, right = c.flag("is_causal"), *(c.int_(f"{s}_window_size", -1) for s in _SIDES)
    if min(left, right) < -1:
        c.refuse(f"with left_window_size={left} and right_window_size={right}")
    if fused and causal and left < 0 and past == 0 and not (c.has(3) or c.has(6)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped), None
    bias = _bias(c, q, k, past, left, 0 if causal else right)
    if fused:
        mask = bias.as_mask()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return y, None
    if grouped:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return _step_by_step(q * sqrt_scale, k * sqrt_scale, v, bias, cap, within, mode)


def _step_by_step(
    q: Tensor, k: Tensor, v: Tensor, bias: _Bias, cap: float, within: torch.dtype, mode: int
) -> tuple[Tensor, Tensor]:
    """The result, and the scores after the step that `mode` counts to."""
    stages = [q @ k.transpose(-1, -2)]
    stages.append(torch.tanh(stages[0] / cap) * cap if cap > 0.0 else stages[0])
    added = bias.as_floats(q.dtype)
    stages.append(stages[1] if added is None else stages[1] + added)
    if added is not None and bias.empty_rows:
        # A query without any key gets zeros, and hands on no gradient.
        empty = (added == -math.inf).all(-1, keepdim=True)
        shares = softmax_like_reference(stages[2].masked_fill(empty, 0.0).to(within)).to(q.dtype)
        shares = shares.masked_fill(empty, 0.0)
    else:
        shares = softmax_like_reference(stages[2].to(within)).to(q.dtype)
    stages.append(shares)
    return shares @ v, stages[mode]


def _bias(c: Call, q: Tensor, k: Tensor, past: int, left: int, right: int) -> _Bias:
    rows, columns = q.shape[2], k.shape[2]
    mask, valid = _mask(c, columns), c.optional(6)
    limits: list[Tensor] = []
    if valid is not None:
        positions = c.literal(lambda: torch.arange(columns))
        limits.append((positions < valid.reshape(-1, 1))[:, None, None, :])
        if left >= 0 or right >= 0:
            # The last query stands at the last valid key.
            behind = c.literal(lambda: torch.arange(columns) - torch.arange(rows)[:, None] + rows)
            limits.append(_within((behind - valid.reshape(-1, 1, 1)).unsqueeze(1), left, right))
    elif left >= 0 or right >= 0:
        limits.append(c.literal(lambda: _window(rows, columns, past, left, right)))
    if mask is not None and mask.dtype is torch.bool:
        limits.append(mask)
        mask = None
    allowed = limits[0] if limits else None
    for limit in limits[1:]:
        assert allowed is not None
        allowed = allowed & limit
    empty_rows = c.has(3) or valid is not None or left >= 0
    return _Bias(allowed, None if mask is None else mask.to(q.dtype), empty_rows)


def _window(rows: int, columns: int, past: int, left: int, right: int) -> Tensor:
    ahead = torch.arange(columns) - torch.arange(rows)[:, None] - past
    return _within(ahead, left, right)


def _within(ahead: Tensor, left: int, right: int) -> Tensor:
    """Marks keys that are neither too far behind their query nor too far ahead; -1 sets no bound."""
    if left < 0:
        return ahead <= right
    return ahead >= -left if right < 0 else (ahead >= -left) & (ahead <= right)


def _mask(c: Call, columns: int) -> Tensor | None:
    """The mask over all keys: what it does not reach is not seen."""
    mask = c.optional(3)
    if mask is None:
        return None
    missing = columns - mask.shape[-1]
    if missing > 0 and mask.shape[-1] == 1:
        c.refuse("with a mask of one key")  # the standard both repeats and extends it
    if missing > 0:
        mask = F.pad(mask, (0, missing), value=False if mask.dtype is torch.bool else -math.inf)
    # torch's operator reads a mask of rank 3 as batch, queries, keys; here it is heads, queries, keys.
    return mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)


@lowering("FlexAttention", domain="ai.onnx.preview")
def flex_attention(c: Call) -> Result:
    """Attention without a mask. Nodes that carry graphs of their own are taken apart at import."""
    q, k, v = c[0], c[1], c[2]
    if q.dtype is _flex_precision(c):
        scale, grouped = _flex_scale(c), q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
    return _mixed(softmax_like_reference(flex_scores(c)), v)


def flex_scores(c: Call) -> Tensor:
    """The scores of a `FlexAttention`, from its queries and keys."""
    q, k = c[0], c[1]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    sqrt_scale = c.literal(lambda: torch.tensor(math.sqrt(_flex_scale(c)), dtype=q.dtype))
    return ((q * sqrt_scale) @ (k * sqrt_scale).transpose(-1, -2)).to(_flex_precision(c))


def flex_mix(c: Call) -> Tensor:
    """The result of a `FlexAttention`, from the shares of the keys and the values."""
    c.read.update(("scale", "softmax_precision"))
    return _mixed(c[0], c[1])


def _mixed(shares: Tensor, v: Tensor) -> Tensor:
    values = v.repeat_interleave(shares.shape[1] // v.shape[1], 1)
    return (shares @ values.to(shares.dtype)).to(v.dtype)


def _flex_scale(c: Call) -> float:
    return c.float_("scale", 1.0 / math.sqrt(c[0].shape[-1]))


def _flex_precision(c: Call) -> torch.dtype:
    number = c.int_("softmax_precision", 11 if c[0].dtype is torch.float64 else 1)
    if number not in _PRECISIONS:
        c.refuse(f"with softmax_precision={number}")
    return _PRECISIONS[number]


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
    if c.flag("interleaved"):
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    y = torch.cat([y, rest], -1) if rest.shape[-1] else y
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1) if flat else y
