"""A report of a plan as one page of HTML that needs no network: its memory, its costs, its certificate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ...ir import (
    ACTIONS,
    Kind,
    MemoryTimeline,
    ModuleGroups,
    Plan,
    StepMemory,
    by_module,
    format_bytes,
    module_path,
    printable,
)
from .colors import COLORS
from .filled import filled
from .front import Front, next_budget

__all__ = ["page"]

_SAVED_COLORS = (
    "hsl(142 48% 38%)",
    "hsl(88 48% 50%)",
    "hsl(172 45% 44%)",
    "hsl(62 52% 46%)",
    "hsl(125 34% 62%)",
    "hsl(158 58% 27%)",
    "hsl(76 40% 68%)",
    "hsl(104 58% 31%)",
)
"""The colours of the saved tensors of the modules with most of them, the largest first."""
_SAVED_BY_OTHERS = "hsl(135 16% 58%)"


def page(title: str, plan: Plan, memory: StepMemory, front: Front | None = None) -> str:
    """Returns the report as HTML.

    Args:
        title: The name of the model.
        plan: The plan.
        memory: The memory of its step, and of the original's.
        front: Plans within other budgets, which are drawn if there are any.
    """
    return filled("report.html", _data(title, plan, memory, front or {}))


def _data(title: str, plan: Plan, memory: StepMemory, front: Front) -> dict[str, Any]:
    timelines = {"The original model": memory.original, "The plan": memory.planned}
    bands = _Bands(timelines.values(), ModuleGroups.of(plan.decisions))
    texts = _Texts()
    is_timed = all(each.has_seconds for each in timelines.values())
    rows = [
        {
            "name": name,
            "note": _note(plan, timeline) if timeline is memory.original else "",
            "seconds": plan.step_seconds if timeline is memory.original else timeline.step_seconds,
            "steps": [_step(step, texts) for step in timeline.steps],
            "residents": [
                [texts.of(r.name), bands.of(timeline, r), r.nbytes, r.first, r.last, r.maker]
                for r in timeline.residents
            ],
            "copies": [
                [
                    texts.of(c.name),
                    c.nbytes,
                    texts.of(c.tier),
                    texts.of(c.direction),
                    c.start_seconds,
                    c.end_seconds,
                ]
                for c in timeline.copies
            ],
        }
        for name, timeline in timelines.items()
    ]
    return {
        "title": printable(f"{title} in {format_bytes(plan.budget_bytes)}"),
        "how": "Each band is a kind of memory, from what is always there to what an operation needs for "
        "itself. Point at a place to see the tensor, its bytes, and the line of your code that makes it.",
        "timed": is_timed,
        "budget": plan.budget_bytes,
        "tiles": list(_tiles(plan)),
        "texts": texts.all,
        "bands": bands.rows,
        "timelines": rows,
        "modules": [
            [
                name or "(model)",
                *(totals.nbytes[action] for action in ACTIONS),
                totals.seconds,
            ]
            for name, totals in by_module(plan.decisions).items()
        ],
        "front": [
            [each.budget_bytes, each.peak_bytes, each.overhead, each.lower_bound_overhead, name]
            for name, each in front.items()
        ],
        "next": next_budget(front),
        "certificate": list(_certificate(plan)),
        "rows": [[name, printable(text, 1000)] for name, text in plan.rows()],
    }


def _note(plan: Plan, original: MemoryTimeline) -> str:
    """Says why the original takes more than the tensors that its operations need."""
    if original.peak_bytes >= plan.baseline_peak_bytes:
        return ""
    return f"eager holds some tensors longer than drawn, and takes {format_bytes(plan.baseline_peak_bytes)}"


def _step(step: Any, texts: _Texts) -> list[Any]:
    return [
        texts.of(step.name),
        texts.of(step.op),
        texts.of(step.phase),
        round(step.end_seconds - step.start_seconds, 9),
        step.workspace_bytes,
        step.other_bytes,
        texts.of(step.module),
        texts.of(step.source),
    ]


class _Texts:
    """Numbers texts, so that each is written once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, text: str) -> int:
        return self.numbers.setdefault(printable(text, 300), len(self.numbers))

    @property
    def all(self) -> list[str]:
        return list(self.numbers)


class _Bands:
    """The bands of the charts: a kind each, and one for each module whose saved tensors are large."""

    def __init__(self, timelines: Iterable[MemoryTimeline], modules: ModuleGroups) -> None:
        self.modules = modules
        saved: Counter[str] = Counter()
        for timeline in timelines:
            for each in timeline.at(timeline.peak_step) if timeline.steps else ():
                if each.kind == Kind.SAVED:
                    saved[self._group(timeline, each)] += each.nbytes
        self.groups = [group for group, _ in saved.most_common(len(_SAVED_COLORS))]
        self.rows: list[dict[str, str]] = []
        self.places: dict[tuple[str, str], int] = {}
        for kind in Kind:
            for name, group, color in self._of_kind(kind):
                self.places[kind, group] = len(self.rows)
                self.rows.append({"name": name, "kind": kind.value, "color": color})

    def _of_kind(self, kind: Kind) -> Iterator[tuple[str, str, str]]:
        if kind is not Kind.SAVED:
            yield kind.value, "", COLORS[kind]
            return
        named = [group for group in self.groups if group]
        for color, group in zip(_SAVED_COLORS, named, strict=False):
            yield f"saved by {printable(group)}", group, color
        yield "saved by others", "", _SAVED_BY_OTHERS

    def of(self, timeline: MemoryTimeline, resident: Any) -> int:
        """The band of a stay."""
        group = self._group(timeline, resident) if resident.kind == Kind.SAVED else ""
        return self.places.get((resident.kind, group), self.places[resident.kind, ""])

    def _group(self, timeline: MemoryTimeline, resident: Any) -> str:
        if resident.maker < 0:
            return ""
        step = timeline.steps[resident.maker]
        return self.modules.name(module_path(step.module, step.source, step.op))


def _tiles(plan: Plan) -> Iterator[tuple[str, str, str]]:
    part = plan.peak_bytes / max(plan.baseline_peak_bytes, 1)
    baseline = format_bytes(plan.baseline_peak_bytes)
    how = ", modelled" if plan.baseline_source == "modelled" else ""
    yield "predicted peak", format_bytes(plan.peak_bytes), f"{part:.0%} of the original's {baseline}{how}"
    yield "budget", format_bytes(plan.budget_bytes), f"{plan.budget_bytes:,} bytes"
    yield "overhead", f"{plan.overhead:.2%}", f"none is below {plan.lower_bound_overhead:.2%}"
    smallest = plan.minimum_budget_bytes
    yield "smallest budget", format_bytes(smallest), f"nothing fits below {format_bytes(plan.floor_bytes)}"


def _certificate(plan: Plan) -> Iterator[str]:
    """Says in words what is proved, what is predicted, and of what."""
    yield (
        f"A step takes {plan.peak_bytes:,} bytes at its peak, parameters and inputs included. This is "
        "counted from exact sizes; a measured peak is at most that."
    )
    if plan.overhead <= 0:
        yield "The plan takes no more time than a step with all memory: none is faster."
    elif plan.proven_optimal:
        yield (
            "The plan is proved the fastest: no schedule within the budget, with this order of backward, "
            f"costs less than {plan.lower_bound_overhead:.2%} of a step."
        )
    else:
        yield (
            f"The plan takes {plan.overhead:.2%} more time than a step that computes nothing twice. "
            "No schedule within the budget, with this order of backward, costs less than "
            f"{plan.lower_bound_overhead:.2%}: the plan is at most {plan.gap:.2%} from the fastest."
        )
    yield (
        f"With {plan.minimum_budget_bytes:,} bytes a schedule is known; with less than {plan.floor_bytes:,} "
        "none exists that keeps this order of backward."
    )
    differs = bool(plan.roundings or plan.reordered)
    yield (
        "Some numbers may differ from the original's by rounding; the table below names them."
        if differs
        else "Losses, gradients, buffers and random numbers are the original's, bit for bit."
    )
