"""`irc run`: trains what `irc optimize` wrote."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..ir import IrcError, UsageError, VerificationError, first_line, printable
from ..ir.files import check_parent, require_files
from .options import (
    EXITS,
    Commands,
    add_verbosity,
)
from .pipeline import run_written
from .progress import Progress

if TYPE_CHECKING:
    from ..compiler.artifact import Written

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc run` to the command line."""
    run = commands.add_parser("run", help="train a few steps of what optimize wrote", epilog=EXITS)
    run.add_argument("folder", type=Path, metavar="DIR")
    run.add_argument("--steps", type=int, default=3, metavar="N", help="training steps (3)")
    run.add_argument(
        "--every", type=int, default=1, metavar="N", help="show every Nth step (1), and the last"
    )
    run.add_argument("--check", action="store_true", help="compare each step with the original model")
    run.add_argument(
        "--original",
        metavar="MODEL",
        help="compare with this model: file.onnx, package.module:factory or file.py:factory",
    )
    run.add_argument(
        "--trust",
        action="store_true",
        help="run code that the folder asks for: the factory that it names, with --check, and tiers of other "
        "distributions",
    )
    run.add_argument(
        "--weights", type=Path, metavar="FILE", help="begin a pipeline with these weights, of whatever cut"
    )
    run.add_argument(
        "--save-weights", type=Path, metavar="FILE", help="write the trained weights here, as .safetensors"
    )
    run.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="run one more step, and write what it took beside what was predicted, as a trace for Perfetto",
    )
    add_verbosity(run)
    run.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if options.steps < 1:
        raise UsageError("IRC400", f"--steps {options.steps} is not positive", help="give 1 or more")
    if options.every < 1:
        raise UsageError("IRC400", f"--every {options.every} is not positive", help="give 1 or more")
    if options.original is not None and not options.check:
        raise UsageError("IRC400", "--original is for --check", help="add --check")
    if options.trace is not None and options.trace.suffix != ".json":
        raise UsageError(
            "IRC400", f"--trace {options.trace} is of no known kind", help="give a file ending in .json"
        )
    if options.original is not None:
        from ..compiler.source import Source

        Source(options.original).check()
    if options.save_weights is not None:
        check_parent(options.save_weights)
    if os.path.isfile(options.folder / "pipeline.json"):
        if options.trace is not None:
            raise UsageError(
                "IRC400",
                "--trace is for a plan on one device",
                help="irc schedule --trace FILE writes the simulated step of a pipeline's schedule",
            )
        return run_written(options)
    require_files(options.folder, "plan.json")
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

        written = read_folder(options.folder, is_trusted=options.trust)
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
        print(report.text(options.every))
    for failure in report.failures:
        print(f"error[IRC130]: {failure}", file=sys.stderr)
    if options.save_weights is not None and not report.failures:
        report.save_weights(options.save_weights)
        if not options.quiet and not options.json:
            print(f"written: {printable(str(options.save_weights), 1000)}")
    if options.trace is not None:
        _write_trace(options, written)
    return 1 if report.failures else 0


def _write_trace(options: argparse.Namespace, written: Written) -> None:
    """Measures one more step of a folder, beside the predicted one."""
    from ..compiler.report import measured_trace, read_memory
    from ..compiler.reports import UNWRITABLE
    from ..compiler.training import train
    from ..ir.files import write_whole

    plan, _, _ = read_memory(options.folder)
    module = written.module()
    train(module, written.examples, 1)
    trace = measured_trace(lambda: train(module, written.examples, 1), plan.timeline().planned)
    write_whole(options.trace, json.dumps(trace), UNWRITABLE)
    if not options.quiet and not options.json:
        print(f"written: {printable(str(options.trace), 1000)} (open it in ui.perfetto.dev)")
