"""One strategy at one budget: its plan, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Cell", "Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one plan, or of one of PyTorch's own methods.

    Args:
        peak_bytes: The peak of a step, from allocator events, static bytes included.
        overhead: The median over steps in turns of its time over the original's, less one.
        agrees: Whether outputs, gradients, buffers and generators were the original's, up to rounding.
    """

    peak_bytes: int
    overhead: float
    agrees: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """One strategy at one budget. All bytes include the static ones.

    PyTorch's own methods have no prediction: they are measured.

    Args:
        strategy: Its name.
        source: Who published it.
        budget_bytes: What a step may take.
        plan_seconds: Seconds of the processor for planning, capture and measuring aside; None without a plan
            to look for.
        peak_bytes: Predicted peak of a step under the plan; None if there is no plan.
        overhead: Its extra time, as a fraction of the baseline's.
        bound: No schedule within the budget, with this order of backward, has a smaller overhead.
        measured: Its measurements, if there are any.
        smallest_bytes: The least peak of its schedules, where all are over the budget.
        code: Of the refusal; empty if there is a plan.
        refusal: The refusal in words.
    """

    strategy: str
    source: str
    budget_bytes: int
    plan_seconds: float | None
    peak_bytes: int | None = None
    overhead: float | None = None
    bound: float = 0.0
    measured: Measured | None = None
    smallest_bytes: int | None = None
    code: str = ""
    refusal: str = ""

    @property
    def shown(self) -> tuple[int, float] | None:
        """Peak and overhead: predicted, measured where nothing is predicted, None where nothing fits."""
        if self.peak_bytes is not None and self.overhead is not None:
            return self.peak_bytes, self.overhead
        return None if self.measured is None else (self.measured.peak_bytes, self.measured.overhead)

    @property
    def gap(self) -> float | None:
        """The time above the bound, as a fraction of the bound's time; None without a plan."""
        return None if self.overhead is None else (self.overhead - self.bound) / (1 + self.bound)

    def above(self, bound: float) -> Cell:
        """The same with a bound that another plan proved, if that is larger."""
        return replace(self, bound=max(self.bound, bound))
