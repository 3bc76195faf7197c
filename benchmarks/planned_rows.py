"""Plans a model at several budgets and measures each plan: bytes, time, and numbers against eager's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from irc.compiler.compare import Numbers
from irc.compiler.model_source import Loaded
from irc.ir import BudgetError, IrcError, Plan, UsageError

from .harness import Fitter, Original, Settings, TimeRatio, broken_promises

__all__ = ["HEADER", "Ladder", "Row", "measure_model"]

_NOISE = 0.05


@dataclass(frozen=True)
class Row:
    """One model at one budget.

    Args:
        model: Its name.
        asked: The budget in words.
        refusal: Why there is no plan; then what follows is None.
        minimum_bytes: The smallest budget that a schedule was found for.
        budget_bytes: The budget.
        predicted_bytes: The plan's peak.
        measured_bytes: The fitted module's peak from allocator events, static bytes included.
        baseline_bytes: The predicted peak of the original.
        original_bytes: Its measured peak.
        static_bytes: Parameters, buffers and inputs.
        predicted_time: Predicted time over the original's.
        time: Measured time over the original's.
        numbers: Outputs, gradients and buffers against the original's.
        bound: Lower bound of the overhead.
        gap: Of the plan's time to the best possible, as a fraction.
        proved: Whether the plan is proved optimal.
        strategy: What found the schedule.
        seconds: Of capturing the graph, costs and planning.
        notes: What else was seen.
        failures: What does not hold.
    """

    model: str
    asked: str
    refusal: str | None = None
    minimum_bytes: int | None = None
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    baseline_bytes: int | None = None
    original_bytes: int | None = None
    static_bytes: int | None = None
    predicted_time: float | None = None
    time: TimeRatio | None = None
    numbers: Numbers | None = None
    bound: float | None = None
    gap: float | None = None
    proved: bool | None = None
    strategy: str | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether something does not hold."""
        return bool(self.failures)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        if self.predicted_bytes is None or self.measured_bytes is None or self.original_bytes is None:
            remarks = [f"refused: {self.refusal}", *self._remarks()]
            return (self.model, self.asked, *["-"] * 10, _seconds(self.seconds), "; ".join(remarks))
        assert self.numbers is not None and self.time is not None
        proof = "proved" if self.proved else f"gap {self.gap or 0:.2%}"
        return (
            self.model,
            self.asked,
            _mib(self.budget_bytes),
            _mib(self.predicted_bytes),
            _mib(self.measured_bytes),
            f"{self.predicted_bytes / self.measured_bytes - 1:+.3%}",
            f"{_mib(self.original_bytes)} ({self.measured_bytes / self.original_bytes:.3f})",
            f"{self.predicted_time:.4f}",
            str(self.time),
            f"{1 + (self.bound or 0):.4f} ({proof}, {self.strategy})",
            str(self.numbers),
            "same" if self.numbers.same_generator else "OTHER",
            _seconds(self.seconds),
            "; ".join(self._remarks()) or "ok",
        )

    def _remarks(self) -> list[str]:
        return [*(f"FAILED: {failure}" for failure in self.failures), *self.notes]


HEADER = (
    "model",
    "asked",
    "budget MiB",
    "predicted MiB",
    "measured MiB",
    "predicted/measured",
    "original MiB (ratio)",
    "predicted time",
    "measured time (rounds)",
    "time bound",
    "numbers",
    "generator",
    "capture/cost/plan s",
    "result",
)


@dataclass(frozen=True, slots=True)
class Ladder:
    """Budgets evenly from the smallest to the original's peak.

    A row of a ladder fails also where it is worse than that of a smaller budget: where its plan takes more
    time, or where its measured peak is the smaller of the two.

    Args:
        rungs: How many, two or more.
    """

    rungs: int

    def of(self, fitter: Fitter) -> Iterator[tuple[str, int]]:
        """The budgets, smallest first, in per cent of the original's peak and in bytes."""
        low, high = fitter.smallest_bytes, fitter.planner.baseline_bytes
        for rung in range(self.rungs):
            budget_bytes = low + (high - low) * rung // (self.rungs - 1)
            yield f"{budget_bytes / high:.1%}", budget_bytes


def measure_model(
    name: str, loaded: Loaded, budgets: Iterable[str] | Ladder, settings: Settings
) -> Iterator[Row]:
    """One row for each budget, as it is measured.

    Args:
        name: For the table.
        loaded: The model and the arguments of a step.
        budgets: Texts as `75%`, `4GiB`, or `min`; or a ladder.
        settings: How to measure.
    """
    original = Original(loaded.module, loaded.args, settings.seed)
    try:
        fitter = Fitter(original, settings)
    except IrcError as error:
        yield Row(name, "", refusal=error.brief, failures=(error.brief,))
        return
    if not isinstance(budgets, Ladder):
        for asked in budgets:
            yield _measure(name, asked, asked, original, fitter)
        return
    smaller: Row | None = None
    for asked, budget_bytes in budgets.of(fitter):
        row = _measure(name, asked, budget_bytes, original, fitter)
        if row.measured_bytes is not None:
            if smaller is not None:
                row = replace(row, failures=(*row.failures, *_not_monotone(smaller, row)))
            smaller = row
        yield row


def _not_monotone(smaller: Row, row: Row) -> Iterator[str]:
    """What is worse than at a smaller budget."""
    assert smaller.predicted_time is not None and row.predicted_time is not None
    assert smaller.measured_bytes is not None and row.measured_bytes is not None
    if row.predicted_time > smaller.predicted_time * (1 + 1e-9):
        yield f"predicted time is over that at {smaller.asked}"
    if row.measured_bytes < smaller.measured_bytes:
        yield f"measured peak is below that at {smaller.asked}, {smaller.measured_bytes} bytes"


def _measure(name: str, asked: str, budget: int | str, original: Original, fitter: Fitter) -> Row:
    started = time.perf_counter()
    original_bytes = fitter.static_bytes + original.step_bytes
    try:
        fitted, plan = fitter.fit(budget)
    except BudgetError as error:
        failures = ("the smallest budget of an earlier plan was refused",) if budget == "min" else ()
        return Row(
            model=name,
            asked=asked,
            refusal=f"the smallest budget is {_mib(error.minimum_bytes)} MiB, "
            f"{_mib(fitter.held_bytes)} MiB of it parameters, buffers, inputs and gradients",
            minimum_bytes=error.minimum_bytes,
            original_bytes=original_bytes,
            static_bytes=fitter.static_bytes,
            seconds=_spent(fitter, time.perf_counter() - started),
            failures=failures,
        )
    except UsageError:
        raise
    except IrcError as error:
        return Row(name, asked, error.brief, failures=(error.brief,))
    planned = time.perf_counter() - started
    original.warm_up(fitted)
    numbers = original.numbers(fitted)
    [timed] = original.timed([fitted], fitter.settings.repeats)
    row = Row(
        model=name,
        asked=asked,
        minimum_bytes=plan.minimum_budget_bytes,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=fitter.static_bytes + original.peak_of(fitted),
        baseline_bytes=plan.baseline_peak_bytes,
        original_bytes=original_bytes,
        static_bytes=fitter.static_bytes,
        predicted_time=1 + plan.overhead,
        time=timed.ratio,
        numbers=numbers,
        bound=plan.lower_bound_overhead,
        gap=plan.gap,
        proved=plan.proven_optimal,
        strategy=plan.strategy,
        seconds=_spent(fitter, planned),
    )
    slower = plan.overhead == 0 and min(timed.ratio.best, timed.ratio.median) > 1 + _NOISE
    notes = ("slower than the original, though nothing is computed twice",) if slower else ()
    return replace(row, notes=notes, failures=_failures(row, plan, numbers))


def _failures(row: Row, plan: Plan, numbers: Numbers) -> tuple[str, ...]:
    assert row.measured_bytes is not None and row.original_bytes is not None
    found = broken_promises(row.measured_bytes, plan.peak_bytes, plan.budget_bytes, numbers)
    if row.measured_bytes > row.original_bytes:
        found.append(f"measured {row.measured_bytes} > original {row.original_bytes} bytes")
    return tuple(found)


def _spent(fitter: Fitter, planned: float) -> dict[str, float]:
    return {"capture": fitter.capture_seconds, "cost": fitter.cost_seconds, "plan": planned}


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.2f}"


def _seconds(spent: dict[str, float]) -> str:
    return "/".join(f"{seconds:.1f}" for seconds in spent.values()) or "-"
