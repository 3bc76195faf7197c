"""The matrix as a table, for the terminal and as Markdown, and as JSON-ready data."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..pages import to_markdown
from .models import MODELS
from .plans import PLANS
from .registry import OWN, ROWS, Check, Outcome, Verdict

__all__ = ["Line", "count", "lines_of_text", "summary", "to_json", "to_page"]


@dataclass(frozen=True)
class Line:
    """One check of one model, under every plan.

    Args:
        check: The check.
        model: The model's name, or `own`.
        outcomes: By the name of the plan.
    """

    check: Check
    model: str
    outcomes: Mapping[str, Outcome]


def cell(outcome: Outcome) -> str:
    """An outcome in a word or two."""
    code = f" {outcome.code}" if outcome.verdict is Verdict.REFUSED else ""
    return f"{outcome.verdict.value}{code}"


def lines_of_text(line: Line) -> Iterator[str]:
    """A line for the terminal, and the messages of what is no pass under it."""
    cells = "  ".join(f"{name}: {cell(outcome):<15}" for name, outcome in line.outcomes.items())
    yield f"{line.check.row:>2}  {line.check.name:<52} {line.model:<13}  {cells}".rstrip()
    for message in dict.fromkeys(
        f"{outcome.code + ': ' if outcome.verdict is Verdict.REFUSED else ''}{outcome.message}"
        for outcome in line.outcomes.values()
        if outcome.message
    ):
        yield "      " + textwrap.shorten(message, 400, placeholder=" ...")


def count(lines: Iterable[Line]) -> Counter[Verdict]:
    """How many checks ended in which way."""
    return Counter(outcome.verdict for line in lines for outcome in line.outcomes.values())


def _counted(lines: Iterable[Line], plan: str | None = None) -> str:
    found = Counter(
        outcome.verdict
        for line in lines
        for name, outcome in line.outcomes.items()
        if plan is None or name == plan
    )
    return ", ".join(f"{found[verdict]} {verdict.value}" for verdict in Verdict if found[verdict]) or "-"


def summary(lines: Sequence[Line]) -> str:
    """One line for each row of the matrix, one column for each plan, as Markdown."""
    plans = _plans(lines)
    rows = [
        [str(row), title, *(_counted((line for line in lines if line.check.row == row), p) for p in plans)]
        for row, title in ROWS.items()
        if any(line.check.row == row for line in lines)
    ]
    return to_markdown(["row", "what a script relies on", *plans], rows)


def _plans(lines: Iterable[Line]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line.outcomes))


def to_page(lines: Sequence[Line], command: str) -> str:
    """The whole matrix as a Markdown page.

    Args:
        lines: Of the matrix.
        command: That made it.
    """
    total = ", ".join(f"{number} {verdict.value}" for verdict, number in count(lines).items())
    parts = [
        "# A fitted module as a drop-in",
        f"Written by `{command}`. {_INTRODUCTION}",
        f"In all: {total}.",
        _about_plans(),
        "## Summary",
        summary(lines),
    ]
    for row, title in ROWS.items():
        of_row = [line for line in lines if line.check.row == row]
        if of_row:
            parts += [f"## {row}. {title}", _table(of_row)]
    for verdict, heading in ((Verdict.REFUSED, "Refusals"), (Verdict.FAIL, "Failures")):
        messages = _messages(lines, verdict)
        if messages:
            parts += [f"## {heading}", messages]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = (
    "Each check runs a script on the original model and on its fitted twin, from one state, and compares all "
    "that is left behind; where training is meant, over three steps of SGD and three of AdamW. `pass`: the "
    "same, bit for bit unless noted. `refused`: an error of irc by name, and nothing has changed. `FAIL`: "
    "anything else. [refusals.md](../reference/errors.md) lists every refusal there is."
)


def _about_plans() -> str:
    rows = [[kind.name, kind.about] for kind in PLANS.values()]
    tolerances = [
        f"Numbers of the model `{subject.name}` may be off by {subject.tolerance:.0e} of the largest of "
        f"their tensor: {subject.because}."
        for subject in MODELS.values()
        if subject.tolerance
    ]
    return "\n\n".join([to_markdown(["plan", "what it is"], rows), *tolerances])


def _table(lines: Sequence[Line]) -> str:
    plans = _plans(lines)
    rows: list[list[str]] = []
    for name in dict.fromkeys(line.check.name for line in lines):
        of_check = [line for line in lines if line.check.name == name]
        groups: dict[tuple[str, ...], list[str]] = {}
        for line in of_check:
            cells = tuple(cell(line.outcomes[p]) if p in line.outcomes else "-" for p in plans)
            groups.setdefault(cells, []).append(line.model)
        promise = of_check[0].check.promise
        rows += [[name, promise, ", ".join(models), *cells] for cells, models in groups.items()]
    return to_markdown(["check", "what holds", "models", *plans], rows)


def _messages(lines: Iterable[Line], verdict: Verdict) -> str:
    """Each message of this verdict, with where it came."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        for plan, outcome in line.outcomes.items():
            if outcome.verdict is verdict:
                key = (outcome.code, outcome.message, outcome.help)
                where = line.check.name if line.model == OWN else f"{line.check.name} ({line.model})"
                places.setdefault(key, []).append(f"{where}, {plan}")
    rows = [
        [code or "-", _shortened(message), _shortened(help) or "-", _where(where)]
        for (code, message, help), where in sorted(places.items())
    ]
    return to_markdown(["code", "message", "what to do", "where"], rows)


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 300, placeholder=" ...")


def _where(places: list[str]) -> str:
    more = f", and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{places[0]}{more}"


def to_json(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Every outcome, as JSON-ready data."""
    return [
        {
            "row": line.check.row,
            "check": line.check.name,
            "promise": line.check.promise,
            "model": line.model,
            "plan": plan,
            "verdict": outcome.verdict.value,
            "code": outcome.code,
            "message": outcome.message,
            "help": outcome.help,
            "seconds": round(outcome.seconds, 3),
        }
        for line in lines
        for plan, outcome in line.outcomes.items()
    ]
