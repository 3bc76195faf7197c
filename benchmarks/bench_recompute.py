"""The recomputation benchmark: irc against eager and PyTorch's ways to save memory, in one process.

    python -m benchmarks.bench_recompute --models resnet50,unet --json bench.json --markdown bench.md

PyTorch's methods are `checkpoint_sequential`, checkpoint per block, selective checkpoint per block and
`torch.compile` with each `activation_memory_budget`. irc is planned at shares of eager's peak and at every
peak that PyTorch reached. All modules of a model are alive at once and take turns. The JSON file is written
after each model; `--resume` keeps the models that it holds already.

Exit status 1: irc's numbers differ from the original's, its measured peak is over the predicted one or the
budget, or it has no plan for its smallest budget or for a peak that PyTorch reached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from irc import __version__
from irc.compiler.model_source import load
from irc.compiler.pictures import check_picture
from irc.compiler.written_files import check_folder, replace_section, write_whole
from irc.ir import IrcError, UsageError, format_bytes

from .bench_picture import draw
from .bench_points import ModelResult, Scope, measure_model
from .bench_report import render
from .harness import Settings, model_source, threads
from .torch_methods import FAMILIES

__all__ = ["main"]

_FORMAT = "irc-bench-recompute-1"
_SECTION = "bench_recompute"
_MODELS = "resnet50,densenet121,vgg16,unet,gpt2"
_SETTINGS = "1,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1,0"
_RATIOS = "0.9,0.8,0.66,0.6,0.5,0.45,0.4,min"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes what was asked for after each model, and returns the exit status."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler would write to the terminal
    given = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(given)
    try:
        with threads(options.threads):
            results = _run(options, shlex.join(["python", "-m", "benchmarks.bench_recompute", *given]))
    except IrcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 1 if any(point.failures for result in results for point in result.points) else 0


def _run(options: argparse.Namespace, command: str) -> Sequence[ModelResult]:
    scope = Scope(
        _families(options.methods), _numbers("--settings", options.settings), _ratios(options.ratios)
    )
    settings = Settings(options.time_limit, options.repeats, options.seed, options.profile)
    names = [name for name in options.models.split(",") if name]
    for name in names:
        model_source(name)  # a misspelt name must not show after hours
    for path in (options.json, options.markdown, options.plot):
        if path is not None:
            check_folder(path)
    if options.markdown is not None:
        replace_section(options.markdown, _SECTION, "")
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    about = _about(options, command)
    done: dict[str, ModelResult] = {}
    if options.resume:
        about, done = _resumed(options.json, about)
    results: list[ModelResult] = []
    for name in names:
        short = name.rpartition(":")[2]
        if short not in done:
            done[short] = measure_model(short, load(model_source(name)), scope, settings, report=_report)
        results.append(done[short])
        _write(options, about, list(done.values()))
    print(render(about, results, None), flush=True)
    return results


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- what is written


def _about(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """How it is measured, as JSON-ready data."""
    packages = {"torch": "torch", "OR-Tools": "ortools"}
    versions = {name: metadata.version(package) for name, package in packages.items()}
    wanted = ("methods", "settings", "ratios", "repeats", "time_limit", "threads", "seed", "profile")
    return {
        "command": command,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": _hardware(),
        "versions": {"irc": __version__, "Python": platform.python_version(), **versions},
        "options": {name: getattr(options, name) for name in wanted},
    }


def _hardware() -> str:
    """Processor, cores that this process may use, memory and operating system."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        processor = next((value.strip() for key, _, value in lines if key.strip() == "model name"), processor)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{processor}, {usable} cores, {format_bytes(memory)}, {platform.system()} {platform.release()}"


def _write(options: argparse.Namespace, about: dict[str, Any], results: Sequence[ModelResult]) -> None:
    """Writes JSON, picture and Markdown, each as a whole, where the options say."""
    if options.json is not None:
        data = {"format": _FORMAT, **about, "models": [result.to_json() for result in results]}
        write_whole(options.json, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if options.plot is not None:
        wall = about["options"]["threads"] > 1
        write_whole(options.plot, draw(results, options.plot.suffix.removeprefix("."), wall=wall))
    if options.markdown is not None:
        folder = options.markdown.resolve().parent
        picture = None if options.plot is None else os.path.relpath(options.plot.resolve(), folder)
        text = replace_section(options.markdown, _SECTION, render(about, results, picture))
        write_whole(options.markdown, text)


def _resumed(path: Path | None, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, ModelResult]]:
    """How the models in the file were measured, and the models.

    Raises:
        UsageError: IRC436 when the file is of another run.
    """
    if path is None:
        raise UsageError("IRC400", "--resume needs --json", help="name the file of the run to go on with")
    if not path.exists():
        return about, {}
    help = "use the same options on the same machine, or leave --resume out to begin anew"
    try:
        data = json.loads(path.read_text())
        if data["format"] != _FORMAT:
            raise KeyError("format")
        before = {key: data[key] for key in about}
        done = {result.model: result for result in map(ModelResult.from_json, data["models"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError("IRC436", f"{path} is no file of this benchmark: {error}", help=help) from error
    for key in ("hardware", "versions", "options"):
        if before[key] != about[key]:
            raise UsageError(
                "IRC436", f"{path} was measured with {key} {before[key]}, not {about[key]}", help=help
            )
    return before, done


# ---------------------------------------------------------------------- options


def _families(text: str) -> tuple[str, ...]:
    found = tuple(name for name in text.split(",") if name)
    if unknown := [name for name in found if name not in FAMILIES]:
        raise UsageError(
            "IRC400", f"--methods {unknown[0]!r} is no method", help=f"choose among {', '.join(FAMILIES)}"
        )
    return found


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_recompute",
        description="Measures irc against eager and PyTorch's ways to save memory.",
    )
    parser.add_argument(
        "--models", default=_MODELS, metavar="A,B", help=f"names or package.module:factory ({_MODELS})"
    )
    parser.add_argument(
        "--methods",
        default=",".join(FAMILIES),
        metavar="A,B",
        help=f"of PyTorch ({','.join(FAMILIES)}); '' for none",
    )
    parser.add_argument(
        "--settings",
        default=_SETTINGS,
        metavar="A,B",
        help=f"values of activation_memory_budget ({_SETTINGS})",
    )
    parser.add_argument(
        "--ratios",
        default=_RATIOS,
        metavar="A,B",
        help=f"irc's budgets as shares of eager's peak above parameters, buffers and inputs ({_RATIOS})",
    )
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for each search (60)"
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds of timed steps (7)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="that compute (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the generator before compared steps (0)")
    parser.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, default=True, help="measure operations"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all points there, model by model")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help=f"write the tables there, between the markers {_SECTION} where it exists",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time over memory there (.svg, .png)")
    parser.add_argument("--resume", action="store_true", help="keep the models that the JSON file holds")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
