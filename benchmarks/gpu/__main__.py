"""The command: checks, PyTorch's methods, the tests that need a GPU, and the page."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from irc import __version__
from irc.compiler.model_source import Loaded
from irc.ir import IrcError, first_line, format_bytes
from irc.passes.costs.measure_device import present_device

from .. import models
from ..bench_points import ModelResult, Point, Scope, measure_model
from ..command import parser_of, run_command, run_rows, write_json, write_page
from ..harness import Settings, hardware
from ..pages import to_markdown
from .checks import CHECKS, Check, Found, deterministic

__all__ = ["Row", "main"]

_SCOPE = Scope(("blocks", "budget", "save_on_cpu"), (0.5,), ("min",))
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Row:
    """One path.

    Args:
        path: Its name.
        found: What the check found; None if it did not run here.
        seconds: How long it took.
    """

    path: str
    found: Found | None
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken."""
        return self.found is not None and bool(self.found.failures)

    def cells(self) -> tuple[str, ...]:
        """The row for a table."""
        if self.found is None:
            return (self.path, "-", "-", "-", "-", "-", "left out: needs a GPU")
        peaks = self.found.budget_bytes, self.found.predicted_bytes, self.found.measured_bytes
        figures = ("-" if nbytes is None else f"{nbytes:,}" for nbytes in peaks)
        return (
            self.path,
            *figures,
            self.found.figures or "-",
            f"{self.seconds:.1f}",
            _outcome(self.found.failures),
        )


def _outcome(failures: Sequence[str]) -> str:
    return "; ".join(f"BROKEN: {failure}" for failure in failures) or "ok"


_HEADER = ("path", "budget, B", "predicted, B", "measured, B", "found", "s", "outcome")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all of it, and returns the exit status: 1 if a promise was broken."""
    parser = parser_of(
        "gpu",
        "Runs every path for a GPU, and names the promises that are broken.",
        only=None,
        time_limit=3.0,
        repeats=5,
        json=None,
        markdown=None,
    )
    parser.add_argument("--device", default="", help="cpu, cuda or cuda:1; a GPU if there is one")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is used first
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    device = present_device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    began = datetime.now(UTC).isoformat(timespec="minutes").replace("T", " ").replace("+00:00", "")
    results: list[ModelResult] = []
    checks = _checks(options, results)

    def page(rows: Sequence[Row]) -> str:
        return _page(f"`{options.command}`", began, device, checks, rows, results)

    rows, text, status = run_rows(_rows(options, device, checks), page)
    write_page(options.markdown, text)
    write_json(options.json, {"began": began, "hardware": _hardware(device), "rows": rows, "models": results})
    return status


def _checks(options: argparse.Namespace, results: list[ModelResult]) -> tuple[Check, ...]:
    return (
        *CHECKS,
        Check(
            "PyTorch's methods",
            lambda device, seconds: _compared(
                device, Settings(seconds, options.repeats, 0, "measured"), results
            ),
            "peaks and times on a GPU, save_on_cpu to pinned memory",
            is_exact=False,
        ),
        Check("tests", _tested, "the tests that are marked gpu", needs_gpu=True),
    )


def _rows(options: argparse.Namespace, device: torch.device, checks: Sequence[Check]) -> Iterator[Row]:
    for check in checks:
        if options.only is None or options.only in check.name:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield _checked(check, device, options.time_limit)


def _checked(check: Check, device: torch.device, seconds: float) -> Row:
    """The row of a check; whatever it stumbles over is a failure."""
    if check.needs_gpu and device.type != "cuda":
        return Row(check.name, None)
    started = time.perf_counter()
    try:
        with deterministic() if check.is_exact else contextlib.nullcontext():
            found = check.run(device, seconds)
    except Exception as error:  # no bad row is left out
        why = error.brief if isinstance(error, IrcError) else f"{type(error).__name__}: {first_line(error)}"
        found = Found("", (why,))
    return Row(check.name, found, time.perf_counter() - started)


def _compared(device: torch.device, settings: Settings, results: list[ModelResult]) -> Found:
    """PyTorch's methods beside irc on a transformer; a small one on a CPU."""
    size = {} if device.type == "cuda" else {"batch": 2, "sequence": 64, "depth": 3, "width": 96, "heads": 4}
    with torch.random.fork_rng():
        module, args = models.gpt2(**size)
    loaded = Loaded(module.to(device), tuple(arg.to(device) for arg in args))
    result = measure_model("gpt2", loaded, _SCOPE, settings)
    results.append(result)
    failures = [f"{point.name}: {failure}" for point in result.points for failure in point.failures]
    return Found(f"{len(result.points)} rows of {result.model}, below", tuple(failures))


def _tested(device: torch.device, seconds: float) -> Found:
    """Runs the tests that are marked `gpu`, in a process of their own."""
    files = [str(path) for path in sorted(_ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip() or done.stderr.strip()).rpartition("\n")[2]
    broken = (f"pytest ended with status {done.returncode}: {last}",) if done.returncode else ()
    return Found(last, broken)


# ---------------------------------------------------------------------- the page


def _hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{hardware()}; no GPU was used"
    about = torch.cuda.get_device_properties(device)
    return (
        f"{about.name}, {format_bytes(about.total_memory)}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}; {hardware()}"
    )


def _page(
    command: str,
    began: str,
    device: torch.device,
    checks: Sequence[Check],
    rows: Sequence[Row],
    results: Sequence[ModelResult],
) -> str:
    broken = [row for row in rows if row.has_failed]
    kept = f"{len(broken)} of {len(rows)} rows broke a promise" if broken else "No promise was broken"
    versions = f"irc {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    parts = [
        "# Paths for a GPU",
        command,
        f"Begun {began} UTC on {_hardware(device)}; {versions}. **{kept}.**",
        _PROMISES,
        to_markdown(_HEADER, [row.cells() for row in rows]),
        *_methods(device, results),
        "## Left out",
        _left_out(device, checks, rows),
        "## On your GPU",
        _HOW,
    ]
    return "\n\n".join(parts)


_PROMISES = """\
Each check but those of PyTorch's methods runs with deterministic algorithms. It holds irc to these
promises: outputs, gradients and buffers are the original's bit for bit; the random generators are left as
eager leaves them, and planning does not move them; the measured peak equals the predicted one to the byte,
and is within the budget. Peaks are those of the allocator's own events, in whole blocks as the device's
allocator gives them out. What its counters say and what it reserves is more, and depends on what ran
before. What cuBLAS keeps from its first use on is there before a step, and not counted."""

_HOW = """\
From a checkout with its test tools (`pip install -e '.[dev]'` beside a torch for CUDA), in under ten
minutes:

```
python -m benchmarks.gpu --markdown gpu.md --json gpu.json
```

The exit status is 1 if a promise was broken: the rows that say BROKEN name it, with numbers. Open an issue
with both files, whatever they say. `--only TEXT` runs the rows whose name has the text, `--device cuda:1`
takes another GPU."""


def _methods(device: torch.device, results: Sequence[ModelResult]) -> Iterator[str]:
    for result in results:
        clock = "GPU" if device.type == "cuda" else "a small model on the CPU, which says nothing of a GPU"
        yield f"## PyTorch's methods beside irc: {result.model}"
        yield (
            f"Peaks above parameters, buffers and inputs; eager takes {result.eager_bytes:,} B. Steps take "
            f"turns with eager's ({clock}). irc is planned at the smallest budget and at each peak that a "
            "method reached."
        )
        header = ("system", "method", "peak, B", "of eager's", "time over eager's", "predicted, B", "outcome")
        yield to_markdown(header, [_method(result, point) for point in result.points])


def _method(result: ModelResult, point: Point) -> tuple[str, ...]:
    outcome = _outcome(point.failures)
    if point.peak_bytes is None:
        return (point.system, point.name, "-", "-", "-", "-", f"refused: {point.refusal}; {outcome}")
    predicted = "-" if point.plan is None else f"{point.plan.peak_bytes:,}"
    wall = "-" if point.times is None else f"{point.times.wall.median:.3f}"
    peak, share = f"{point.peak_bytes:,}", f"{result.share(point.peak_bytes):.3f}"
    return (point.system, point.name, peak, share, wall, predicted, outcome)


def _left_out(device: torch.device, checks: Sequence[Check], rows: Sequence[Row]) -> str:
    """Lists the promises that this run leaves open."""
    ran = {row.path for row in rows if row.found is not None}
    missing = (check for check in checks if device.type != "cuda" or check.name not in ran)
    several = "- More than one GPU: NCCL between ranks, models on several devices."
    recurrent = "- LSTM, GRU and RNN are traced step by step; cuDNN's numbers differ from that by rounding."
    return "\n".join([*(f"- {check.name}: {check.on_gpu}" for check in missing), several, recurrent])


if __name__ == "__main__":
    sys.exit(main())
