"""Reports on disk: a table as JSON and CSV, with pictures of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

from ..ir import UsageError, require
from ..ir.files import write_whole

__all__ = ["UNWRITABLE", "Report", "draw", "files_of", "make_folder", "save"]

UNWRITABLE = "IRC442"
"""The code of the refusal of a place that cannot be written."""

_PICTURES = ("svg", "png")


class Report(Protocol):
    """The written forms of something that was found."""

    def to_json(self) -> dict[str, Any]:
        """The whole of it as JSON-ready data."""
        ...

    def to_csv(self) -> str:
        """Its rows as comma-separated values with a header."""
        ...

    def picture(self, kind: str) -> bytes:
        """Its picture as the content of a file of this kind: `svg` or `png`."""
        ...


def files_of(stem: str) -> tuple[str, ...]:
    """The names of the files that `save` writes."""
    return tuple(f"{stem}.{kind}" for kind in ("json", "csv", *_PICTURES))


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws a report into an `.svg` or `.png` file.

    Raises:
        UsageError: IRC442 when the file cannot be written, IRC445 for another suffix, IRC448 without the
            extra `plot`.
    """
    target = Path(path)
    kind = target.suffix.removeprefix(".")
    if kind not in _PICTURES:
        raise UsageError(
            "IRC445", f"{target} is neither an .svg nor a .png file", help="choose one of the two"
        )
    require("plot", f"drawing {target.name}")
    write_whole(target, report.picture(kind), UNWRITABLE)


def save(report: Report, folder: str | os.PathLike[str], stem: str) -> None:
    """Writes a report as `<stem>.json`, `.csv`, `.svg` and `.png`, each as a whole or not at all.

    Args:
        report: The report.
        folder: Where to; it is made if need be, and earlier files are replaced.
        stem: The name of the files.

    Raises:
        UsageError: IRC442 when it cannot be written, IRC448 without the extra `plot`.
    """
    require("plot", f"drawing {stem}.svg")
    target = make_folder(folder)
    write_whole(target / f"{stem}.json", json.dumps(report.to_json(), indent=1) + "\n", UNWRITABLE)
    write_whole(target / f"{stem}.csv", report.to_csv(), UNWRITABLE)
    for kind in _PICTURES:
        draw(report, target / f"{stem}.{kind}")


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes a folder if need be.

    Raises:
        UsageError: IRC442 when it cannot be made.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            UNWRITABLE, f"{target} cannot be written: {error}", help="choose another folder"
        ) from error
    return target
