"""What became of each case, what an importer's run found, and both as JSON-ready data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

__all__ = ["Outcome", "Report", "Result", "count"]

_FORMAT = 1


class Outcome(Enum):
    """How a case ended."""

    PASS = "pass"
    """Every output is the expected one, in number, kind, shape, element type and value."""
    UNSUPPORTED = "unsupported"
    """The importer said that it does not do this."""
    WRONG = "wrong"
    """It ran, and an output differs."""
    ERROR = "error"
    """It raised anything else, at import or in the run."""
    TIMEOUT = "timeout"
    """It was not done within the time limit."""
    CRASH = "crash"
    """The process died."""


@dataclass(frozen=True)
class Result:
    """What became of one case.

    Args:
        name: Of the case.
        group: Of the case.
        outcome: How it ended.
        why: What the importer said, or what differs.
        seconds: That it took.
        operators: Of the model.
        opset: Of the model; None where it does not use the default operator set.
        subsets: That the case is in.
        is_random: Whether its outputs are drawn at random: then `wrong` says nothing.
    """

    name: str
    group: str
    outcome: Outcome
    why: str = ""
    seconds: float = 0.0
    operators: tuple[str, ...] = ()
    opset: int | None = None
    subsets: tuple[str, ...] = ()
    is_random: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether it is a wrong answer that nobody was told of."""
        return self.outcome is Outcome.WRONG and not self.is_random


@dataclass(frozen=True)
class Report:
    """What a run of one importer found.

    Args:
        importer: Its name.
        versions: Of the packages that matter to it, by name.
        date: Of the run, as `2026-01-31`.
        limit: Seconds that a case may take.
        seconds: That all took.
        results: Of the cases; none where it could not be run.
        failure: Why it could not be run.
    """

    importer: str
    versions: Mapping[str, str]
    date: str
    limit: float
    seconds: float = 0.0
    results: Sequence[Result] = ()
    failure: str = ""

    def of(self, group: str) -> list[Result]:
        """The results of a group, of a subset, or of `all`."""
        return [r for r in self.results if group in ("all", r.group) or group in r.subsets]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        results = [{**asdict(r), "outcome": r.outcome.value} for r in self.results]
        return {"format": _FORMAT, **asdict(replace(self, results=())), "results": results}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """The report that such data was made of.

        Raises:
            ValueError: The data is of another format.
            KeyError: A part of it is missing.
            TypeError: A part of it is of another kind.
        """
        fields = dict(data)
        if fields.pop("format") != _FORMAT:
            raise ValueError(f"it has the format {data['format']!r}, not {_FORMAT}")
        fields["results"] = tuple(_result(row) for row in fields["results"])
        return cls(**fields)


def _result(row: Mapping[str, Any]) -> Result:
    fields = dict(row)
    fields["outcome"] = Outcome(row["outcome"])
    fields["operators"], fields["subsets"] = tuple(row["operators"]), tuple(row["subsets"])
    return Result(**fields)


def count(results: Iterable[Result]) -> Counter[Outcome]:
    """How many cases ended in which way."""
    return Counter(result.outcome for result in results)
