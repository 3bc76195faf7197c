"""Lays results out as the CPU's kernels do, where torch's rules for tensors without data say otherwise."""

# The rules for tensors without data have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from .....torch_support.layouts import same_layout
from .....torch_support.pytree import tensors_of

__all__ = ["ASKED", "Laws", "kernel_layouts", "known_laws", "strides_by_law"]

Laws = Mapping[str, Sequence[str]]
"""By the name of an operation, the law of each of its results; "" where torch's rule holds."""

ASKED = "as on data"
"""The law of a result that no other explains: the operation runs on data of the same types to show it."""

_FOLDER = Path(__file__).parent


def strides_by_law(law: str, result: Tensor, operands: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The strides of a result, or None if the law says nothing about it.

    Args:
        law: `rows`; `like K`, the strides of operand K if its elements lie together; `format K`, rows or
            channels last as operand K is; `elementwise K ...`, as torch lays out what it computes from these
            operands element by element, in this order.
        result: Its shape counts.
        operands: The tensors among the operation's arguments.
    """
    kind, *rest = law.split()
    if law == ASKED:
        return None
    if kind == "rows":
        return torch.empty(result.shape, device="meta").stride()
    chosen = [operands[int(place)] for place in rest if int(place) < len(operands)]
    if len(chosen) < len(rest):
        return None
    if kind == "format":
        format = suggest_memory_format(chosen[0]) if chosen[0].dim() == result.dim() else None
        if format is None or (format, result.dim()) == (torch.channels_last, 5):
            return None
        return torch.empty(result.shape, device="meta", memory_format=format).stride()
    if kind == "like":
        if chosen[0].shape != result.shape:
            return None
        return torch.empty_like(chosen[0], device="meta").stride()
    try:
        return compute_elementwise_output_strides(*(tensor.expand(result.shape) for tensor in chosen))
    except RuntimeError:
        return None


@functools.cache
def known_laws() -> tuple[Laws, bool]:
    """The laws of this version of torch, and whether they were found with it; else of the version before."""
    tables = {_version(path.stem): path for path in _FOLDER.glob("*.json")}
    own = _version(torch.__version__)
    chosen = max((version for version in tables if version <= own), default=min(tables))
    return json.loads(tables[chosen].read_text()), chosen == own


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def kernel_layouts(laws: Laws | None = None) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile, results without data are laid out by laws.

    Args:
        laws: None takes those of this version of torch. Of another version's, those that are used are checked
            by running the operation on data.
    """
    chosen, is_own = known_laws() if laws is None else (laws, True)
    modes: Any = FakeTensorMode
    before: Callable[..., Any] = modes._dispatch_impl

    def dispatch(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        results = before(mode, func, types, args, kwargs)
        row = chosen.get(str(func))
        if row is None:
            return results
        operands = tensors_of((args, kwargs))
        with mode:
            layouts = _by_laws(row, operands, tensors_of(results))
        if (ASKED in row or not is_own) and all(map(_may_have_data, operands)):
            layouts = _on_data(func, args, kwargs) or layouts
        with mode:
            return _laid_out(results, layouts)

    return patch.object(modes, "_dispatch_impl", dispatch)


_Layouts = list[tuple[int, ...] | None]


def _by_laws(row: Sequence[str], operands: Sequence[Tensor], results: Sequence[Tensor]) -> _Layouts:
    """The strides of each result; None where they stay. Nothing is known but of the CPU's kernels."""
    return [
        strides_by_law(law, result, operands) if law and result.device.type == "cpu" else None
        for law, result in zip(row, results, strict=False)
    ]


def _may_have_data(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and all(type(size) is int for size in tensor.shape)


def _on_data(func: Any, args: Any, kwargs: Any) -> _Layouts | None:
    """The strides that the kernel gives its results; None if it does not run on zeros."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()

    with no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            results = func(*pytree.tree_map(real, args), **pytree.tree_map(real, kwargs))
        except (RuntimeError, TypeError, IndexError, ValueError):
            return None
        return [tuple(result.stride()) for result in tensors_of(results)]


def _laid_out(results: Any, layouts: _Layouts) -> Any:
    """The results, with others in place of those whose strides are not as wanted."""
    leaves, tree = pytree.tree_flatten(results)
    strides = iter(layouts)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            own = next(strides, None)
            if own is not None and not same_layout(leaf, own):
                leaves[place] = leaf.new_empty_strided(tuple(leaf.shape), own)
    return pytree.tree_unflatten(leaves, tree)
