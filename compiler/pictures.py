"""Shared by all pictures: style, kinds of file, and that the same data give the same file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir import UsageError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STYLE", "check_picture", "rendered"]

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "irc",  # the same data give the same file
}
"""Settings of matplotlib that hold while a picture is made and rendered."""

_SUFFIXES = (".svg", ".png", ".pdf")


def check_picture(path: Path, option: str) -> None:
    """Refuses a file of a kind that is not drawn, and any file where nothing can draw.

    Args:
        path: Where the picture shall go.
        option: What the user gave it with, as `--plot`.

    Raises:
        UsageError: IRC400 for another suffix, IRC448 without the extra `plot`.
    """
    if path.suffix not in _SUFFIXES:
        raise UsageError(
            "IRC400",
            f"{option} {path} is of no known kind",
            help=f"give a file ending in {', '.join(_SUFFIXES)}",
        )
    require("plot", f"a picture, as {option} asks for,")


def rendered(figure: Figure, kind: str) -> bytes:
    """A picture as a file's content.

    Args:
        figure: What was drawn, with the settings of `STYLE` still in force.
        kind: `svg`, `png` or `pdf`.
    """
    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()
