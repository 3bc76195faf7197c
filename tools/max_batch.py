"""`irc max-batch`: the largest batch, or the longest sequence, that trains within a budget."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ir import UsageError
from .estimate import add_config, origin_of, step_of
from .options import (
    EXITS,
    Commands,
    add_costs,
    add_exact,
    add_source,
    add_verbosity,
    budget_of,
    exact_of,
    optimizer_of,
    source_of,
)
from .progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..compiler.estimate.largest_batch import LargestBatch, Step

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc max-batch` to the command line."""
    command = commands.add_parser(
        "max-batch", help="the largest batch or longest sequence that fits, by planning", epilog=EXITS
    )
    add_source(command, is_optional=True)
    add_config(command)
    add_costs(command)
    command.add_argument("--budget", required=True, metavar="BYTES", help="bytes, 8GiB or 8GB")
    command.add_argument(
        "--axis",
        choices=("batch", "sequence"),
        default="batch",
        help="what grows: the first dimension or the second",
    )
    command.add_argument(
        "--optimizer", metavar="NAME[:KEY=VALUE,...]", help="take its steps within backward, as adamw:lr=1e-3"
    )
    command.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for the search at each size (60)"
    )
    add_exact(command)
    command.add_argument(
        "--measure", action="store_true", help="train some steps of that size, and measure them"
    )
    add_verbosity(command)
    command.set_defaults(command=_max_batch)


def _max_batch(options: argparse.Namespace) -> int:
    progress = Progress(options)
    budget = budget_of(options.budget)
    origin_of(options)
    optimizer = optimizer_of(options)
    with progress.phase(f"loading {options.config or options.model}"):
        from ..compiler.estimate.largest_batch import max_batch, search_largest
        from ..compiler.model_source import training_loss
        from ..compiler.request import Request

        grow = _growing(options)
        step = step_of(options) if grow is None else None
    with progress.phase("planning sizes"):
        found: LargestBatch
        if step is not None:
            module, args, _ = step
            found = max_batch(
                module,
                args,
                budget,
                axis=options.axis,
                costs=options.costs,
                optimizer_in_backward=optimizer,
                loss=training_loss,
                exact=exact_of(options),
                time_limit=options.time_limit,
                measure=options.measure,
            )
        else:
            assert grow is not None
            request = Request.of(
                budget,
                costs=options.costs,
                optimizer=optimizer,
                loss=training_loss,
                exact=exact_of(options),
                time_limit=options.time_limit,
            )
            found = search_largest(
                grow,
                request,
                axis=options.axis,
                measure=options.measure,
                filled=lambda size: grow(size, True),
            )
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    elif not options.quiet:
        print(found.summary())
    if not found.size:
        return 3
    return 0 if found.holds else 1


def _growing(options: argparse.Namespace) -> Callable[..., Step] | None:
    """Makes the function that makes the step of a size, with drawn weights if it is asked for.

    It is None for a factory: its module stays, and its arguments grow.

    Raises:
        UsageError: IRC585 for an ONNX file along another axis than the batch.
    """
    if options.config is not None:
        if options.axis == "batch":
            return lambda size, has_data=False: step_of(options, batch=size, has_data=has_data)
        return lambda size, has_data=False: step_of(options, sequence=size, has_data=has_data)
    source = source_of(options)
    if source.is_factory:
        return None
    if options.axis != "batch":
        raise UsageError(
            "IRC585",
            f"an ONNX file grows along its batch, not its {options.axis}",
            help="give --input NAME=SHAPE to irc optimize for another length",
        )
    from ..compiler.model_source import load

    def step(size: int, has_data: bool = True) -> Step:
        loaded = load(replace(source, batch=size))
        return loaded.module, loaded.args, {}

    return step
