"""Exports, compares, and writes the page."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..command import parser_of, run_command, run_rows, write_page
from ..pages import to_markdown
from .exporting import WAYS, ExportFailed, Way, export
from .round_trip import Original, Row, round_trip
from .subjects import SUBJECTS

__all__ = ["main", "rows"]

_SECTION = "round trips"
_HEADER = (
    *("model", "export", "opset", "parameters", "under their names", "ties", "statistics", "state keys"),
    *("outputs", "gradients", "result"),
)


def rows(only: str = "", is_tiny: bool = False, ways: Sequence[Way] = WAYS) -> Iterator[Row]:
    """The row of each file.

    Args:
        only: Text that `model export` must contain.
        is_tiny: Whether the models are tiny.
        ways: How to export.
    """
    for model, make in SUBJECTS.items():
        chosen = [way for way in ways if only in f"{model} {way.name}"]
        if not chosen:
            continue
        original = Original(make(is_tiny))
        for way in chosen:
            row = Row(model, way.name, original=original.count)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                try:
                    export(original.subject, way, path)
                except ExportFailed as failure:
                    yield Row(model, way.name, original=original.count, export_failure=str(failure))
                else:
                    yield round_trip(original, path, row)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status: 1 where something does not hold."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "onnx_exporters",
        "Holds what comes back from torch's ONNX exporters to the original.",
        threads=1,
        markdown=None,
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose 'model export' contains this")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same kinds")
    return parser


def _run(options: argparse.Namespace) -> int:
    def page(found: Sequence[Row]) -> str:
        unwritten = sum(row.export_failure is not None for row in found)
        told = f"{len(found)} exports, {unwritten} that torch did not write"
        table = to_markdown(_HEADER, [row.cells() for row in found])
        return f"{table}\n\ntorch {torch.__version__}: {told}."

    _, text, status = run_rows(rows(options.only, options.tiny), page)
    write_page(options.markdown, text, _SECTION)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
