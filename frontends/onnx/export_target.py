"""The place of a new ONNX file, which is looked at before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

from ...ir.errors import UsageError

__all__ = ["check_export_target"]


def check_export_target(target: str | os.PathLike[str], source: str | os.PathLike[str] = "") -> None:
    """Refuses an ONNX file that cannot be written, before any work is done.

    Args:
        target: The new file.
        source: The original, which must be another file.

    Raises:
        UsageError: IRC320.
    """
    goal = Path(target)
    if goal.is_dir() or goal.suffix != ".onnx":
        raise UsageError("IRC320", f"{goal} is not the name of an ONNX file", help="write -o tuned.onnx")
    if not goal.absolute().parent.is_dir():
        raise UsageError("IRC320", f"there is no folder {goal.parent}", help="make it, or choose another")
    if source and goal.exists() and Path(source).exists() and goal.samefile(source):
        raise UsageError(
            "IRC320",
            f"{goal} is the original itself",
            help="choose another file: its weights are read from it",
        )
