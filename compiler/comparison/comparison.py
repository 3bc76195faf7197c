"""The outcome of a comparison, and its written forms."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...ir import printable
from ...ir.units import memory_unit
from .. import reports
from .cells import Cell, Measured

__all__ = ["FILES", "Comparison"]

_STEM = "comparison"
FILES = reports.files_of(_STEM)
"""The files that `Comparison.save` writes."""

_FORMAT = "irc-comparison-1"


@dataclass(frozen=True)
class Comparison:
    """Strategies at the same budgets, the largest budget first.

    Args:
        model: The model's name.
        baseline_bytes: Peak of a step as eager runs it.
        static_bytes: Parameters, buffers, inputs and constants.
        floor_bytes: No schedule with this order of backward fits into less.
        minimum_bytes: The smallest budget that a schedule was found for.
        step_seconds: Predicted time of the baseline's step.
        costs: Where seconds and workspaces come from.
        remark: A remark on all of it; empty if there is none.
        cells: The strategies at the budgets.
    """

    model: str
    baseline_bytes: int
    static_bytes: int
    floor_bytes: int
    minimum_bytes: int
    step_seconds: float
    costs: str
    remark: str
    cells: tuple[Cell, ...]

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budgets in bytes, the largest first."""
        return tuple(dict.fromkeys(cell.budget_bytes for cell in self.cells))

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies, in the order in which they were asked for."""
        return tuple(dict.fromkeys(cell.strategy for cell in self.cells))

    def table(self) -> str:
        """The comparison for a person: at each budget a row for each that fits, and who needs more."""
        _, unit, _ = memory_unit(self.baseline_bytes)
        lines = [
            f"{printable(self.model)}: baseline {self._amount(self.baseline_bytes)} {unit}, smallest "
            f"{self._amount(self.minimum_bytes)}, a step takes {self.step_seconds * 1e3:.4g} ms (costs "
            f"{printable(self.costs)})"
        ]
        if self.remark:
            lines.append(self.remark)
        for budget_bytes in self.budgets:
            share = budget_bytes / max(self.baseline_bytes, 1)
            lines += ["", f"budget {self._amount(budget_bytes)} {unit} ({share:.1%})"]
            lines += self._rows([cell for cell in self.cells if cell.budget_bytes == budget_bytes], unit)
        if any(cell.measured is not None and not cell.measured.agrees for cell in self.cells):
            lines += ["", "*: other numbers than the original's"]
        refusals = {cell.strategy: cell for cell in self.cells if cell.code.startswith("IRC4")}
        if refusals:
            lines += ["", *(f"{c.strategy}: {c.code}, {printable(c.refusal)}" for c in refusals.values())]
        return "\n".join(lines)

    def _rows(self, cells: Sequence[Cell], unit: str) -> Iterator[str]:
        rows: list[tuple[str, ...]] = [("strategy", f"peak {unit}", "overhead", "from bound", "planned")]
        if any(cell.measured is not None for cell in cells):
            rows[0] += ("measured peak", "measured overhead")
        for cell in cells:
            if cell.shown is None:
                continue
            predicted = ("", "", "", "")
            if cell.peak_bytes is not None and cell.overhead is not None and cell.gap is not None:
                times = (f"{cell.overhead:.2%}", f"{cell.gap:.2%}", f"{cell.plan_seconds or 0.0:.1f} s")
                predicted = (self._amount(cell.peak_bytes), *times)
            row = (cell.strategy, *predicted)
            if cell.measured is not None:
                mark = "" if cell.measured.agrees else "*"
                row += (self._amount(cell.measured.peak_bytes), f"{cell.measured.overhead:.1%}{mark}")
            elif len(rows[0]) > len(row):
                row += ("", "not run")
            rows.append(row)
        if len(rows) == 1:
            yield "  none of these fits"
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for name, *rest in rows if len(rows) > 1 else ():
            numbers = "  ".join(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
            yield f"  {name:{widths[0]}}  {numbers}"
        more = [
            f"{cell.strategy} {self._amount(cell.smallest_bytes)}"
            for cell in cells
            if cell.smallest_bytes is not None
        ]
        if more:
            yield f"  need more: {', '.join(more)}"
        none = [cell.strategy for cell in cells if cell.code in ("IRC205", "IRC206")]
        if none:
            yield f"  found none: {', '.join(none)}"

    def _amount(self, nbytes: int) -> str:
        """Bytes in the table's unit."""
        divisor, _, decimals = memory_unit(self.baseline_bytes)
        return f"{nbytes / divisor:,.{decimals}f}"

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON-ready data."""
        cells = [{**asdict(cell), "gap": cell.gap} for cell in self.cells]  # measurements are nested
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cells"}
        return {"format": _FORMAT, **own, "cells": cells}

    def to_csv(self) -> str:
        """The cells as comma-separated values with a header."""
        text = io.StringIO()
        own = [field.name for field in fields(Cell) if field.name != "measured"]
        names = [*own, "gap", *(f"measured_{field.name}" for field in fields(Measured))]
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        writer.writeheader()
        for cell in self.cells:
            measured = {} if cell.measured is None else asdict(cell.measured)
            row = {name: getattr(cell, name) for name in (*own, "gap")}
            writer.writerow({**row, **{f"measured_{name}": value for name, value in measured.items()}})
        return text.getvalue()

    def picture(self, kind: str) -> bytes:
        """Its picture as the content of a file, `svg` or `png`: all fronts, and the bound."""
        from .picture import draw_comparison

        return draw_comparison(self, kind)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws all fronts and the bound into an `.svg` or `.png` file.

        Raises:
            UsageError: As `reports.draw`.
        """
        reports.draw(self, path)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `comparison.json`, `.csv`, `.svg` and `.png`, each as a whole or not at all.

        Raises:
            UsageError: As `reports.save`.
        """
        reports.save(self, folder, _STEM)
