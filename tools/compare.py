"""`irc compare`: published strategies beside the best plan, at the same budgets."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..ir import format_bytes, printable
from .options import EXITS, Commands, add_gap, add_model, budget_of, mark, model_name, source_of
from .progress import Progress

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc compare` to the command line."""
    compare = commands.add_parser(
        "compare", help="published strategies beside the best plan, at the same budgets", epilog=EXITS
    )
    add_model(compare)
    compare.add_argument(
        "--budgets",
        metavar="A,B",
        help="as 90%%,4GiB,min, where min is the smallest that fits; six of them if left out",
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
        "--measure",
        action="store_true",
        help="train some steps by each plan and by PyTorch's own methods, in turns with the original",
    )
    add_gap(compare)
    compare.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    source = source_of(options)
    texts = [] if options.budgets is None else [text.strip() for text in options.budgets.split(",")]
    budgets = [text if text == "min" else budget_of(text) for text in texts]
    progress = Progress(options)
    with progress.phase(f"loading {options.model}"):
        from ..compiler.comparison.cells import Cell
        from ..compiler.comparison.compare_strategies import BUDGETS, DEFAULT, Compared, compare_call
        from ..compiler.comparison.comparison import FILES
        from ..compiler.model_source import load, training_loss
        from ..compiler.reports import make_folder
        from ..compiler.request import Request
        from ..ir import require

        compared = Compared.of(
            budgets or BUDGETS,
            DEFAULT if options.strategies is None else options.strategies,
            options.time_limit,
            options.gap,
            options.measure,
        )
        if options.output is not None:
            require("plot", "irc compare -o")
            make_folder(options.output)
        loaded = load(source)
        mark(loaded.module, options)

    def say(cell: Cell) -> None:
        if progress.verbose:
            outcome = cell.code if cell.shown is None else f"{cell.shown[1]:.2%}"
            print(f"{format_bytes(cell.budget_bytes)}  {cell.strategy}  {outcome}", file=sys.stderr)

    with progress.phase("capturing, measuring and planning"):
        request = Request.of("100%", costs=options.costs, observers=[progress])
        name = model_name(options.model)
        comparison = compare_call(
            loaded.module, loaded.args, None, training_loss, request, name, compared, say
        )
    if options.json:
        print(json.dumps(comparison.to_json(), indent=1))
    elif not options.quiet:
        print(comparison.table())
    if options.output is not None:
        comparison.save(options.output)
        if not options.json and not options.quiet:
            names = ", ".join(str(options.output / name) for name in FILES)
            print(f"written: {printable(names, 2000)}")
    return 0
