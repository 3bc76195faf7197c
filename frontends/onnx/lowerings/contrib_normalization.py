"""Normalisations that onnxruntime's optimiser makes, some with the sum before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .normalization import layer_normalization
from .table import Call, Result, lowering

_DOMAIN = "com.microsoft"

# Its optimiser writes this operator into the default domain, of models older than version 17 too.
lowering("LayerNormalization")(layer_normalization)


def _embedded(c: Call, ids: Tensor, table: int) -> Tensor:
    return F.embedding(ids.long(), c[table])


@lowering("SimplifiedLayerNormalization")
def simplified_layer_normalization(c: Call) -> Result:
    """Over the trailing axes, without the mean; onnxruntime's, though in the default domain."""
    x, scale, axis = c[0], c[1], c.int_("axis", -1) % c[0].ndim
    if c.wants(1):
        c.refuse("with its deviation as an output")
    return F.rms_norm(x, x.shape[axis:], None, c.float_("epsilon", 1e-5)).to(scale.dtype) * scale


def _no_statistics(c: Call) -> None:
    if c.wants(1) or c.wants(2):
        c.refuse("with its statistics as outputs")


@lowering("SkipLayerNormalization", domain=_DOMAIN)
def skip_layer_normalization(c: Call) -> Result:
    """Normalizes a sum over the features; the sum is an output too."""
    _no_statistics(c)
    total = c[0] + c[1] + c[4] if c.has(4) else c[0] + c[1]
    y = F.layer_norm(total, total.shape[-1:], c[2], c.optional(3), c.float_("epsilon", 1e-12))
    return y, None, None, total


@lowering("SkipSimplifiedLayerNormalization", domain=_DOMAIN)
def skip_simplified_layer_normalization(c: Call) -> Result:
    """Normalizes a sum over the features without subtracting the mean."""
    _no_statistics(c)
    total = c[0] + c[1] + c[3] if c.has(3) else c[0] + c[1]
    return F.rms_norm(total, total.shape[-1:], c[2], c.float_("epsilon", 1e-12)), None, None, total


@lowering("EmbedLayerNormalization", domain=_DOMAIN)
def embed_layer_normalization(c: Call) -> Result:
    """Words, positions and segments are looked up, added and normalised; the mask is counted."""
    ids = c[0]
    total = _embedded(c, ids, 2)
    total = total + (_embedded(c, c[8], 3) if c.has(8) else c[3].narrow(0, 0, ids.shape[1]))
    total = total + _embedded(c, c[1], 4) if c.has(1) and c.has(4) else total
    c.int_("mask_index_type", 0)
    y = F.layer_norm(total, total.shape[-1:], c[5], c[6], c.float_("epsilon", 1e-12))
    if c.has(7):
        lengths = c[7].sum(1).to(torch.int32)
    else:
        lengths = torch.zeros(ids.shape[0], dtype=torch.int32, device=ids.device)
    return y, lengths, total
