"""Exports, compares, times, and writes the page."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from irc.compiler.written_files import to_markdown

from ..command import parser_of, run_command, write_page
from ..onnx_rows import light_folder
from .exporting import WAYS, ExportFailed, Way, export
from .import_time import Timing, import_times
from .round_trip import Original, Row, round_trip
from .subjects import SUBJECTS

__all__ = ["main", "rows"]

_HEADER = (
    *("model", "export", "opset", "parameters", "under their names", "ties", "statistics", "state keys"),
    *("outputs", "gradients", "result"),
)
_TIMED = (Way("kept", 18), Way("dynamo", 18), Way("legacy", 13), Way("legacy", 17), Way("legacy", None))
_TIMES_HEADER = (
    "file",
    "irc s",
    "spread",
    "onnx2torch s",
    "spread",
    "ratio",
    "irc trains",
    "onnx2torch trains",
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


def _cells(row: Row) -> tuple[str, ...]:
    if row.export_failure is not None:
        return (row.model, row.way.split()[0], *["-"] * 8, f"torch: {row.export_failure}")
    tensors, numbers = row.parameters
    return (
        row.model,
        row.way.split()[0],
        str(row.opset),
        f"{tensors} ({numbers:,})",
        f"{row.named} of {row.original[0]}",
        f"{row.ties[0]} of {row.ties[1]}" if row.ties[1] else "-",
        str(row.statistics) if row.statistics else "-",
        f"{row.keys[0]} of {row.keys[2]}",
        f"{row.outputs:.1e}",
        f"{row.gradients:.1e}"
        + ("" if row.compared == 1 else f" ({math.floor(1000 * row.compared) / 10:g}%)"),
        f"FAIL: {'; '.join(row.failures)}" if row.failures else _result(row),
    )


def _result(row: Row) -> str:
    """What the file has of the original; irc has that."""
    if row.parameters == row.original and row.named == row.original[0]:
        return "same"
    parts = [f"file has {row.parameters[0]} of {row.original[0]}"]
    if row.moved:
        parts.append(f"{row.moved} transposed, packed or copied")
    if row.folded:
        parts.append(f"{row.folded} computed with" + (f", into {row.made}" if row.made else ""))
    if row.ties[0] < row.ties[1]:
        parts.append(f"{row.ties[1] - row.ties[0]} tied written twice")
    return ": ".join((parts[0], "; ".join(parts[1:]))) if parts[1:] else parts[0]


def _time_cells(timing: Timing) -> tuple[str, ...]:
    if timing.failure is not None:
        return (timing.file, f"FAIL: {timing.failure}", *["-"] * 6)
    own = (f"{statistics.median(timing.own):.2f}", _spread(timing.own))
    if timing.refusal is not None:
        return (
            timing.file,
            *own,
            f"refused: {timing.refusal[:70]}",
            "-",
            "-",
            f"{timing.own_trained:,}",
            "-",
        )
    ratio = timing.ratio
    assert ratio is not None
    peer = (f"{statistics.median(timing.peer):.2f}", _spread(timing.peer), f"{ratio:.2f}")
    return (timing.file, *own, *peer, f"{timing.own_trained:,}", f"{timing.peer_trained:,}")


def _spread(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.2f} to {max(seconds):.2f}"


def _timed_files(only: str, is_tiny: bool, folder: Path, files: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for model, make in SUBJECTS.items():
        subject = make(is_tiny)
        for way in _TIMED:
            path = folder / f"{model}-{way.name.replace(' ', '-')}" / "model.onnx"
            if only in f"{model} {way.name}":
                path.parent.mkdir()
                try:
                    export(subject, way, path)
                except ExportFailed:
                    continue
                yield f"{model} {way.name}", path
    for path in (*sorted(light_folder().glob("*.onnx")), *files):
        if only in path.stem:
            yield path.stem, path.absolute()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status: 1 where something does not hold."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "onnx_exporters",
        "Holds what comes back from torch's ONNX exporters to the original, and times imports.",
        threads=1,
        markdown=None,
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose 'model export' contains this")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--no-round-trips", action="store_true", help="measure times only")
    parser.add_argument(
        "--peer", type=Path, metavar="PYTHON", help="of an environment with onnx2torch: times"
    )
    parser.add_argument("--file", type=Path, action="append", default=[], help="more files to time")
    return parser


def _run(options: argparse.Namespace) -> int:
    is_broken = False
    if not options.no_round_trips:
        found: list[Row] = []
        for row in rows(options.only, options.tiny):
            found.append(row)
            print("  ".join(_cells(row)), file=sys.stderr, flush=True)
        is_broken |= any(row.failures for row in found)
        table = to_markdown(_HEADER, [_cells(row) for row in found])
        unwritten = sum(row.export_failure is not None for row in found)
        told = f"{len(found)} exports, {unwritten} that torch did not write"
        text = f"{table}\n\ntorch {torch.__version__}: {told}."
        _show(options.markdown, "round trips", text)
    if options.peer is not None:
        with tempfile.TemporaryDirectory() as folder:
            files = dict(_timed_files(options.only, options.tiny, Path(folder), options.file))
            timings, versions = import_times(files, options.peer) if files else ([], {})
        is_broken |= any(timing.failure for timing in timings)
        text = to_markdown(_TIMES_HEADER, [_time_cells(timing) for timing in timings])
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        ratios = [timing.ratio for timing in timings if timing.ratio is not None]
        if ratios:
            middle = f"{statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
            text += f"\n\nThe median ratio of {len(ratios)} files is {middle}."
        _show(options.markdown, "import times", f"{text}\n\n{told}.")
    return 1 if is_broken else 0


def _show(page: Path | None, section: str, text: str) -> None:
    print(f"{text}\n")
    write_page(page, text, section)


if __name__ == "__main__":
    raise SystemExit(main())
