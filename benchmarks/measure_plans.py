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
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from irc.compiler.compare import TOLERANCE
from irc.compiler.written_files import to_markdown
from irc.ir import UsageError

from .command import parser_of, run_command, run_rows, write_json, write_page
from .harness import Settings, load_named
from .onnx_rows import light_folder, measure_onnx
from .planned_rows import HEADER, Ladder, Row, measure_model

__all__ = ["main"]

_MODELS = "resnet50,unet,gpt2,densenet121,lstm"
_BUDGETS = "100%,90%,75%,60%,min"
_BATCHES = "4"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    return run_command(_parser(), _run, argv)


def _run(options: argparse.Namespace) -> int:
    settings = Settings(options.time_limit, options.repeats, options.seed, options.costs)

    def page(rows: Sequence[Row]) -> str:
        failed = sum(row.has_failed for row in rows)
        return (
            f"{to_markdown(HEADER, [row.cells() for row in rows])}\n\n"
            f"{options.threads} threads, best of {options.repeats} interleaved steps, "
            f"{options.time_limit:g} s for each search. Peaks are of one step, parameters, buffers and "
            f"inputs included. Numbers fail where they differ by more than {TOLERANCE:g} of the largest of "
            f"their kind. {failed} of {len(rows)} rows failed."
        )

    rows, text, status = run_rows(_rows(options, settings), page)
    write_page(options.markdown, text)
    about = {name: getattr(options, name) for name in ("threads", "repeats", "time_limit")}
    data = {"torch": torch.__version__, **about, "tolerance": TOLERANCE, "rows": rows}
    write_json(options.json, data)
    return status


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
    parser = parser_of(
        "measure_plans",
        "Measures plans on models.",
        models=None,
        budgets=_BUDGETS,
        time_limit=60.0,
        repeats=5,
        threads=1,
        seed=0,
        costs="thorough",
        json=None,
        markdown=None,
    )
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
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
