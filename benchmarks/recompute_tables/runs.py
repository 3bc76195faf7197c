"""Trains the networks of optimal gradient checkpoint search on the CPU, by its plan and by irc's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from irc.ir import BudgetError, TimeLimitError

from ..harness import Fitter, Original, Settings, broken_promises
from ..pages import to_markdown
from .planned import Maker, benchmark_model
from .published import Searched

__all__ = ["Run", "Trained", "runs_section", "trained_row"]

_PLANS = {"ogc": "ogc", "their cut": "irc", "smallest": "irc, smallest"}


@dataclass(frozen=True, slots=True)
class Run:
    """One plan that was run. Bytes are above parameters, buffers and inputs.

    Args:
        question: `ogc`, `their cut`, or `smallest` where nothing is found for that cut.
        predicted_bytes: The predicted peak of a step.
        measured_bytes: The measured one, by the allocator's events.
        overhead: The predicted time that it adds, as a part of the original's.
        ratio: The measured time of a step over the original's: the median of steps in turns.
        low: The smallest of the ratios.
        high: The largest.
        faults: The promises that it broke.
    """

    question: str
    predicted_bytes: int
    measured_bytes: int
    overhead: float
    ratio: float
    low: float
    high: float
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """The runs of one network.

    Args:
        batch: Images in a step.
        original_bytes: The measured peak of the original step.
        step_seconds: The median time of the original step, by the processor.
        runs: The plans that were run.
    """

    batch: int
    original_bytes: int
    step_seconds: float
    runs: tuple[Run, ...]


def trained_row(row: Searched, seconds: float, repeats: int, make: Maker = benchmark_model) -> list[Trained]:
    """Runs both plans of one network beside the original.

    Args:
        row: The published row.
        seconds: For the search.
        repeats: Timed steps of each plan, in turns with the original.
        make: Makes the network.
    """
    module, args = make(row.model, batch=row.run_batch, size=row.size)
    original = Original(module, args)
    fitter = Fitter(original, Settings(time_limit=seconds, costs="measured"))
    budget_bytes = fitter.static_bytes + int((1 - row.cut) * original.step_bytes)
    try:
        plans = [("their cut", *fitter.fit(budget_bytes))]
    except (BudgetError, TimeLimitError):
        plans = [("smallest", *fitter.fit("min"))]
    plans.insert(0, ("ogc", *fitter.fit(fitter.planner.baseline_bytes, "ogc")))
    modules = [module for _, module, _ in plans]
    for fitted in modules:
        original.warm_up(fitted)
    timed = original.timed(modules, repeats)
    runs: list[Run] = []
    for (question, fitted, plan), times in zip(plans, timed, strict=True):
        measured_bytes = original.peak_of(fitted)
        predicted_bytes = plan.peak_bytes - fitter.static_bytes
        room_bytes = plan.budget_bytes - fitter.static_bytes
        faults = broken_promises(measured_bytes, predicted_bytes, room_bytes, original.numbers(fitted))
        ratio = times.ratio
        runs.append(
            Run(
                question,
                predicted_bytes,
                measured_bytes,
                plan.overhead,
                ratio.median,
                ratio.low,
                ratio.high,
                tuple(faults),
            )
        )
    step_seconds = statistics.median(step.cpu for step in timed[0].beside)
    return [Trained(row.run_batch, original.step_bytes, step_seconds, tuple(runs))]


def runs_section(rows: Sequence[Searched], found: Mapping[str, Sequence[Trained]]) -> str:
    """The runs as a table, and whether a promise was broken."""
    missing = [row.model for row in rows if row.model not in found]
    lines = [line for row in rows if row.model in found for line in _lines(row, found[row.model][0])]
    faults = [
        f"{row.model}: {fault}"
        for row in rows
        for trained in found.get(row.model, ())
        for run in trained.runs
        for fault in run.faults
    ]
    header = (
        *("network", "batch", "step MiB", "s", "published cut", "added", "plan", "cut"),
        *("peak MiB, predicted", "measured", "added, predicted", "measured", "from", "to"),
    )
    parts = [f"Not run yet: {', '.join(missing)}." if missing else "", to_markdown(header, lines)]
    runs = [run for row in rows for trained in found.get(row.model, ()) for run in trained.runs]
    equal = sum(run.measured_bytes == run.predicted_bytes for run in runs)
    parts.append(f"The measured peak is the predicted one, to the byte, in {equal} of {len(runs)} runs.")
    parts.append("Broken promises: " + ("; ".join(faults) if faults else "none") + ".")
    return "\n\n".join(part for part in parts if part)


def _lines(row: Searched, trained: Trained) -> Iterator[list[str]]:
    for run in trained.runs:
        yield [
            row.model,
            str(trained.batch),
            f"{trained.original_bytes / 2**20:,.0f}",
            f"{trained.step_seconds:.2f}",
            f"{row.cut:.0%}",
            f"{row.overhead:.0%}",
            _PLANS[run.question],
            f"{1 - run.measured_bytes / trained.original_bytes:.0%}",
            f"{run.predicted_bytes / 2**20:,.1f}",
            f"{run.measured_bytes / 2**20:,.1f}",
            f"{run.overhead:.1%}",
            *(f"{ratio - 1:.1%}" for ratio in (run.ratio, run.low, run.high)),
        ]
