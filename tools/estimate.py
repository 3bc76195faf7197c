"""`irc estimate`: what a training step takes on a machine, without weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir import UsageError
from .options import (
    EXITS,
    Commands,
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
    from torch import nn

    from ..compiler.estimate.estimate import Estimate
    from ..compiler.source import Source

__all__ = ["add", "add_config", "origin_of", "step_of"]


def add(commands: Commands) -> None:
    """Adds `irc estimate` to the command line."""
    estimate = commands.add_parser(
        "estimate",
        help="will it fit: memory by kind, smallest budget, plan and speed on a machine, without weights",
        epilog=EXITS,
    )
    add_source(estimate, is_optional=True)
    add_config(estimate)
    estimate.add_argument(
        "--machine",
        default="h100",
        metavar="MACHINE",
        help="a described machine (h100), a file of irc machine, or measured: this one",
    )
    estimate.add_argument(
        "--budget", metavar="BYTES", help="the most that a plan may take (95%% of what the machine has)"
    )
    estimate.add_argument(
        "--optimizer", metavar="NAME[:KEY=VALUE,...]", help="whose state and steps count, as adamw:lr=1e-3"
    )
    estimate.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for the search (60)"
    )
    add_exact(estimate)
    estimate.add_argument("--ci", action="store_true", help="exit with status 3 if no plan fits")
    add_verbosity(estimate)
    estimate.set_defaults(command=_estimate)


def add_config(command: argparse.ArgumentParser) -> None:
    """Adds the options that describe a model by a configuration of Hugging Face."""
    command.add_argument("--config", type=Path, metavar="FILE", help="config.json of Hugging Face, as MODEL")
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="with --config: of weights"
    )
    command.add_argument(
        "--sequence",
        type=int,
        metavar="N",
        help="with --config: tokens of a row (2048, or as many as the model has)",
    )
    command.add_argument(
        "--train",
        metavar="WHAT",
        help="with --config: full (the default), lora:r=16 for adapters alone, or qlora:r=16 beside "
        "weights in 4 bits",
    )


def _estimate(options: argparse.Namespace) -> int:
    progress = Progress(options)
    budget = None if options.budget is None else budget_of(options.budget)
    origin_of(options)
    optimizer = optimizer_of(options)
    with progress.phase(f"loading {options.config or options.model}"):
        from ..compiler.estimate.estimate import estimate
        from ..compiler.model_source import training_loss

        module, args, kwargs = step_of(options)
    with progress.phase("capturing and planning"):
        found = estimate(
            module,
            args,
            example_kwargs=kwargs,
            machine=options.machine,
            budget=budget,
            optimizer=optimizer,
            loss=training_loss,
            exact=exact_of(options),
            time_limit=options.time_limit,
        )
    _print(found, options)
    return 3 if options.ci and not found.fits else 0


def origin_of(options: argparse.Namespace) -> Source | None:
    """Returns the origin of MODEL; None for --config. Nothing is loaded.

    Raises:
        UsageError: IRC400 for both or neither of MODEL and --config, or options of the other; as `source_of`.
    """
    if (options.config is None) == (options.model is None):
        raise UsageError("IRC400", "give either MODEL or --config FILE", help="see --help")
    if options.config is not None:
        return None
    for_config = {"--dtype": options.dtype, "--sequence": options.sequence, "--train": options.train}
    given = [flag for flag, value in for_config.items() if value is not None]
    if given:
        raise UsageError("IRC400", f"{given[0]} is for --config", help="a factory decides on its own")
    return source_of(options)


def step_of(
    options: argparse.Namespace,
    batch: int | None = None,
    sequence: int | None = None,
    *,
    has_data: bool = False,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module that MODEL or --config names, and the arguments of one step.

    Args:
        options: The command's options.
        batch: The rows of a batch, with --config; None for those of --batch, or 1.
        sequence: The tokens of a row; None for those of --sequence, if it is given.
        has_data: Whether a model of --config has weights, which are drawn.

    Raises:
        UsageError: As `origin_of` and of loading.
    """
    source = origin_of(options)
    if source is not None:
        from ..compiler.model_source import load

        loaded = load(source)
        return loaded.module, loaded.args, {}
    from ..compiler.estimate.hf_config import step_of_config
    from ..compiler.estimate.lora import parse_train

    rows = batch or (1 if options.batch is None else options.batch)
    tokens = options.sequence if sequence is None else sequence
    if rows < 1 or (tokens is not None and tokens < 1):
        raise UsageError("IRC400", "--batch and --sequence are 1 or more", help="give 1 or more")
    module, kwargs = step_of_config(
        options.config,
        batch=rows,
        sequence=tokens,
        dtype=options.dtype,
        lora=parse_train("full" if options.train is None else options.train),
        has_data=has_data,
    )
    return module, (), kwargs


def _print(found: Estimate, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    elif not options.quiet:
        print(found.summary())
