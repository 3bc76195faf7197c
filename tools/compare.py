"""`irc compare`: published strategies beside the best plan, at the same budgets."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..ir import format_bytes
from .options import EXITS, Commands, add_gap, add_model, budget_of, mark, model_name, source_of
from .progress import Progress

__all__ = ["add"]

_BUDGETS = "90%,75%,60%,50%,40%,min"


def add(commands: Commands) -> None:
    """Adds `irc compare` to the command line."""
    compare = commands.add_parser(
        "compare", help="published strategies beside the best plan, at the same budgets", epilog=EXITS
    )
    add_model(compare)
    compare.add_argument(
        "--budgets",
        default=_BUDGETS,
        metavar="A,B",
        help=f"as 90%%,4GiB; min is the smallest that fits ({_BUDGETS.replace('%', '%%')})",
    )
    compare.add_argument(
        "--strategies", metavar="A,B", help="names as for irc optimize --strategy; all of them if left out"
    )
    compare.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write the table as JSON and CSV, and pictures, here"
    )
    compare.add_argument(
        "--time-limit", type=float, default=20.0, metavar="SECONDS", help="for each plan (20)"
    )
    compare.add_argument(
        "--measure", action="store_true", help="train some steps by each plan, in turns with the original"
    )
    add_gap(compare)
    compare.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    source = source_of(options)
    texts = [text.strip() for text in options.budgets.split(",")]
    budgets = [text if text == "min" else budget_of(text) for text in texts]
    progress = Progress(options)
    with progress.phase(f"loading {options.model}"):
        from ..compiler.comparison.cells import Cell
        from ..compiler.comparison.compare_strategies import DEFAULT, check, compare_program
        from ..compiler.comparison.comparison import FILES
        from ..compiler.comparison.measure import Measurer
        from ..compiler.model_source import load, training_loss
        from ..compiler.request import Request
        from ..compiler.written import made_folder
        from ..frontends.torch import capture
        from ..ir import require

        strategies = (
            DEFAULT
            if options.strategies is None
            else [name.strip() for name in options.strategies.split(",")]
        )
        check(budgets, strategies, options.time_limit, options.gap)
        if options.output is not None:
            require("plot", "irc compare -o")
            made_folder(options.output)
        loaded = load(source)
        mark(loaded.module, options)
    with progress.phase("capturing and measuring"):
        request = Request.of("100%", costs=options.costs, observers=[progress])
        captured = capture(
            loaded.module,
            loaded.args,
            None,
            loss=training_loss,
            with_eager=True,
            measure=request.cost.measure,
        )
        program = request.costed(captured)
        measurer = None
        if options.measure:
            measurer = Measurer(loaded.module, captured, loaded.args, None, training_loss)

    def say(cell: Cell) -> None:
        if progress.verbose:
            outcome = cell.code or f"{cell.overhead:.2%}"
            print(f"{format_bytes(cell.budget_bytes)}  {cell.strategy}  {outcome}", file=sys.stderr)

    with progress.phase("planning"):
        comparison = compare_program(
            program,
            model_name(options.model),
            budgets,
            strategies,
            time_limit=options.time_limit,
            gap=options.gap,
            measurer=measurer,
            on_cell=say,
        )
    if options.json:
        print(json.dumps(comparison.to_json(), indent=1))
    elif not options.quiet:
        print(comparison.table())
    if options.output is not None:
        comparison.save(options.output)
        if not options.json and not options.quiet:
            print(f"written: {', '.join(str(options.output / name) for name in FILES)}")
    return 0
