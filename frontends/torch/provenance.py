"""Records, while a module is traced, which submodule, ONNX node and source line each operation came from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
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

__all__ = ["location_of", "recording"]

_KEY = "irc.location"
_LIBRARIES = tuple(str(Path(root).resolve()) for root in (Path(torch.__file__).parent, Path(__file__).parents[2]))


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
            source=_user_line(sys._getframe(1)),
        )
        with fx_traceback.annotate({_KEY: where}):
            return func(*args, **(kwargs or {}))


def _user_line(frame: FrameType | None) -> str | None:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")) and "/torch/" not in name:
            return f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


@contextlib.contextmanager
def recording(root: nn.Module) -> Iterator[None]:
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
