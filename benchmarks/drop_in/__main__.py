"""Runs the matrix of checks, plans and models, and writes what it found."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from irc.ir import UsageError
from irc.ir.files import write_whole

from ..command import chosen as names_in
from ..command import parser_of, run_command, write_json

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 where a check fails, 2 where the command is wrong."""
    logger = logging.getLogger("irc")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the checks plan anew and keep graphs all the time
    try:
        return run_command(_parser(), _run, argv)
    finally:
        logger.setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "drop_in",
        "Compares fitted modules with their originals in every way that a script relies on.",
        json=None,
        markdown=None,
    )
    parser.epilog = "exit status: 0 no check failed; 1 a check failed; 2 the command is wrong"
    parser.add_argument("--rows", metavar="1,5", help="these rows alone")
    parser.add_argument("--plans", metavar="A,B", help="these plans alone: keep-all, 60%%, min")
    parser.add_argument("--models", metavar="A,B", help="these models alone; own is the checks' own ones")
    parser.add_argument("--checks", metavar="TEXT", help="the checks alone whose names contain this")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many processes share the checks")
    parser.add_argument("--refusals", type=Path, metavar="FILE", help="write the page of refusals and stop")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    return parser


def _run(options: argparse.Namespace) -> int:
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
    rows = [int(row) for row in names_in(options.rows, map(str, ROWS), "row")]
    plans = names_in(options.plans, PLANS, "plan")
    models = names_in(options.models, (*MODELS, OWN), "model")
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
        write_whole(options.markdown, to_page(lines, options.command))
    write_json(options.json, to_json(lines))
    return 1 if any(verdict.value == "FAIL" for verdict in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
