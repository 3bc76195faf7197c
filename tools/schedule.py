"""`irc schedule`: simulates pipeline schedules."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..ir import UsageError, parse_budget, printable
from .options import (
    EXITS,
    Commands,
    add_verbosity,
    budget_of,
)

__all__ = ["add"]

_PIPED_COLUMNS = 160
"""The width of tables that do not go to a terminal."""


def add(commands: Commands) -> None:
    """Adds `irc schedule` to the command line."""
    schedule = commands.add_parser("schedule", help="simulate pipeline schedules", epilog=EXITS)
    schedule.add_argument(
        "--schedule",
        default="all",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev; without it all of them side by side",
    )
    schedule.add_argument("--stages", type=int, required=True, metavar="N", help="devices in the pipeline")
    schedule.add_argument(
        "--micro-batches", type=int, required=True, metavar="N", help="micro-batches in a step"
    )
    schedule.add_argument(
        "--chunks", type=int, metavar="N", help="stages of each device under interleaved (2)"
    )
    for part in ("forward", "input-gradient", "weight-gradient"):
        schedule.add_argument(
            f"--{part}", type=float, default=1.0, metavar="SECONDS", help="of a micro-batch on a device (1)"
        )
    schedule.add_argument(
        "--transfer", type=float, default=0.0, metavar="SECONDS", help="from a device to the next (0)"
    )
    schedule.add_argument(
        "--held", metavar="BYTES", help="what a micro-batch holds on a device; without it they are counted"
    )
    schedule.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace there, for Perfetto"
    )
    schedule.add_argument("--picture", type=Path, metavar="FILE", help="draw it there (.svg, .png, .pdf)")
    add_verbosity(schedule)
    schedule.set_defaults(command=_schedule)


def _schedule(options: argparse.Namespace) -> int:
    from ..compiler.pictures import check_picture
    from ..ir.files import check_parent, write_whole
    from .schedule_report import EqualStages, SimulatedStep, comparison, simulate_all, simulate_known

    for path in (options.trace, options.picture):
        if path is not None:
            check_parent(path)
    if options.picture is not None:
        check_picture(options.picture, "--picture")
    every = options.schedule == "all"
    if every and options.trace is not None:
        raise UsageError("IRC400", "--trace is for one schedule", help="name it: --schedule 1f1b")
    stages = EqualStages(
        options.stages,
        options.micro_batches,
        options.chunks,
        options.forward,
        options.input_gradient,
        options.weight_gradient,
        options.transfer,
        None if options.held is None else _amount(options.held),
    )
    rows = simulate_all(stages) if every else [simulate_known(options.schedule, stages)]
    steps = [row for row in rows if isinstance(row, SimulatedStep)]
    if options.trace is not None:
        from ..compiler.report.pipeline_trace import trace_events

        write_whole(options.trace, json.dumps(trace_events(steps[0].timeline)))
    if options.picture is not None:
        from ..compiler.report.pipeline_picture import draw_pipelines

        kind = options.picture.suffix.removeprefix(".")
        write_whole(options.picture, draw_pipelines([step.drawn() for step in steps], kind))
    if options.json:
        found = {"format": "irc-schedule-1", "steps": [step.to_json() for step in steps]}
        print(json.dumps(found, indent=1))
    elif not options.quiet:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS, highlight=False)
        console.print(comparison(rows, stages) if every else steps[0].table())
        written = [str(path) for path in (options.trace, options.picture) if path is not None]
        if written:
            print(f"written: {printable(', '.join(written), 2000)}")
    return 0


def _amount(text: str) -> int:
    """Bytes, as 4GiB."""
    nbytes = parse_budget(budget_of(text))
    if not nbytes:
        raise UsageError("IRC400", f"{text} is not a number of bytes", help="give bytes, as 100MiB")
    return nbytes
