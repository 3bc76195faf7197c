"""Measures plans that copy to a scratch file: memory for the allocator and the system, time, numbers.

    python -m benchmarks.measure_swap --models resnet50,gpt2 --budgets 60%,40%,min --scratch /scratch

For each model and budget two plans are measured, each in a process of its own: one that only recomputes, and
one that may copy too. The allocator's peak is that of its events. The system's is how far the resident set of
the process rises within a step; freed memory is given back to it at once (see `mallopt(3)`). Exit status 1:
a peak of the allocator over the predicted one, or numbers that differ from the original's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from irc.compiler.written_files import to_markdown, write_whole
from irc.ir import BudgetError, IrcError, UsageError, format_bytes

from .harness import Fitter, Original, Settings, load_named, step_of, threads

__all__ = ["HEADER", "SwapRow", "in_a_process", "main", "measure_row", "resident_bytes"]

_MODELS = "resnet50,gpt2"
_BUDGETS = "80%,60%,40%,min"
_KINDS = ("recompute", "swap")
_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""Settings of glibc by which freed memory leaves the process at once."""

HEADER = (
    "model",
    "budget",
    "plan",
    "predicted peak",
    "measured peak",
    "resident",
    "copied out, back",
    "waited (predicted)",
    "overhead (bound)",
    "measured time",
    "numbers",
)


@dataclass(frozen=True)
class SwapRow:
    """What one plan did.

    Args:
        model: Which.
        budget: As it was asked for.
        plan: `recompute` or `swap`.
        failure: Why there is no plan, or "".
        budget_bytes: What was asked for.
        baseline_bytes: Predicted peak of the original.
        predicted_bytes: Predicted peak.
        measured_bytes: The allocator's peak.
        resident_bytes: How far the resident set rose in a step, with what was there before it; 0 where the
            system does not tell.
        original_resident_bytes: The same of the original.
        out_bytes: Copied out in a step.
        in_bytes: Copied back.
        predicted_wait_seconds: Predicted time of a step in which copies are waited for.
        wait_seconds: Measured, the mean over the timed steps.
        overhead: Predicted.
        bound: Proved.
        wall_ratio: Median of measured time over the original's.
        wall_low: Smallest.
        wall_high: Largest.
        is_equal: Whether all numbers of a step are the original's, bit for bit.
        agrees: Whether they agree within the tolerance.
    """

    model: str
    budget: str
    plan: str
    failure: str = ""
    budget_bytes: int = 0
    baseline_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    resident_bytes: int = 0
    original_resident_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    predicted_wait_seconds: float = 0.0
    wait_seconds: float = 0.0
    overhead: float = 0.0
    bound: float = 0.0
    wall_ratio: float = 0.0
    wall_low: float = 0.0
    wall_high: float = 0.0
    is_equal: bool = False
    agrees: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken; a budget that does not fit is none."""
        return not self.failure and (self.measured_bytes > self.predicted_bytes or not self.agrees)

    def cells(self) -> tuple[str, ...]:
        """For a table."""
        if self.failure:
            return (self.model, self.budget, self.plan, self.failure, *[""] * (len(HEADER) - 4))

        def part(nbytes: int) -> str:
            return f"{format_bytes(nbytes)} ({nbytes / self.baseline_bytes:.1%})"

        return (
            self.model,
            self.budget,
            self.plan,
            part(self.predicted_bytes),
            part(self.measured_bytes),
            part(self.resident_bytes) if self.resident_bytes else "?",
            f"{format_bytes(self.out_bytes)}, {format_bytes(self.in_bytes)}" if self.out_bytes else "",
            f"{self.wait_seconds * 1e3:.3g} ms ({self.predicted_wait_seconds * 1e3:.3g})"
            if self.out_bytes
            else "",
            f"{self.overhead:.2%} ({self.bound:.2%})",
            f"{self.wall_ratio:.3f} ({self.wall_low:.3f} to {self.wall_high:.3f})",
            "equal" if self.is_equal else "agree" if self.agrees else "DIFFER",
        )


def measure_row(model: str, budget: str, plan: str, scratch: str, settings: Settings) -> SwapRow:
    """Plans and measures, in this process.

    Args:
        model: A benchmark model, or what `irc optimize` calls MODEL.
        budget: As of `irc.optimize`, or `min`.
        plan: `recompute` or `swap`.
        scratch: The folder of the scratch file.
        settings: How to search and measure.

    Raises:
        IrcError: What loading and capturing raise.
    """
    loaded = load_named(model)
    original = Original(loaded.module, loaded.args, settings.seed)
    fitter = Fitter(original, settings, f"disk:{scratch}" if plan == "swap" else None)
    try:
        module, found = fitter.fit(budget)
    except BudgetError as error:
        return SwapRow(model, budget, plan, f"needs {format_bytes(error.minimum_bytes)}")
    original.warm_up(module)
    static_bytes = fitter.static_bytes
    peak_bytes = original.peak_of(module) + static_bytes
    resident = [resident_bytes(m, original.args, static_bytes) for m in (original.module, module)]
    numbers = original.numbers(module)
    before: Any = getattr(module, "irc_traffic", {})
    waited = sum(traffic.waited_seconds for traffic in before.values())
    (timed,) = original.timed([module], settings.repeats)
    after: Any = getattr(module, "irc_traffic", {})
    waited = sum(traffic.waited_seconds for traffic in after.values()) - waited
    return SwapRow(
        model,
        budget,
        plan,
        budget_bytes=found.budget_bytes,
        baseline_bytes=found.baseline_peak_bytes,
        predicted_bytes=found.peak_bytes,
        measured_bytes=peak_bytes,
        resident_bytes=resident[1],
        original_resident_bytes=resident[0],
        out_bytes=sum(use.out_bytes for use in found.tiers),
        in_bytes=sum(use.in_bytes for use in found.tiers),
        predicted_wait_seconds=found.exposed_seconds,
        wait_seconds=waited / settings.repeats,
        overhead=found.overhead,
        bound=found.lower_bound_overhead,
        wall_ratio=timed.wall.median,
        wall_low=timed.wall.low,
        wall_high=timed.wall.high,
        is_equal=numbers.bit_equal,
        agrees=numbers.agrees,
    )


def resident_bytes(module: torch.nn.Module, args: Sequence[Any], static_bytes: int) -> int:
    """The bytes before a step and how far the resident set rises in it; 0 where the system does not tell."""
    step = step_of(module, args)
    step()
    module.zero_grad(set_to_none=True)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
        before = _status("VmRSS")
        step()
        return _status("VmHWM") - before + static_bytes
    except (OSError, LookupError):
        return 0
    finally:
        module.zero_grad(set_to_none=True)


def _status(name: str) -> int:
    rows = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return int(rows[name].split()[0]) << 10


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler would write to the terminal
    options = _parser().parse_args(argv)
    try:
        if options.row is not None:
            model, budget, plan = options.row
            settings = Settings(options.time_limit, options.repeats, profile=options.profile)
            with threads(options.threads):
                print(json.dumps(asdict(measure_row(model, budget, plan, options.scratch, settings))))
            return 0
        rows = _rows(options)
        text = _page(options, rows)
        print(text, flush=True)
        if options.markdown is not None:
            write_whole(options.markdown, text + "\n")
        if options.json is not None:
            write_whole(options.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    except IrcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 1 if any(row.has_failed for row in rows) else 0


def _rows(options: argparse.Namespace) -> list[SwapRow]:
    found: list[SwapRow] = []
    for model in options.models.split(","):
        for budget in options.budgets.split(","):
            for plan in _KINDS:
                row = SwapRow(**in_a_process("measure_swap", options, model, budget, plan))
                found.append(row)
                print("  ".join(row.cells()), file=sys.stderr, flush=True)
    return found


def in_a_process(
    tool: str, options: argparse.Namespace, model: str, budget: str, plan: str
) -> dict[str, Any]:
    """What a tool prints of one row, measured in a process of its own that gives freed memory back at once.

    Raises:
        UsageError: IRC452 when the process fails.
    """
    command = [sys.executable, "-m", f"benchmarks.{tool}", "--row", model, budget, plan]
    command += ["--scratch", options.scratch, "--time-limit", str(options.time_limit)]
    command += ["--repeats", str(options.repeats), "--threads", str(options.threads)]
    command += [] if options.profile else ["--no-profile"]
    done = subprocess.run(
        command, env={**os.environ, **_AT_ONCE}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise UsageError(
            "IRC452", f"measuring {model} at {budget} ended with status {done.returncode}", help="see above"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _page(options: argparse.Namespace, rows: Sequence[SwapRow]) -> str:
    failed = sum(row.has_failed for row in rows)
    return "\n".join(
        [
            to_markdown(HEADER, [row.cells() for row in rows]),
            "",
            f"torch {torch.__version__}, {options.threads} threads, {options.time_limit:g} s for a search, "
            f"{options.repeats} steps in turns with the original's, each row in a process of its own. Peaks "
            "are of one step, parameters, buffers and inputs included; percentages are of the original's "
            "predicted peak. Resident is how far the resident set rose. "
            f"{failed} of {len(rows)} rows failed.",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure_swap", description="Measures plans that copy to a scratch file."
    )
    parser.add_argument("--models", default=_MODELS, metavar="A,B", help=f"({_MODELS})")
    parser.add_argument("--budgets", default=_BUDGETS, metavar="A,B", help=f"({_BUDGETS.replace('%', '%%')})")
    parser.add_argument(
        "--scratch", default=tempfile.gettempdir(), metavar="DIR", help="for the scratch file"
    )
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="for a search (60)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed steps (5)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="that compute (1)")
    parser.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, default=True, help="measure operations"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
