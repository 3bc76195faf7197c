"""`irc machine`: measures this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..ir import printable
from .options import (
    EXITS,
    Commands,
    add_verbosity,
)
from .progress import Progress

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc machine` to the command line."""
    machine = commands.add_parser(
        "machine",
        help="measure this machine, for plans that swap and for plans made elsewhere",
        epilog=EXITS,
    )
    machine.add_argument("--device", default="", help="cpu, cuda or cuda:1; a GPU if there is one")
    machine.add_argument(
        "--scratch",
        default="",
        metavar="DIR",
        help="the folder whose disk is measured (the system's for temporary files)",
    )
    machine.add_argument("--quick", action="store_true", help="measure for a few seconds, less exactly")
    machine.add_argument("--name", default="", metavar="NAME", help="what to call it (this-machine)")
    machine.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the description here, for --costs FILE, and not among the measurements of this machine",
    )
    add_verbosity(machine)
    machine.set_defaults(command=_machine)


def _machine(options: argparse.Namespace) -> int:
    progress = Progress(options)
    with progress.phase("loading"):
        from ..ir.files import check_parent
        from ..passes.costs.this_machine import measure_machine, store

    if options.output is not None:
        check_parent(options.output)
    with progress.phase("measuring this machine"):
        measured = measure_machine(options.device, options.scratch, name=options.name, quick=options.quick)
    path = store(measured, options.output)
    if options.json:
        print(json.dumps(measured.to_json(), indent=1))
    elif not options.quiet:
        print(measured.table())
        print(f"{'written':>10}  {printable(str(path), 1000)}")
    return 0
