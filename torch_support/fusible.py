"""Tells which operations Inductor makes one kernel of, with those that read and make what they do."""

# Schemas of operations have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .draws import DROPOUT_BACKWARD, DROPOUT_PRODUCT

__all__ = ["DIVISIONS", "is_cheap", "is_fusible", "is_multipass"]

DIVISIONS = frozenset(
    f"aten.{name}"
    for name in (
        *("div.Tensor_mode", "div.Scalar_mode", "floor_divide.default", "floor_divide.Scalar"),
        *("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor", "fmod.Tensor", "fmod.Scalar"),
    )
)
"""Operations of which a kernel ends the process where whole numbers are divided by zero."""


_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "permute.default", "transpose.int", "t.default"),
        *("expand.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims", "slice.Tensor"),
        *(
            "select.int",
            "split.Tensor",
            "split_with_sizes.default",
            "unbind.int",
            "unsafe_split.Tensor",
            "detach.default",
        ),
        "alias.default",
    )
)
_MADE = frozenset(
    f"aten.{name}.default"
    for name in (
        "full",
        "full_like",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "new_zeros",
        "scalar_tensor",
        "arange",
    )
)
"""Operations that make numbers of none."""
_MOVED = frozenset(
    f"aten.{name}"
    for name in (
        *("cat.default", "stack.default", "clone.default", "_to_copy.default", "copy.default"),
        *("constant_pad_nd.default", "slice_backward.default", "select_backward.default", "repeat.default"),
    )
)
_OWN = frozenset((DROPOUT_PRODUCT, DROPOUT_BACKWARD))
_REDUCTIONS = frozenset(
    f"aten.{name}"
    for name in (
        *("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "amax.default", "amin.default"),
        *("var_mean.correction", "var.correction", "_softmax.default", "_softmax_backward_data.default"),
        *("_log_softmax.default", "_log_softmax_backward_data.default", "logsumexp.default"),
        *("native_layer_norm.default", "native_layer_norm_backward.default"),
        *("native_group_norm.default", "native_group_norm_backward.default"),
        *("_native_batch_norm_legit_functional.default", "native_batch_norm_backward.default"),
        *("nll_loss_forward.default", "nll_loss_backward.default"),
        *("nll_loss2d_forward.default", "nll_loss2d_backward.default"),
    )
)


def is_multipass(op: str) -> bool:
    """Whether an operation goes over its data several times if it runs by itself."""
    return op in _OWN


@lru_cache(maxsize=4096)
def is_cheap(op: str) -> bool:
    """Whether a kernel that reads the result of an operation may make it instead, for next to nothing."""
    return op in _VIEWS | _MADE | _MOVED | _OWN or _is_pointwise(op)


@lru_cache(maxsize=4096)
def is_fusible(op: str) -> bool:
    """Whether an operation can be part of a kernel."""
    return op in _REDUCTIONS or is_cheap(op)


def _is_pointwise(op: str) -> bool:
    """Whether an operation makes each element of those at its place, and draws none."""
    if op in ("prims.convert_element_type.default", "prims.iota.default"):
        return True
    space, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, name, None) if space == "aten" and name.isidentifier() else None
    found: Any = getattr(packet, overload, None) if overload.isidentifier() else None
    if not isinstance(found, torch._ops.OpOverload):
        return False
    is_random = torch.Tag.nondeterministic_seeded in found.tags
    return torch.Tag.pointwise in found.tags and not is_random and not found._schema.is_mutable
