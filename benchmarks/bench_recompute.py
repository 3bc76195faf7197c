"""The recomputation benchmark: irc against eager and PyTorch's ways to save memory, in one process.

    python -m benchmarks.bench_recompute --models resnet50,unet --json bench.json --markdown bench.md

PyTorch's methods are `checkpoint_sequential`, checkpoint per block, selective checkpoint per block and
`torch.compile` with each `activation_memory_budget`. irc is planned at shares of eager's peak and at every
peak that PyTorch reached. All modules of a model are alive at once and take turns. The JSON file is written
after each model; with `--journal` an interrupted run goes on.

Exit status 1: irc's numbers differ from the original's, its measured peak is over the predicted one or the
budget, or it has no plan for its smallest budget or for a peak that PyTorch reached.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from irc import __version__
from irc.compiler.comparison.torch_methods import FAMILIES
from irc.compiler.model_source import load
from irc.compiler.pictures import check_picture
from irc.ir import UsageError
from irc.ir.files import write_whole

from .bench_picture import draw
from .bench_points import ModelResult, Scope, measure_model
from .bench_report import render
from .command import chosen, parser_of, run_command, write_json, write_page
from .harness import Settings, hardware, model_source
from .journal import Journal
from .pages import replace_section

__all__ = ["main"]

_FORMAT = "irc-bench-recompute-1"
_SECTION = "bench_recompute"
_MODELS = "resnet50,densenet121,vgg16,unet,gpt2"
_SETTINGS = "1,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1,0"
_RATIOS = "0.9,0.8,0.66,0.6,0.5,0.45,0.4,min"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes what was asked for after each model, and returns the exit status."""
    return run_command(_parser(), _run, argv)


def _run(options: argparse.Namespace) -> int:
    families = tuple(chosen(options.methods, FAMILIES, "method")) if options.methods else ()
    scope = Scope(families, _numbers("--settings", options.settings), _ratios(options.ratios))
    settings = Settings(options.time_limit, options.repeats, options.seed, options.costs)
    names = [name for name in options.models.split(",") if name]
    for name in names:
        model_source(name)  # a misspelt name must not show after hours
    if options.markdown is not None:
        replace_section(options.markdown, _SECTION, "")
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    about = _about(options)
    journal = Journal.open(options.journal, about["measured"], _FORMAT, ModelResult)
    sources = {name.rpartition(":")[2]: model_source(name) for name in names}
    for name, source in sources.items():
        if name not in journal.found:
            journal.append(name, [measure_model(name, load(source), scope, settings, report=_report)])
        _write(options, about, [result for found in journal.found.values() for result in found])
    found = [journal.found[name][0] for name in sources]
    print(render(about, found, None), flush=True)
    return int(any(point.failures for result in found for point in result.points))


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- what is written


def _about(options: argparse.Namespace) -> dict[str, Any]:
    """How it is measured, as JSON-ready data."""
    packages = {"torch": "torch", "OR-Tools": "ortools"}
    versions = {name: metadata.version(package) for name, package in packages.items()}
    wanted = ("methods", "settings", "ratios", "repeats", "time_limit", "threads", "seed", "costs")
    return {
        "command": options.command,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "measured": {
            "hardware": hardware(),
            "versions": {"irc": __version__, "Python": platform.python_version(), **versions},
            "options": {name: getattr(options, name) for name in wanted},
        },
    }


def _write(options: argparse.Namespace, about: dict[str, Any], results: Sequence[ModelResult]) -> None:
    """Writes JSON, picture and Markdown, each as a whole, where the options say."""
    write_json(options.json, {"format": _FORMAT, **about, "models": results})
    if options.plot is not None:
        wall = about["measured"]["options"]["threads"] > 1
        write_whole(options.plot, draw(results, options.plot.suffix.removeprefix("."), wall=wall))
    if options.markdown is not None:
        folder = options.markdown.resolve().parent
        picture = None if options.plot is None else os.path.relpath(options.plot.resolve(), folder)
        write_page(options.markdown, render(about, results, picture), _SECTION)


# ---------------------------------------------------------------------- options


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        found = (-1.0,)
    if not all(0 <= number <= 1 for number in found):
        raise UsageError("IRC400", f"{option} {text!r}", help="give numbers from 0 to 1, as 0.8,0.5")
    return found


def _ratios(text: str) -> tuple[float | str, ...]:
    """Shares of eager's peak, and `min`."""
    parts = [part for part in text.split(",") if part]
    return tuple(part if part == "min" else _numbers("--ratios", part)[0] for part in parts)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "bench_recompute",
        "Measures irc against eager and PyTorch's ways to save memory.",
        models=_MODELS,
        time_limit=60.0,
        repeats=7,
        threads=1,
        seed=0,
        costs="thorough",
        journal=None,
        json=None,
        markdown=None,
    )
    listed = (
        ("--methods", ",".join(FAMILIES[:-1]), f"of PyTorch, {FAMILIES[-1]} too; '' for none"),
        ("--settings", _SETTINGS, "values of activation_memory_budget"),
        ("--ratios", _RATIOS, "irc's budgets as shares of eager's peak above parameters, buffers and inputs"),
    )
    for option, default, help in listed:
        parser.add_argument(option, default=default, metavar="A,B", help=f"{help} ({default})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time over memory there (.svg, .png)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
