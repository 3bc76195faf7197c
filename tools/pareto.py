"""`irc pareto`: the memory/time front of a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..ir import UsageError, printable
from .options import (
    EXITS,
    Commands,
    add_gap,
    add_model,
    add_swap,
    budget_of,
    mark,
    model_name,
    source_of,
)
from .progress import Progress

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc pareto` to the command line."""
    pareto = commands.add_parser(
        "pareto", help="the memory/time front: the least overhead at each budget", epilog=EXITS
    )
    add_model(pareto)
    spread = pareto.add_mutually_exclusive_group()
    spread.add_argument(
        "--points",
        type=int,
        default=20,
        metavar="N",
        help="budgets, evenly spread from the smallest feasible one to the baseline's peak (20)",
    )
    spread.add_argument("--budgets", metavar="A,B", help="these budgets instead, as 90%%,80%%,4GiB")
    pareto.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write points (at once), table and pictures here"
    )
    pareto.add_argument("--restart", action="store_true", help="delete the points that DIR has already")
    pareto.add_argument(
        "--strategy",
        default="auto",
        help="auto, ilp, eviction, or a published method (irc compare tries all, and names them); "
        "with --swap also lms, ome, pofo, swap, recompute",
    )
    pareto.add_argument(
        "--time-limit", type=float, default=20.0, metavar="SECONDS", help="for the search at each budget (20)"
    )
    add_gap(pareto)
    add_swap(pareto)
    pareto.set_defaults(command=_pareto)


def _pareto(options: argparse.Namespace) -> int:
    source = source_of(options)
    given = [] if options.budgets is None else options.budgets.split(",")
    budgets = tuple(budget_of(text) for text in given)
    offered = None
    if options.swap:
        from ..compiler.tiers import offer

        offered = offer(options.swap, options.costs)
    if options.restart and options.output is None:
        raise UsageError("IRC400", "--restart without a folder", help="give -o DIR")
    progress = Progress(options)
    with progress.phase(f"loading {options.model}"):
        from ..compiler.model_source import load, training_loss
        from ..compiler.pareto.front import FILES
        from ..compiler.pareto.journal import check_folder
        from ..compiler.pareto.sweep import Sweep, captured_for_front, trace_front
        from ..compiler.request import Request
        from ..torch_support.pytree import flatten
        from .pareto_progress import FrontProgress

        sweep = Sweep(options.points, budgets, options.strategy, options.time_limit, offered, options.gap)
        sweep.check()
        if options.output is not None:
            check_folder(options.output, restart=options.restart)
        loaded = load(source)
        mark(loaded.module, options)
    with progress.phase("capturing and measuring"):
        sweep = sweep.measured(loaded.module, flatten(loaded.args)[0])
        request = Request.of("100%", costs=options.costs, observers=[progress])
        program, time_steps = captured_for_front(
            loaded.module, loaded.args, None, training_loss, request, sweep
        )
    with FrontProgress(shown=progress.shown, verbose=progress.verbose) as bar:
        front = trace_front(
            program,
            model_name(options.model),
            sweep,
            folder=options.output,
            restart=options.restart,
            observer=bar,
            time_steps=time_steps,
        )
    if options.json:
        print(json.dumps(front.to_json(), indent=1))
    elif not options.quiet:
        print(front.table())
        if options.output is not None:
            names = ", ".join(str(options.output / name) for name in FILES)
            print(f"written: {printable(names, 2000)}")
    return 0
