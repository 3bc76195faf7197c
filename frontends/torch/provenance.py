"""Records, while a module is traced, which submodule, ONNX node and source line each operation came from."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Generator
from pathlib import Path
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

__all__ = ["location_of", "raised_at", "recording"]

_KEY = "irc.location"
_FRONTENDS = Path(__file__).parents[1]
_LIBRARIES = tuple(
    f"{spelled}{os.sep}"
    for root in (Path(torch.__file__).parent, _FRONTENDS)
    for spelled in (root, root.resolve())
)
_CAPTURE = str(Path(__file__).with_name("capture.py"))


class _Annotate(TorchFunctionMode):
    """Hands the current location to the tracer before each torch function runs."""

    def __init__(self, root: nn.Module, path: list[str]) -> None:
        super().__init__()
        self.root = root
        self.path = path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = Location(
            module=self.path[-1] if self.path and self.path[-1] else None,
            onnx_node=getattr(self.root, "current_node", None),
            source=_user_line(inspect.currentframe()),
        )
        with fx_traceback.annotate({_KEY: where}):
            return func(*args, **(kwargs or {}))


def _user_line(frame: FrameType | None) -> str | None:
    """The innermost line of the model's own code; None when only library code stands above the capture."""
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        if not _is_library(frame):
            return _line(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))


def _line(frame: FrameType, number: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{number} in {frame.f_code.co_name}"


def raised_at(error: BaseException) -> Location | None:
    """The innermost line of the model's own code that `error` passed through, below the capture."""
    frames = list(traceback.walk_tb(error.__traceback__))
    captures = [k for k, (frame, _) in enumerate(frames) if frame.f_code.co_filename == _CAPTURE]
    below = frames[captures[-1] + 1 :] if captures else frames
    lines = [_line(frame, number) for frame, number in below if not _is_library(frame)]
    return Location(source=lines[-1]) if lines else None


@contextlib.contextmanager
def recording(root: nn.Module) -> Generator[None]:
    """While active, operations traced through `root` carry their location."""
    names = {id(module): name for name, module in root.named_modules()}
    path: list[str] = []

    def enter(module: nn.Module, args: object) -> None:
        path.append(names.get(id(module), path[-1] if path else ""))

    def leave(module: nn.Module, args: object, output: object) -> None:
        if path:
            path.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with fx_traceback.preserve_node_meta(), _Annotate(root, path):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def location_of(node: torch.fx.Node) -> Location | None:
    """The location recorded for a traced node; a backward node has its forward operation's."""
    return (node.meta.get("custom") or {}).get(_KEY)
