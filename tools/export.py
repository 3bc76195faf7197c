"""`irc export`: writes trained weights back into their ONNX file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..frontends.onnx.export_target import check_export_target
from ..ir.files import require_files
from .options import (
    EXITS,
    Commands,
    add_verbosity,
)
from .progress import Progress

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc export` to the command line."""
    export = commands.add_parser(
        "export", help="write trained weights back into the ONNX file that they came from", epilog=EXITS
    )
    export.add_argument("folder", type=Path, metavar="DIR", help="what irc optimize wrote for an ONNX file")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the new ONNX file")
    export.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="a state_dict as .safetensors, or saved by torch.save; without it DIR's own weights",
    )
    add_verbosity(export)
    export.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> int:
    require_files(options.folder, "plan.json")
    check_export_target(options.output)
    progress = Progress(options)
    with progress.phase(f"loading {options.folder}"):
        from ..compiler.onnx_export.export import export_folder

    with progress.phase(f"writing {options.output}"):
        report = export_folder(options.folder, options.weights, options.output)
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    elif not options.quiet:
        print(report.text())
    return 0
