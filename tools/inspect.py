"""`irc inspect`: what a model needs to train."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..ir import UsageError
from .options import (
    Commands,
    add_model,
    mark,
    source_of,
)
from .progress import Progress

if TYPE_CHECKING:
    from ..compiler.model_source import Loaded
    from .model_report import Inspection
    from .onnx_report import FileReport

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc inspect` to the command line."""
    inspect = commands.add_parser("inspect", help="tensors, sizes, baseline peak, smallest feasible budget")
    add_model(inspect)
    inspect.add_argument("--top", type=int, default=15, metavar="N", help="how many storages to list (15)")
    inspect.set_defaults(command=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    if options.top < 0:
        raise UsageError("IRC400", f"--top {options.top} is negative", help="give 0 or more")
    source = source_of(options)
    progress = Progress(options)
    with progress.phase(f"loading {options.model}"):
        from ..compiler.model_source import load, load_file, with_example

        module, file = load_file(source), None
        if module is not None:
            from .onnx_report import report_of

            file = report_of(module)
        if module is None or file is None:
            loaded = load(source)
        else:
            loaded = None if file.open_axes or file.undrawn else with_example(module)
    reports: list[Inspection | FileReport] = [] if file is None else [file]
    if loaded is not None:
        mark(loaded.module, options)
        reports.insert(0, _inspected(loaded, options, progress))
    if options.json:
        found = {key: value for report in reports for key, value in report.to_json().items()}
        print(json.dumps({"format": "irc-inspection-1", **found}, indent=1))
    elif not options.quiet:
        print("\n".join(report.table() for report in reports))
    return 0


def _inspected(loaded: Loaded, options: argparse.Namespace, progress: Progress) -> Inspection:
    """Inspects what a step of the model needs."""
    with progress.phase("capturing and measuring"):
        from ..compiler.model_source import training_loss
        from ..compiler.request import Request
        from ..frontends.torch import capture
        from .model_report import inspect_program

        request = Request.of("100%", costs=options.costs, observers=[progress])
        captured = capture(
            loaded.module,
            loaded.args,
            loss=training_loss,
            with_eager=True,
            measure=request.cost.measure,
        )
        return inspect_program(request.costed(captured), options.top)
