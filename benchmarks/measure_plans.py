"""Measures plans on models: bytes and time against what was predicted, numbers against the original.

    python -m benchmarks.measure_plans --models resnet50,gpt2 --budgets 100%,75%,min --json plans.json
    python -m benchmarks.measure_plans --models unet --ladder 30
    python -m benchmarks.measure_plans --onnx

Each row plans one budget, and runs the original and the fitted module side by side from the same weights
and the same state of the random generator. Exit status 1: a measured peak is over the predicted one, a
predicted one over the budget, a smallest budget was refused, numbers differ beyond the tolerance, or a
budget of a ladder is worse than a smaller one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from irc.compiler.written_files import to_markdown, write_whole
from irc.ir import IrcError, UsageError

from .compare import TOLERANCE
from .harness import Settings, load_named, threads
from .onnx_rows import light_folder, measure_onnx
from .planned_rows import HEADER, Ladder, Row, measure_model

__all__ = ["main"]

_MODELS = "resnet50,unet,gpt2,densenet121,lstm"
_BUDGETS = "100%,90%,75%,60%,min"
_BATCHES = "4"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler would write to the terminal
    options = _parser().parse_args(argv)
    settings = Settings(options.time_limit, options.repeats, options.seed, options.profile)
    rows: list[Row] = []
    try:
        with threads(options.threads):
            for row in _rows(options, settings):
                rows.append(row)
                print("  ".join(row.cells()), file=sys.stderr, flush=True)
    except IrcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    failed = [row for row in rows if row.failures]
    text = "\n".join(
        [
            to_markdown(HEADER, [row.cells() for row in rows]),
            "",
            f"{options.threads} threads, best of {options.repeats} interleaved steps, "
            f"{options.time_limit:g} s for each search. Peaks are of one step, parameters, buffers and "
            f"inputs included. Numbers fail where they differ by more than {TOLERANCE:g} of the largest of "
            f"their kind. {len(failed)} of {len(rows)} rows failed.",
        ]
    )
    print(text, flush=True)
    try:
        _write(options, text, rows)
    except IrcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 1 if failed else 0


def _write(options: argparse.Namespace, text: str, rows: Sequence[Row]) -> None:
    """Writes the table and its rows where the options say."""
    if options.markdown is not None:
        write_whole(options.markdown, text + "\n")
    if options.json is not None:
        data = {
            "torch": torch.__version__,
            "threads": options.threads,
            "repeats": options.repeats,
            "time_limit": options.time_limit,
            "tolerance": TOLERANCE,
            "rows": [asdict(row) for row in rows],
        }
        write_whole(options.json, json.dumps(data, indent=1) + "\n")


def _rows(options: argparse.Namespace, settings: Settings) -> Iterator[Row]:
    if options.onnx is not None:
        folder = Path(options.onnx) if options.onnx else light_folder()
        paths = sorted(folder.glob("*.onnx"))
        if options.models is not None:
            wanted = {name.removeprefix("light_") for name in options.models.split(",")}
            paths = [path for path in paths if path.stem.removeprefix("light_") in wanted]
        if not all(batch.isdigit() for batch in options.batches.split(",")):
            raise UsageError("IRC400", f"--batches {options.batches!r}", help="give numbers, as 4,16")
        batches = [int(batch) for batch in options.batches.split(",")]
        if not paths:
            raise UsageError(
                "IRC420", f"no such ONNX models in {folder}", help="name a folder with .onnx files"
            )
        for path in paths:
            yield from measure_onnx(path, batches, settings)
        return
    for name in (options.models or _MODELS).split(","):
        budgets = options.budgets.split(",") if options.ladder is None else Ladder(options.ladder)
        yield from measure_model(name.rpartition(":")[2], load_named(name), budgets, settings)


def _rungs(text: str) -> int:
    """Budgets of a ladder."""
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError("give a number from 2 on")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure_plans", description="Measures plans on models."
    )
    parser.add_argument("--models", metavar="A,B", help=f"names or package.module:factory ({_MODELS})")
    parser.add_argument("--budgets", default=_BUDGETS, metavar="A,B", help=f"({_BUDGETS.replace('%', '%%')})")
    parser.add_argument(
        "--ladder",
        type=_rungs,
        metavar="N",
        help="instead, so many budgets from the smallest to the original's peak",
    )
    parser.add_argument(
        "--onnx",
        nargs="?",
        const="",
        metavar="DIR",
        help="measure the ONNX files of DIR, or those inside onnx",
    )
    parser.add_argument(
        "--batches",
        default=_BATCHES,
        metavar="A,B",
        help=f"of an ONNX file, until the budget fits ({_BATCHES})",
    )
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for each search (60)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed steps of each module (5)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="that compute (1)")
    parser.add_argument("--seed", type=int, default=0, help="of drawn weights and of the generator (0)")
    parser.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, default=True, help="measure operations"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
