"""Measures training with parameters and optimizer state on a disk: memory, time, the weights that come out.

    python -m benchmarks.measure_homes --models gpt2,vgg16 --budgets 70%,40%,min --scratch /scratch

For each model and budget two plans are measured, each in a process of its own: one that has parameters and
the state of AdamW on the device, and one that may have them on the disk. Both take the optimizer's steps
within backward. Beside them the original trains by the ordinary loop, with one AdamW for all parameters;
after the same number of steps all weights are compared. Memory is measured as by `measure_swap`. Exit status
1: a peak of the allocator over the predicted one, or weights that differ.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from irc.compiler.model_source import training_loss
from irc.compiler.optimize import optimize
from irc.compiler.training import measured_peak_bytes
from irc.compiler.written_files import to_markdown, write_whole
from irc.ir import BudgetError, IrcError, format_bytes

from .harness import load_named, threads
from .measure_swap import in_a_process, resident_bytes

__all__ = ["HEADER", "OffloadRow", "main", "measure_row"]

_MODELS = "gpt2"
_BUDGETS = "70%,40%,min"
_KINDS = ("device", "disk")

HEADER = (
    "model",
    "budget",
    "state on",
    "parameters and state",
    "predicted peak",
    "measured peak",
    "resident",
    "on the disk",
    "copied out, back",
    "overhead (bound)",
    "measured time",
    "weights",
)


@dataclass(frozen=True)
class OffloadRow:
    """What one plan did.

    Args:
        model: Which.
        budget: As it was asked for.
        plan: `device` or `disk`.
        failure: Why there is no plan, or "".
        trained_bytes: Parameters, and the state of their optimizers.
        baseline_bytes: Predicted peak of a step that has all on the device and computes nothing twice.
        predicted_bytes: Predicted peak.
        measured_bytes: The allocator's peak.
        resident_bytes: How far the resident set rose in a step, with what was on the device before it; 0
            where the system does not tell.
        offloaded_bytes: What lives on the disk between steps.
        out_bytes: Copied out in a step.
        in_bytes: Copied back.
        overhead: Predicted.
        bound: Proved.
        wall_ratio: Median of measured time over that of the ordinary loop beside it.
        wall_low: Smallest.
        wall_high: Largest.
        is_equal: Whether all weights and losses are those of the ordinary loop, bit for bit.
    """

    model: str
    budget: str
    plan: str
    failure: str = ""
    trained_bytes: int = 0
    baseline_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    resident_bytes: int = 0
    offloaded_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    overhead: float = 0.0
    bound: float = 0.0
    wall_ratio: float = 0.0
    wall_low: float = 0.0
    wall_high: float = 0.0
    is_equal: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken; a budget that does not fit is none."""
        return not self.failure and (self.measured_bytes > self.predicted_bytes or not self.is_equal)

    def cells(self) -> tuple[str, ...]:
        """For a table."""
        if self.failure:
            return (self.model, self.budget, self.plan, "", self.failure, *[""] * (len(HEADER) - 5))

        def part(nbytes: int) -> str:
            return f"{format_bytes(nbytes)} ({nbytes / self.baseline_bytes:.1%})"

        return (
            self.model,
            self.budget,
            self.plan,
            format_bytes(self.trained_bytes),
            part(self.predicted_bytes),
            part(self.measured_bytes),
            part(self.resident_bytes) if self.resident_bytes else "?",
            format_bytes(self.offloaded_bytes) if self.offloaded_bytes else "",
            f"{format_bytes(self.out_bytes)}, {format_bytes(self.in_bytes)}" if self.in_bytes else "",
            f"{self.overhead:.2%} ({self.bound:.2%})",
            f"{self.wall_ratio:.3f} ({self.wall_low:.3f} to {self.wall_high:.3f})",
            "equal" if self.is_equal else "DIFFER",
        )


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def measure_row(
    model: str, budget: str, plan: str, scratch: str, *, time_limit: float, repeats: int, profile: bool
) -> OffloadRow:
    """Plans, trains and measures, in this process.

    Args:
        model: A benchmark model, or what `irc optimize` calls MODEL.
        budget: As of `irc.optimize`, or `min`: the smallest that a schedule was found for.
        plan: `device` or `disk`.
        scratch: The folder of the scratch file.
        time_limit: Seconds for the search.
        repeats: Steps that are timed, after two that are not.
        profile: As of `irc.optimize`.

    Raises:
        IrcError: What loading and planning raise.
    """
    loaded = load_named(model)
    original, args = loaded.module, loaded.args
    ordinary = _adamw([p for p in original.parameters() if p.requires_grad])
    swap = [f"disk:{scratch}", "params,optimizer"] if plan == "disk" else None

    def fitted(nbytes: int | str) -> Any:
        return optimize(
            copy.deepcopy(original),
            args,
            nbytes,
            swap=swap,
            optimizer_in_backward=_adamw,
            loss=training_loss,
            time_limit=time_limit,
            profile=None if profile else False,
        )

    try:
        module = fitted(1 if budget == "min" else budget)
    except BudgetError as error:
        if budget != "min":
            return OffloadRow(model, budget, plan, f"needs {format_bytes(error.minimum_bytes)}")
        module = fitted(error.minimum_bytes)
    ratios, is_equal = _trained(original, ordinary, module, args, repeats)
    found = module.plan
    trained = [p for p in original.parameters() if p.requires_grad]
    return OffloadRow(
        model,
        budget,
        plan,
        trained_bytes=sum(p.nbytes for p in original.parameters()) + _state_bytes(ordinary, trained),
        baseline_bytes=found.baseline_peak_bytes,
        predicted_bytes=found.peak_bytes,
        measured_bytes=measured_peak_bytes(module, args, found.static_bytes, loss=training_loss),
        resident_bytes=resident_bytes(module, args, found.static_bytes),
        offloaded_bytes=found.offloaded_bytes,
        out_bytes=sum(use.out_bytes for use in found.tiers),
        in_bytes=sum(use.in_bytes for use in found.tiers),
        overhead=found.overhead,
        bound=found.lower_bound_overhead,
        wall_ratio=statistics.median(ratios),
        wall_low=min(ratios),
        wall_high=max(ratios),
        is_equal=is_equal,
    )


def _state_bytes(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    held = (tensor for p in parameters for tensor in optimizer.state[p].values())
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))


_WARM = 2


def _trained(
    original: nn.Module, ordinary: Optimizer, module: nn.Module, args: Sequence[Any], repeats: int
) -> tuple[list[float], bool]:
    """Ratios of the times of steps in turns, and whether losses and weights stayed equal."""
    ratios: list[float] = []
    is_equal = True
    for turn in range(_WARM + repeats):
        seconds: list[float] = []
        losses: list[torch.Tensor] = []
        for trained, optimizer in ((original, ordinary), (module, None)):
            torch.manual_seed(turn)
            started = time.perf_counter()
            loss = training_loss(trained(*args))
            loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - started)
            losses.append(loss.detach())
        is_equal &= torch.equal(*losses)
        if turn >= _WARM:
            ratios.append(seconds[1] / seconds[0])
    pairs = zip(original.state_dict().values(), module.state_dict().values(), strict=True)
    return ratios, is_equal and all(torch.equal(mine, its) for mine, its in pairs)


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler would write to the terminal
    options = _parser().parse_args(argv)
    try:
        if options.row is not None:
            with threads(options.threads):
                model, budget, plan = options.row
                row = measure_row(
                    model,
                    budget,
                    plan,
                    options.scratch,
                    time_limit=options.time_limit,
                    repeats=options.repeats,
                    profile=options.profile,
                )
            print(json.dumps(asdict(row)))
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


def _rows(options: argparse.Namespace) -> list[OffloadRow]:
    found: list[OffloadRow] = []
    for model in options.models.split(","):
        for budget in options.budgets.split(","):
            for plan in _KINDS:
                row = OffloadRow(**in_a_process("measure_homes", options, model, budget, plan))
                found.append(row)
                print("  ".join(row.cells()), file=sys.stderr, flush=True)
    return found


def _page(options: argparse.Namespace, rows: Sequence[OffloadRow]) -> str:
    failed = sum(row.has_failed for row in rows)
    return "\n".join(
        [
            to_markdown(HEADER, [row.cells() for row in rows]),
            "",
            f"torch {torch.__version__}, {options.threads} threads, {options.time_limit:g} s for a search, "
            f"{options.repeats} steps in turns with the ordinary loop's, each row in a process of its own. "
            "Peaks are of one step, with what is on the device between steps; percentages are of the "
            "predicted peak of a step with everything on the device and an optimizer in backward. Resident "
            f"is how far the resident set rose. {failed} of {len(rows)} rows failed.",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure_homes",
        description="Measures training with parameters and optimizer state on a disk.",
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
