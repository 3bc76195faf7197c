"""Finds the line of the model's own code that is running."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from types import FrameType

import torch

__all__ = ["described", "is_capture", "is_library", "user_line"]

_ROOMS = (path for path in Path(__file__).parents[2].iterdir() if path.is_dir())
_ROOTS = (Path(torch.__file__).parent, *_ROOMS)
_LIBRARIES = (
    *(f"{spelled}{os.sep}" for root in _ROOTS for spelled in (root, root.resolve())),
    contextlib.__file__,
)
_CAPTURE = str(Path(__file__).with_name("capture.py"))


def user_line(frame: FrameType | None) -> str | None:
    """The innermost line of the model's own code; None when only library code stands above the capture."""
    while frame is not None and not is_capture(frame):
        if not is_library(frame):
            return described(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def is_capture(frame: FrameType) -> bool:
    """Whether the capture itself runs here: what calls it is not the model."""
    return frame.f_code.co_filename == _CAPTURE


def is_library(frame: FrameType) -> bool:
    """Whether code of torch or of irc runs here."""
    return _is_library_file(frame.f_code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_library_file(name: str) -> bool:
    return name.startswith((*_LIBRARIES, "<"))


def described(frame: FrameType, number: int) -> str:
    """A line as users know it: `model.py:12 in forward`."""
    return f"{Path(frame.f_code.co_filename).name}:{number} in {frame.f_code.co_name}"
