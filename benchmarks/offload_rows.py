"""Rows of plans that copy to a scratch file, each measured in a process of its own."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from irc.compiler.written_files import to_markdown
from irc.ir import Plan, format_bytes

from .command import parser_of, run_command, run_row_alone, run_rows, write_json, write_page
from .harness import step_of

__all__ = ["OffloadRow", "measure_offloading", "offload_parser", "plan_fields", "resident_bytes"]


@dataclass(frozen=True)
class OffloadRow:
    """The memory, the copies and the time of one plan.

    Args:
        model: The model's name.
        budget: As it was asked for.
        plan: The kind of plan.
        failure: Why there is no plan, or "".
        budget_bytes: The budget.
        baseline_bytes: Predicted peak of the original.
        predicted_bytes: Predicted peak.
        measured_bytes: The allocator's peak.
        resident_bytes: How far the resident set rises in a step, with what is on the device before it; 0 if
            the system does not tell.
        out_bytes: Copied out in a step.
        in_bytes: Copied back.
        overhead: Predicted.
        bound: Proved.
        wall_ratio: Median of measured time over the original's.
        wall_low: Smallest.
        wall_high: Largest.
        is_equal: Whether all compared numbers are the original's, bit for bit.
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
    out_bytes: int = 0
    in_bytes: int = 0
    overhead: float = 0.0
    bound: float = 0.0
    wall_ratio: float = 0.0
    wall_low: float = 0.0
    wall_high: float = 0.0
    is_equal: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the numbers are right."""
        return self.is_equal

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken; a budget that does not fit breaks none."""
        return not self.failure and (self.measured_bytes > self.predicted_bytes or not self.agrees)

    def cells(self) -> tuple[str, ...]:
        """The row for a table, below the header of its benchmark."""
        raise NotImplementedError

    def peaks(self) -> tuple[str, str, str]:
        """The cells of the predicted, the measured and the resident peak."""
        resident = self._part(self.resident_bytes) if self.resident_bytes else "?"
        return self._part(self.predicted_bytes), self._part(self.measured_bytes), resident

    def times(self) -> tuple[str, str]:
        """The cells of the overhead and of the measured time."""
        spread = f"({self.wall_low:.3f} to {self.wall_high:.3f})"
        return f"{self.overhead:.2%} ({self.bound:.2%})", f"{self.wall_ratio:.3f} {spread}"

    def copies(self) -> str:
        """The cell of what is copied out and back."""
        copied = self.out_bytes or self.in_bytes
        return f"{format_bytes(self.out_bytes)}, {format_bytes(self.in_bytes)}" if copied else ""

    def _part(self, nbytes: int) -> str:
        return f"{format_bytes(nbytes)} ({nbytes / self.baseline_bytes:.1%})"


_Row = TypeVar("_Row", bound=OffloadRow)


def plan_fields(plan: Plan) -> dict[str, Any]:
    """The fields of a row that a plan tells."""
    return {
        "budget_bytes": plan.budget_bytes,
        "baseline_bytes": plan.baseline_peak_bytes,
        "predicted_bytes": plan.peak_bytes,
        "out_bytes": sum(use.out_bytes for use in plan.tiers),
        "in_bytes": sum(use.in_bytes for use in plan.tiers),
        "overhead": plan.overhead,
        "bound": plan.lower_bound_overhead,
    }


def resident_bytes(module: nn.Module, args: Sequence[Any], static_bytes: int) -> int:
    """The bytes before a step and how far the resident set rises in it; 0 if the system does not tell."""
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


def measure_offloading(
    parser: argparse.ArgumentParser,
    kinds: Sequence[str],
    row_type: type[_Row],
    header: Sequence[str],
    measure: Callable[[str, str, str, argparse.Namespace], _Row],
    remark: str,
    argv: Sequence[str] | None,
) -> int:
    """Runs a benchmark of plans that copy, and returns its exit status.

    Args:
        parser: From `offload_parser`.
        kinds: The kinds of plans that are measured for each model and budget.
        row_type: The class of the rows.
        header: Of the table.
        measure: Measures the row of a model, a budget and a kind in this process.
        remark: What the peaks are of.
        argv: The arguments; those of the process if None.
    """
    name = parser.prog.rpartition(".")[2]

    def rows(options: argparse.Namespace) -> Iterator[_Row]:
        for model in options.models.split(","):
            for budget in options.budgets.split(","):
                for kind in kinds:
                    yield row_type(**run_row_alone(options, name, (model, budget, kind)))

    def run(options: argparse.Namespace) -> int:
        if options.row is not None:
            model, budget, kind = options.row
            print(json.dumps(asdict(measure(model, budget, kind, options))))
            return 0

        def page(found: Sequence[_Row]) -> str:
            failed = sum(row.has_failed for row in found)
            table = to_markdown(header, [row.cells() for row in found])
            return (
                f"{table}\n\ntorch {torch.__version__}, {options.threads} threads, {options.time_limit:g} s "
                f"for a search, {options.repeats} steps in turns with the original's, each row in a process "
                f"of its own. {remark} Resident is how far the resident set rose. {failed} of {len(found)} "
                "rows failed."
            )

        found, text, status = run_rows(rows(options), page)
        write_page(options.markdown, text)
        write_json(options.json, found)
        return status

    return run_command(parser, run, argv)


def offload_parser(name: str, description: str, models: str, budgets: str) -> argparse.ArgumentParser:
    """The parser of a benchmark of plans that copy.

    Args:
        name: The module below `benchmarks`.
        description: One line.
        models: Those that are measured by default.
        budgets: The same.
    """
    return parser_of(
        name,
        description,
        models=models,
        budgets=budgets,
        scratch=tempfile.gettempdir(),
        time_limit=60.0,
        repeats=5,
        threads=1,
        costs="thorough",
        json=None,
        markdown=None,
        row=None,
    )
