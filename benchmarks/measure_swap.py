"""Measures plans that copy to a scratch file: memory for the allocator and the system, time, numbers.

    python -m benchmarks.measure_swap --models resnet50,gpt2 --budgets 60%,40%,min --scratch /scratch

For each model and budget two plans are measured, each in a process of its own: one that only recomputes, and
one that may copy too. The allocator's peak is that of its events. The system's is how far the resident set of
the process rises within a step; freed memory is given back to it at once (see `mallopt(3)`). Exit status 1:
a peak of the allocator is over the predicted one, or numbers differ from the original's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from irc.ir import BudgetError, format_bytes

from .harness import Fitter, Original, Settings, load_named
from .offload_rows import OffloadRow, measure_offloading, offload_parser, plan_fields, resident_bytes

__all__ = ["HEADER", "SwapRow", "main", "measure_row"]

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
_REMARK = (
    "Peaks are of one step, parameters, buffers and inputs included; percentages are of the original's "
    "predicted peak."
)


@dataclass(frozen=True)
class SwapRow(OffloadRow):
    """One plan that only recomputes (`recompute`), or copies too (`swap`).

    Args:
        predicted_wait_seconds: Predicted time of a step in which copies are waited for.
        wait_seconds: Measured, the mean over the timed steps.
        is_close: Whether the numbers agree within the tolerance.
    """

    predicted_wait_seconds: float = 0.0
    wait_seconds: float = 0.0
    is_close: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the numbers are the original's up to rounding."""
        return self.is_close

    def cells(self) -> tuple[str, ...]:
        """The row for a table."""
        if self.failure:
            return (self.model, self.budget, self.plan, self.failure, *[""] * (len(HEADER) - 4))
        waited = f"{self.wait_seconds * 1e3:.3g} ms ({self.predicted_wait_seconds * 1e3:.3g})"
        numbers = "equal" if self.is_equal else "agree" if self.agrees else "DIFFER"
        about = (self.model, self.budget, self.plan, *self.peaks(), self.copies())
        return (*about, waited if self.out_bytes else "", *self.times(), numbers)


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
    resident = resident_bytes(module, original.args, static_bytes)
    numbers = original.numbers(module)
    waited = _waited_seconds(module)
    (timed,) = original.timed([module], settings.repeats)
    return SwapRow(
        model,
        budget,
        plan,
        **plan_fields(found),
        measured_bytes=peak_bytes,
        resident_bytes=resident,
        wall_ratio=timed.wall.median,
        wall_low=timed.wall.low,
        wall_high=timed.wall.high,
        is_equal=numbers.bit_equal,
        predicted_wait_seconds=found.exposed_seconds,
        wait_seconds=(_waited_seconds(module) - waited) / settings.repeats,
        is_close=numbers.agrees,
    )


def _waited_seconds(module: Any) -> float:
    return sum(traffic.waited_seconds for traffic in getattr(module, "irc_traffic", {}).values())


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""

    def measure(model: str, budget: str, plan: str, options: argparse.Namespace) -> SwapRow:
        settings = Settings(options.time_limit, options.repeats, costs=options.costs)
        return measure_row(model, budget, plan, options.scratch, settings)

    parser = offload_parser(
        "measure_swap", "Measures plans that copy to a scratch file.", "resnet50,gpt2", "80%,60%,40%,min"
    )
    return measure_offloading(parser, ("recompute", "swap"), SwapRow, HEADER, measure, _REMARK, argv)


if __name__ == "__main__":
    raise SystemExit(main())
