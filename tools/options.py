"""Options and arguments that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir import UsageError, parse_budget

if TYPE_CHECKING:
    from torch import nn

    from ..compiler.optimizers import DescribedOptimizer
    from ..compiler.source import Source

__all__ = [
    "EXITS",
    "Commands",
    "add_compiler",
    "add_costs",
    "add_exact",
    "add_model",
    "add_source",
    "add_swap",
    "add_verbosity",
    "budget_of",
    "exact_of",
    "mark",
    "model_name",
    "optimizer_of",
    "source_of",
]

Commands = Any
"""The sub-parsers of the command line, as argparse makes them."""

EXITS = """exit status: 0 done; 1 internal or verification failure; 2 the command is wrong; 3 the model
does not fit (the smallest feasible budget is printed); 4 an operation is not supported; 5 the time limit
ended before any plan was found"""


def add_swap(command: argparse.ArgumentParser, more: str = "") -> None:
    """Adds --swap."""
    command.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="TIER",
        help=f"copy to host:64GiB or disk:/scratch:200GiB what the step does not need; may be repeated{more}",
    )


_MODEL = "file.onnx, package.module:factory or file.py:factory"


def add_source(parser: argparse.ArgumentParser, *, is_optional: bool = False, model: str = _MODEL) -> None:
    """Adds MODEL, and the options that say how it is loaded."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if is_optional else None,
        help=model,
    )
    parser.add_argument("--batch", type=int, metavar="N", help="batch size of an ONNX model")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SHAPE",
        help="shape of an ONNX input, as 8x3x224x224",
    )
    parser.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of an ONNX input that is settled at import, as shape=[3,4]",
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="what an ONNX weight or constant becomes: parameter, buffer or constant; NAME may be a pattern",
    )
    parser.add_argument(
        "--draw-weights",
        type=int,
        metavar="SEED",
        help="draw the weight matrices anew (He et al. 2015), for files whose weights are placeholders",
    )


def add_model(parser: argparse.ArgumentParser, model: str = _MODEL) -> None:
    """Adds MODEL, and the options that say how it is loaded, costed and annotated."""
    add_source(parser, model=model)
    add_costs(parser)
    for annotation, help in (
        ("keep", "never compute the results of this submodule, or of these ONNX nodes, twice"),
        ("recompute", "do not keep the intermediate results of this submodule, or of these ONNX nodes"),
    ):
        parser.add_argument(f"--{annotation}", action="append", default=[], metavar="PATH", help=help)
    add_verbosity(parser)


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Adds --costs."""
    parser.add_argument(
        "--costs",
        default="measured",
        type=_costs,
        metavar="SOURCE",
        help="where the seconds of operations come from: measured (each runs a few times; the default), "
        "thorough (more often; both are cached), analytic (a roofline model of a modest CPU), or, to plan "
        "for another machine, the name of a described one or the path of a file of irc machine",
    )
    for name, const in (("--profile", "thorough"), ("--no-profile", "analytic")):
        nargs = "?" if name == "--profile" else 0
        parser.add_argument(name, action=_Renamed, nargs=nargs, const=const, help=argparse.SUPPRESS)


def _costs(text: str) -> str:
    """Returns a source of costs, checked.

    Raises:
        UsageError: IRC410, or IRC414 to IRC418 for a file.
    """
    if text not in ("measured", "thorough", "analytic"):
        from ..passes import machine_named

        machine_named(text)
    return text


class _Renamed(argparse.Action):
    """Takes a flag that was renamed to --costs, with a warning; it goes with the next version."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            namespace.costs = _costs(values or self.const)
        except UsageError as error:  # perhaps it is the model
            help = f"{error.help}; to measure operations, put {option_string} last"
            raise UsageError(error.code, error.message, help=help) from error
        print(f"warning: {option_string} is now --costs {namespace.costs}", file=sys.stderr)


def add_gap(parser: argparse.ArgumentParser) -> None:
    """Adds --gap."""
    parser.add_argument(
        "--gap",
        type=float,
        default=0.005,
        metavar="FRACTION",
        help="stop a search this close to the best, as a fraction of the step's time (0.005)",
    )


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Adds --json, --verbose and --quiet."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument("-v", "--verbose", action="store_true", help="say what each pass took")
    volume.add_argument("-q", "--quiet", action="store_true", help="print errors alone")


def source_of(options: argparse.Namespace) -> Source:
    """Returns the origin of the model, as the options say it."""
    from ..compiler.source import Source, parse_constant, parse_input, parse_role

    if options.batch is not None and options.batch <= 0:
        raise UsageError("IRC400", f"--batch {options.batch} is not positive", help="give 1 or more")
    inputs = dict(parse_input(text) for text in options.input) or None
    constants = dict(parse_constant(text) for text in options.constant) or None
    roles = dict(parse_role(text) for text in options.role) or None
    source = Source(options.model, options.batch, inputs, options.draw_weights, constants, roles)
    source.check()
    return source


def mark(module: nn.Module, options: argparse.Namespace) -> None:
    """Annotations for what --keep and --recompute name."""
    from ..frontends.torch.annotations import mark
    from ..ir import Policy

    for policy, paths in ((Policy.KEEP, options.keep), (Policy.RECOMPUTE, options.recompute)):
        for path in paths:
            if not path or (policy is Policy.RECOMPUTE and path in options.keep):
                raise UsageError(
                    "IRC400",
                    f"--keep and --recompute both name {path!r}"
                    if path
                    else "an empty path names no submodule",
                    help="give --keep or --recompute the path of a submodule, as layer3",
                )
            mark(module, policy, path)


def model_name(model: str) -> str:
    """The factory's name, or that of the file."""
    return model.rpartition(":")[2] if ":" in os.path.basename(model) else Path(model).stem


def optimizer_of(options: argparse.Namespace) -> DescribedOptimizer | None:
    """Returns the optimizer that --optimizer names."""
    if options.optimizer is None:
        return None
    from ..compiler.optimizers import parse_optimizer

    return parse_optimizer(options.optimizer)


def add_exact(command: argparse.ArgumentParser) -> None:
    """Adds --exact."""
    command.add_argument(
        "--exact",
        choices=("bits", "sums"),
        help="whether numbers are the model's to the bit, or sums may be taken in another order (bits)",
    )


def add_compiler(command: argparse.ArgumentParser) -> None:
    """Adds --compiler."""
    command.add_argument(
        "--compiler",
        choices=("inductor",),
        help="fuse operations into kernels of this compiler; numbers are off by rounding (no compiler)",
    )


def exact_of(options: argparse.Namespace) -> bool | str:
    """The value of `exact` that --exact names."""
    return options.exact if options.exact == "sums" else True


def budget_of(text: str) -> int | str:
    """A budget as the passes take it, checked."""
    try:
        budget = int(text) if text.isascii() and text.isdecimal() else text
        parse_budget(budget)
    except (ValueError, OverflowError):  # thousands of digits
        raise UsageError("IRC401", "the budget is out of all proportion", help="give --budget 4GiB") from None
    return budget
