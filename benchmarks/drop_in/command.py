"""Runs the matrix of checks, plans and models, and writes what it found."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from irc.compiler.written_files import check_folder, write_whole
from irc.ir import UsageError

from ..commands import exit_status

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 where a check fails, 2 where the command is wrong."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler would write to the terminal
    given = sys.argv[1:] if argv is None else list(argv)
    logger = logging.getLogger("irc")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the checks plan anew and keep graphs all the time
    try:
        return exit_status(_parser(), partial(_run, given=given), given)
    finally:
        logger.setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drop_in",
        description="Compares fitted modules with their originals in every way that a script relies on.",
        epilog="exit status: 0 no check failed; 1 a check failed; 2 the command is wrong",
    )
    parser.add_argument("--rows", metavar="1,5", help="these rows alone")
    parser.add_argument("--plans", metavar="A,B", help="these plans alone: keep-all, 60%%, min")
    parser.add_argument("--models", metavar="A,B", help="these models alone; own is the checks' own ones")
    parser.add_argument("--checks", metavar="TEXT", help="the checks alone whose names contain this")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many processes share the checks")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome")
    parser.add_argument("--refusals", type=Path, metavar="FILE", help="write the page of refusals and stop")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    return parser


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    for path in filter(None, (options.markdown, options.json, options.refusals)):
        check_folder(path)
    if options.refusals is not None:
        from .refusals import page

        write_whole(options.refusals, page())
        return 0
    from .models import MODELS
    from .plans import PLANS
    from .registry import CHECKS, OWN, ROWS, selected
    from .running import run_lines
    from .table import Line, count, lines_of_text, summary, to_json, to_page

    if options.list:
        for check in sorted(CHECKS.values(), key=lambda check: check.row):
            print(f"{check.row:>2}  {check.name:<52} {check.promise}")
        return 0
    rows = _numbers(options.rows, ROWS)
    plans = _names(options.plans, PLANS, "plan")
    models = _names(options.models, (*MODELS, OWN), "model")
    chosen = [
        (check, model) for check, model in selected(rows, models) if (options.checks or "") in check.name
    ]
    if options.jobs < 1:
        raise UsageError("IRC400", f"--jobs is {options.jobs}; at least one process runs the checks")
    if not chosen:
        raise UsageError("IRC400", "no check fits these options", help="see --list for the names")
    started = time.monotonic()
    lines: list[Line] = []
    for line in run_lines(chosen, plans, options.jobs):
        lines.append(line)
        print("\n".join(lines_of_text(line)), flush=True)
    print(f"\n{summary(lines)}\n")
    found = count(lines)
    total = ", ".join(f"{number} {verdict.value}" for verdict, number in found.items())
    print(f"{total}, in {time.monotonic() - started:.0f} s")
    if options.markdown is not None:
        command = shlex.join(["python", "-m", "benchmarks.drop_in", *given])
        write_whole(options.markdown, to_page(lines, command))
    if options.json is not None:
        write_whole(options.json, json.dumps(to_json(lines), indent=1) + "\n")
    return 1 if any(verdict.value == "FAIL" for verdict in found) else 0


def _names(text: str | None, known: Iterable[str], what: str) -> list[str]:
    names = list(known)
    if text is None:
        return names
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in names:
            raise UsageError(
                "IRC400", f"there is no {what} {name!r}", help=f"choose some of {', '.join(names)}"
            )
    return asked


def _numbers(text: str | None, known: Iterable[int]) -> list[int]:
    return [int(name) for name in _names(text, map(str, known), "row")]
