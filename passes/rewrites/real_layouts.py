"""Tells where tensors lie otherwise in memory than a trace says."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ir import RUN_ONCE, Graph, Node, TensorType, Value
from ..costs.profiling import runner

__all__ = ["misread"]


def misread(graph: Graph) -> frozenset[str]:
    """Names the operations that read a tensor which is not laid out as it was traced.

    A trace gives other strides to dimensions of size one than a view has when it runs, and by these an
    operation, such as an interpolation, chooses the layout of its result. Operations take tensors as they
    come; a kernel reads memory by the strides that it was compiled for. Nothing is computed here: operations
    run on tensors without data.
    """
    real: dict[Value, tuple[int, ...]] = {}
    found: set[str] = set()
    for node in graph.nodes:
        is_reached = any(value in real for value in node.operands)
        if not is_reached and not (node.is_view and any(1 in value.type.shape for value in node.values)):
            continue
        if not node.is_view and any(_differs(value.type, real.get(value)) for value in node.operands):
            found.add(node.name)
        for value, made in zip(node.results, _without_data(node, real), strict=False):
            if value is not None and made.stride() != value.type.strides:
                real[value] = made.stride()
    return frozenset(found)


def _differs(type: TensorType, strides: tuple[int, ...] | None) -> bool:
    """Whether strides reach other elements than those of a type."""
    if strides is None:
        return False
    return any(a != b for a, b, size in zip(type.strides, strides, type.shape, strict=True) if size > 1)


def _without_data(node: Node, real: dict[Value, tuple[int, ...]]) -> list[Tensor]:
    """The results of an operation on tensors without data; none if it does not run on such."""
    given = [
        torch.empty_strided(
            value.type.shape,
            real.get(value, value.type.strides),
            dtype=getattr(torch, value.type.dtype.value),
            device="meta",
        )
        for value in node.operands
    ]
    if node.traits & RUN_ONCE or node.op.startswith("irc."):
        return []
    try:
        made = runner(node, given)()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return []
    return list(made) if isinstance(made, (tuple, list)) else [made]
