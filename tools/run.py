"""`irc run`: trains what `irc optimize` wrote."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from ..ir import IrcError, UsageError, VerificationError, first_line
from .options import (
    EXITS,
    Commands,
    add_verbosity,
)
from .pipeline import run_written
from .progress import Progress

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc run` to the command line."""
    run = commands.add_parser("run", help="train a few steps of what optimize wrote", epilog=EXITS)
    run.add_argument("folder", type=Path, metavar="DIR")
    run.add_argument("--steps", type=int, default=3, metavar="N", help="training steps (3)")
    run.add_argument("--check", action="store_true", help="compare each step with the original model")
    run.add_argument(
        "--original",
        metavar="MODEL",
        help="compare with this model: file.onnx, package.module:factory or file.py:factory",
    )
    run.add_argument(
        "--trust",
        action="store_true",
        help="compare with the factory that the folder names, and so run code that a file asks for",
    )
    run.add_argument(
        "--weights", type=Path, metavar="FILE", help="begin a pipeline with these weights, of whatever cut"
    )
    run.add_argument(
        "--save-weights", type=Path, metavar="FILE", help="write the trained weights here, as .safetensors"
    )
    add_verbosity(run)
    run.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if options.steps < 1:
        raise UsageError("IRC400", f"--steps {options.steps} is not positive", help="give 1 or more")
    if (options.original is not None or options.trust) and not options.check:
        raise UsageError("IRC400", "--original and --trust are for --check", help="add --check")
    if (options.folder / "pipeline.json").is_file():
        return run_written(options)
    if options.weights is not None:
        raise UsageError(
            "IRC400",
            f"--weights of {options.folder}, which is not a pipeline",
            help="optimize the model with these weights in it",
        )
    progress = Progress(options)
    with progress.phase(f"loading {options.folder}"):
        from ..compiler.artifact import read_folder
        from ..compiler.run import check_folder

        written = read_folder(options.folder)
        if options.check:
            source = written.source.trusted(options.original, is_trusted=options.trust)
            written = replace(written, source=source)
    with progress.phase("training"):
        try:
            report = check_folder(written, options.steps, with_original=options.check)
        except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError) as error:
            if isinstance(error, IrcError) or os.environ.get("IRC_TRACEBACK"):
                raise
            raise VerificationError(
                "IRC437",
                f"a step of {options.folder}{' or of its original' if options.check else ''} fails: "
                f"{type(error).__name__}: {first_line(error)}",
                help="set IRC_TRACEBACK=1 to see where; irc optimize MODEL -o DIR writes the folder again",
            ) from error
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    elif not options.quiet:
        print(report.text())
    for failure in report.failures:
        print(f"error[IRC130]: {failure}", file=sys.stderr)
    if options.save_weights is not None and not report.failures:
        report.save_weights(options.save_weights)
        if not options.quiet and not options.json:
            print(f"written: {options.save_weights}")
    return 1 if report.failures else 0
