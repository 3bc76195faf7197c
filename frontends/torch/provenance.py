"""Records, while a module is traced, which submodule, ONNX node and source line each operation came from.

Beside it stand the scopes of the annotations that the operation ran in (see `scopes`).
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import threading
import traceback
from collections.abc import Generator
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from ...ir import Location
from .annotation_scopes import Scope, Scopes
from .cast_caches import LEAF_KEY, CastCache, CastCaches
from .source_lines import described, is_capture, is_library, user_line

__all__ = [
    "cast_cache_of",
    "has_gradients",
    "is_converted_by_code",
    "is_leaf_in_eager",
    "location_of",
    "raised_at",
    "raised_code",
    "recording",
    "scopes_of",
]

_KEY = "irc.location"
_SCOPES_KEY = "irc.scopes"
_CONVERTS_KEY = "irc.converts"
_CASTS_KEY = "irc.casts"
_GRADIENTS_KEY = "irc.gradients"
_CONVERSIONS = frozenset(
    {
        torch.Tensor.to,
        torch.Tensor.type,
        torch.Tensor.type_as,
        torch.Tensor.bfloat16,
        torch.Tensor.half,
    }
)

_ASKED = ("device", "dtype", "is_leaf", "is_quantized", "is_sparse", "layout", "requires_grad", "shape")
_QUESTIONS = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _ASKED),
        torch.Tensor.storage_offset,
        torch.Tensor.stride,
        torch.Tensor.untyped_storage,
    }
)
"""Functions that ask about a tensor and compute nothing: most of the calls while a module is traced."""


class _Annotate(TorchFunctionMode):
    """Hands the current location to the tracer before each torch function that may compute something."""

    def __init__(self, root: nn.Module, path: list[str], scopes: Scopes, casts: CastCaches) -> None:
        super().__init__()
        self.root = root
        self.path = path
        self.scopes = scopes
        self.casts = casts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS:
            return func(*args, **(kwargs or {}))
        held = vars(self.root)  # each call asks, and a module looks in many places for what it lacks
        where = held.get("current_location") or Location(
            module=self.path[-1] if self.path and self.path[-1] else None,
            onnx_node=held.get("current_node"),
            source=user_line(inspect.currentframe()),
        )
        notes = {
            _KEY: where,
            _SCOPES_KEY: self.scopes.around(where.onnx_node),
            _CONVERTS_KEY: func in _CONVERSIONS,
            _CASTS_KEY: self.casts.current(),
            _GRADIENTS_KEY: torch.is_grad_enabled(),
        }
        with fx_traceback.annotate(notes):
            return func(*args, **(kwargs or {}))


def raised_at(error: BaseException) -> Location | None:
    """The innermost line of the model's own code that `error` passed through, below the capture."""
    found = _innermost(error)
    return Location(source=described(*found)) if found else None


def raised_code(error: BaseException) -> str | None:
    """The text of that line."""
    found = _innermost(error)
    return linecache.getline(found[0].f_code.co_filename, found[1]).strip() or None if found else None


def _innermost(error: BaseException) -> tuple[FrameType, int] | None:
    frames = list(traceback.walk_tb(error.__traceback__))
    captures = [k for k, (frame, _) in enumerate(frames) if is_capture(frame)]
    below = frames[captures[-1] + 1 :] if captures else frames
    return next(((frame, line) for frame, line in reversed(below) if not is_library(frame)), None)


@contextlib.contextmanager
def recording(root: nn.Module) -> Generator[Scopes]:
    """While active, operations traced through `root` in this thread carry their location and their scopes."""
    names = {id(module): name for name, module in root.named_modules()}
    path: list[str] = []
    scopes = Scopes(root)
    thread = threading.get_ident()  # modules run in other threads meanwhile

    def enter(module: nn.Module, args: object) -> None:
        if threading.get_ident() == thread:
            path.append(names.get(id(module), path[-1] if path else ""))
            scopes.enter(module, names.get(id(module)))

    def leave(module: nn.Module, args: object, output: object) -> None:
        if path and threading.get_ident() == thread:
            path.pop()
            scopes.leave()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    casts = CastCaches()
    annotate = _Annotate(root, path, scopes, casts)
    try:
        with fx_traceback.preserve_node_meta(), scopes.recording(), casts.counting(), annotate:
            yield scopes
    finally:
        for hook in hooks:
            hook.remove()


def location_of(node: torch.fx.Node) -> Location | None:
    """The location recorded for a traced node; a backward node has its forward operation's."""
    return (node.meta.get("custom") or {}).get(_KEY)


def is_converted_by_code(node: torch.fx.Node) -> bool:
    """Whether the model's code asks for the element type of what a traced node makes, as `Tensor.to` does."""
    return bool((node.meta.get("custom") or {}).get(_CONVERTS_KEY))


def cast_cache_of(node: torch.fx.Node) -> CastCache | None:
    """Returns the cache of autocast for what a node casts; a backward node has its forward operation's."""
    return (node.meta.get("custom") or {}).get(_CASTS_KEY)


def has_gradients(node: torch.fx.Node) -> bool:
    """Whether a node was traced where autograd records: others have the number of what it recorded last."""
    return (node.meta.get("custom") or {}).get(_GRADIENTS_KEY, True)


def is_leaf_in_eager(node: torch.fx.Node) -> bool:
    """Whether a node is an input of the graph, or was traced `as_leaves`."""
    return node.op == "placeholder" or (node.meta.get("custom") or {}).get(LEAF_KEY, False)


def scopes_of(node: torch.fx.Node) -> tuple[Scope, ...]:
    """The scopes recorded for a traced node, outermost first."""
    return (node.meta.get("custom") or {}).get(_SCOPES_KEY, ())
