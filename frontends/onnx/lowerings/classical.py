"""Operators of classical models (domain ai.onnx.ml) that compute with floats.

Their weights are attributes, so they are constants here, and gradients pass to the operand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .table import Call, Result, lowering

_DOMAIN = "ai.onnx.ml"


def _floats(c: Call, name: str, like: Tensor) -> Tensor | None:
    values = c.attribute(name)
    if not values:
        return None
    assert isinstance(values, tuple)
    return c.literal(lambda: torch.tensor([float(v) for v in values], dtype=like.dtype))


def _float(c: Call) -> Tensor:
    return c[0] if c[0].is_floating_point() else c[0].float()


@lowering("Binarizer", domain=_DOMAIN)
def binarizer(c: Call) -> Result:
    """One above the threshold, else zero."""
    return (c[0] > c.float_("threshold", 0.0)).to(c[0].dtype)


@lowering("ArrayFeatureExtractor", domain=_DOMAIN)
def array_feature_extractor(c: Call) -> Result:
    """Elements of the last axis; a vector counts as one row."""
    x, places = c[0], c[1].long().reshape(-1)
    rows = x.unsqueeze(0) if x.ndim == 1 else x
    return rows.index_select(-1, places)


@lowering("Scaler", domain=_DOMAIN)
def scaler(c: Call) -> Result:
    """`(x - offset) * scale`."""
    x = _float(c)
    offset, scale = _floats(c, "offset", x), _floats(c, "scale", x)
    x = x if offset is None else x - offset
    return x if scale is None else x * scale


_NORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "MAX": lambda x, axis: x.abs().amax(axis, keepdim=True),
    "L1": lambda x, axis: x.abs().sum(axis, keepdim=True),
    "L2": lambda x, axis: torch.linalg.vector_norm(x, 2, axis, keepdim=True),
}


@lowering("Normalizer", domain=_DOMAIN)
def normalizer(c: Call) -> Result:
    """Each row over its norm."""
    x, norm = _float(c), c.str_("norm", "MAX")
    if norm not in _NORMS or x.ndim != 2:
        c.refuse(f"with norm={norm} on {x.ndim} axes")
    return x / _NORMS[norm](x, 1).clamp(min=1e-30)


def _scores(c: Call, x: Tensor) -> Tensor:
    weight, bias = _floats(c, "coefficients", x), _floats(c, "intercepts", x)
    if weight is None or x.ndim != 2:
        c.refuse(f"without coefficients or on {x.ndim} axes")
    y = x @ weight.reshape(-1, x.shape[1]).t()
    return y if bias is None else y + bias


_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "NONE": lambda y: y,
    "LOGISTIC": torch.sigmoid,
    "SOFTMAX": lambda y: torch.softmax(y, 1),
}


def _transform(c: Call) -> Callable[[Tensor], Tensor]:
    name = c.str_("post_transform", "NONE")
    if name not in _TRANSFORMS:
        c.refuse(f"with post_transform={name}")
    return _TRANSFORMS[name]


@lowering("LinearRegressor", domain=_DOMAIN)
def linear_regressor(c: Call) -> Result:
    """A linear map, and a function of its scores."""
    c.int_("targets", 1)  # the coefficients say as much
    return _transform(c)(_scores(c, _float(c)))


@lowering("LinearClassifier", domain=_DOMAIN)
def linear_classifier(c: Call) -> Result:
    """The class of the highest score and the scores, of three classes or more with whole labels."""
    labels = c.ints_("classlabels_ints")
    c.int_("multi_class", 0)
    y = _transform(c)(_scores(c, _float(c)))
    if labels is None or len(labels) < 3 or len(labels) != y.shape[1]:
        c.refuse("with labels that are not whole numbers, or with less than three classes")
    named = c.literal(lambda: torch.tensor(labels, dtype=torch.int64))
    return named[y.argmax(1)], y
