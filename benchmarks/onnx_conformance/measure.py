"""Runs an importer against the suite; also as a command, in the environment of a peer."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .cases import GROUPS, load_cases
from .importers import Importer, find
from .results import Report, Result
from .running import run_cases, select

__all__ = ["line", "main", "measure", "today", "versions"]

_PACKAGES = ("onnx", "numpy", "torch", "torchvision")


def measure(
    importer: Importer,
    packages: Iterable[str],
    groups: Sequence[str] = GROUPS,
    pattern: str | None = None,
    limit: float = 30.0,
    tell: Callable[[Result], None] | None = None,
) -> Report:
    """What becomes of the cases.

    Args:
        importer: Runs them.
        packages: Whose versions are noted, where they are installed.
        groups: Of the suite.
        pattern: Regular expression that names must match.
        limit: Seconds for each case.
        tell: Is called with each result as it comes.
    """
    cases = select(load_cases(groups), pattern)
    started = time.monotonic()
    results: list[Result] = []
    for result in run_cases(importer, cases, limit):
        results.append(result)
        if tell is not None:
            tell(result)
    seconds = round(time.monotonic() - started, 1)
    return Report(importer.name, versions(packages), today(), limit, seconds, tuple(results))


def today() -> str:
    """The date, as `2026-01-31`."""
    return datetime.date.today().isoformat()


def versions(packages: Iterable[str]) -> Mapping[str, str]:
    """The versions of Python and of those packages that are installed here."""
    found = {"python": platform.python_version()}
    for package in dict.fromkeys((*packages, *_PACKAGES)):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def line(result: Result) -> str:
    """A result on one line."""
    why = f"  {result.why}" if result.why else ""
    return f"{result.outcome.value:<11} {result.group:<17} {result.name}{why}"


def main() -> int:
    """Runs one importer and writes its report; the exit status is 0 unless it cannot be run at all."""
    parser = argparse.ArgumentParser(description="Runs one importer against the ONNX backend suite.")
    parser.add_argument("importer", help="the name of a peer, or package.module:function")
    parser.add_argument("--out", type=Path, required=True, help="the report goes here, as JSON")
    parser.add_argument("--group", action="append", choices=GROUPS, help="may be repeated; all groups")
    parser.add_argument("-k", dest="pattern", help="only cases whose names match")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each case")
    parser.add_argument("-v", action="store_true", help="print each case")
    options = parser.parse_args()

    def tell(result: Result) -> None:
        if options.v:
            print(line(result), flush=True)

    report = measure(
        find(options.importer),
        [options.importer],
        options.group or GROUPS,
        options.pattern,
        options.limit,
        tell,
    )
    options.out.write_text(json.dumps(report.to_json()))
    return 0
