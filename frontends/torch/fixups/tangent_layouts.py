"""Traces backward with gradients of outputs that are laid out as the loss makes them."""

# AOTAutograd has no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, TangentAOTInput

from ....torch_support.this_thread import replaced_here

__all__ = ["is_expanded", "tangent_layouts"]


def is_expanded(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several elements of a tensor are one in memory."""
    return any(size > 1 and step == 0 for size, step in zip(shape, strides, strict=True))


def tangent_layouts(strides: Mapping[int, tuple[int, ...]]) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile, gradients of outputs are traced in these layouts, each in a storage of its own.

    torch's tracer gives them the layouts of the outputs, and their storages.

    Args:
        strides: By the place of the output; it may be filled until the forward has run.
    """
    before: Callable[..., Any] = graph_compile.aot_dispatch_autograd_graph

    def relaid(*args: Any, fw_metadata: Any, **kwargs: Any) -> Any:
        tangents = fw_metadata.traced_tangents
        for place, described in enumerate(fw_metadata.traced_tangents_descs):
            output = described.output if isinstance(described, TangentAOTInput) else None
            layout = strides.get(output.idx) if isinstance(output, PlainAOTOutput) else None
            if isinstance(tangents[place], Tensor):
                tangents[place] = _in_layout(tangents[place], layout)
        return before(*args, fw_metadata=fw_metadata, **kwargs)

    return replaced_here(graph_compile, "aot_dispatch_autograd_graph", relaid)


def _in_layout(tangent: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """A tensor without data in a layout; an expanded one is copied, and stays as it was traced.

    Outputs may lie in one storage, in parts of it, or in an input's, as views that custom functions return.
    """
    own = tuple(tangent.stride())
    strides = own if strides is None or is_expanded(tangent.shape, strides) else strides
    if is_expanded(tangent.shape, strides):
        return tangent
    return torch.empty_strided(tuple(tangent.shape), strides, dtype=tangent.dtype, device=tangent.device)
