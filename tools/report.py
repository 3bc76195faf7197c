"""`irc report`: what the memory of a plan looks like."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..ir import printable
from ..ir.files import require_files
from .options import Commands, add_verbosity, model_name
from .progress import Progress

__all__ = ["REPORTS", "add"]

REPORTS = (
    "FILE.html (a page that opens offline), FILE.svg or FILE.png (a picture), FILE.json (a trace for "
    "Perfetto), FILE.pickle (a snapshot for pytorch.org/memory_viz)"
)


def add(commands: Commands) -> None:
    """Adds `irc report` to the command line."""
    report = commands.add_parser("report", help="show the memory of what optimize wrote, tensor by tensor")
    report.add_argument("folder", type=Path, metavar="DIR")
    report.add_argument(
        "-o", "--output", type=Path, action="append", metavar="FILE", help=f"{REPORTS}; may be repeated"
    )
    add_verbosity(report)
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    is_pipeline = os.path.isfile(options.folder / "pipeline.json")
    if not is_pipeline:
        require_files(options.folder, "plan.json")
    from ..compiler.report import (
        check_report,
        front_of,
        read_memory,
        write_pipeline_report,
        write_report,
    )
    from ..passes import PlanMemory

    paths: list[Path] = options.output or [Path("report.html")]
    for path in paths:
        check_report(path, "-o")
    progress = Progress(options)
    if is_pipeline:
        from ..compiler.pipeline.artifact import read_pipeline_plan

        pipeline, source = read_pipeline_plan(options.folder)
        for path in paths:
            write_pipeline_report(path, model_name(source.model), pipeline)
            if not options.quiet:
                print(f"{'written':>16}  {printable(str(path), 1000)}")
        return 0
    with progress.phase(f"reading {options.folder}"):
        plan, source, program = read_memory(options.folder)
    front = None
    if not plan.tiers and any(path.suffix == ".html" for path in paths):
        with progress.phase("planning other budgets"):
            front = front_of(program, plan, PlanMemory(plan.budget_bytes))
    for path in paths:
        write_report(path, model_name(source.model), plan, plan.timeline(), front)
        if not options.quiet:
            print(f"{'written':>16}  {printable(str(path), 1000)}")
    return 0
