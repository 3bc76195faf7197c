"""The points of a front as they are found: one line each in a file, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ...ir import Tier, TierUse, UsageError, print_graph, require
from ...passes import Program
from ..journal import JsonLines
from .front import FILES
from .points import Known, Point, Refusal, Survey

__all__ = ["Identity", "Journal", "check_folder"]

_NAME = "points.jsonl"
_FORMAT = "irc-points-3"
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Identity:
    """The run that points belong to; points of two identities do not mix.

    Args:
        irc: Its version.
        program: Digest of the graph's text, without the places in the user's code.
        costs: Digest of seconds and workspaces.
        options: How budgets are chosen and planned, as text.
        tiers: Where plans may copy, as text; empty if nowhere.
    """

    irc: str
    program: str
    costs: str
    options: str
    tiers: str = ""

    @staticmethod
    def of(program: Program, options: str, tiers: str = "") -> Identity:
        """The identity of a program with costs, planned under `options` with copies to `tiers`."""
        from ... import __version__

        costs = program.costs
        assert costs is not None, "costs come first"
        nodes = tuple(replace(node, at=None) for node in program.graph.nodes)  # a line may move in its file
        rows = (f"{n.name} {costs.seconds[n]!r} {costs.workspace_bytes[n]}" for n in program.graph.operations)
        return Identity(
            irc=__version__,
            program=_digest(print_graph(replace(program.graph, nodes=nodes))),
            costs=_digest("\n".join([costs.source, *rows])),
            options=options,
            tiers=tiers,
        )

    def differences(self, other: Identity) -> str:
        """Describes the differences."""
        words = {
            "irc": "version of irc",
            "program": "model",
            "costs": "costs",
            "options": "options",
            "tiers": "tiers",
        }
        found = [text for name, text in words.items() if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"other {text}" for text in found)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_folder(folder: Path, *, restart: bool = False) -> None:
    """Refuses a folder that cannot be written, or holds something else, before any work is done.

    Args:
        folder: Where the points and the front are to be written; made if need be.
        restart: Whether what an earlier run wrote there goes.

    Raises:
        UsageError: IRC442; IRC448 without the extra `plot`, as the front is drawn there too.
    """
    require("plot", "drawing a front")
    try:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):  # tells more than the permissions do
            pass
        found = set(os.listdir(folder)) if existing == folder else set[str]()
    except OSError as error:
        raise UsageError(
            "IRC442", f"{folder} cannot be written: {error}", help="choose another folder"
        ) from error
    found = {name for name in found if not name.startswith(".")}
    ours = found <= {_NAME, *FILES} and (restart or _NAME in found)
    if found and not ours:
        raise UsageError(
            "IRC442",
            f"{folder} is not empty, and holds no {_NAME} of irc pareto alone",
            help="choose a new folder, or one that irc pareto wrote",
        )


@dataclass
class Journal:
    """The points known so far of a front; with a folder, on disk at once.

    Args:
        folder: Where `points.jsonl` stands; None keeps everything in memory.
        identity: What the points belong to.
        survey: What does not depend on the budget; None until `begin`.
        outcomes: What planning gave at the budgets that are finished.
    """

    folder: Path | None
    identity: Identity
    survey: Survey | None = None
    outcomes: tuple[Point | Refusal, ...] = ()

    @staticmethod
    def open(folder: Path | None, identity: Identity, *, restart: bool = False) -> Journal:
        """The journal of a folder with what an earlier run of the same identity left; else an empty one.

        A last line that was cut off in the middle is dropped, from the file too.

        Args:
            folder: As for the journal.
            identity: What the points belong to.
            restart: Deletes what an earlier run left.

        Raises:
            UsageError: IRC441 when the folder's points belong to something else; IRC442 when it cannot be
                written or is not that of a front; IRC446 when the file is damaged.
        """
        if folder is None:
            return Journal(None, identity)
        check_folder(folder, restart=restart)
        if restart:
            for name in (_NAME, *FILES):
                (folder / name).unlink(missing_ok=True)
        journal = Journal(folder, identity)

        def take(number: int, row: Any) -> None:
            if number == 1:
                found, journal.survey = _begun(row)
                if found != identity:
                    raise UsageError(
                        "IRC441",
                        f"{folder} holds the front of something else: {identity.differences(found)}",
                        help="choose another folder, or begin anew (--restart, restart=True)",
                    )
                return
            ((kind, fields),) = row.items()
            outcome = _record({"point": Point, "refusal": Refusal}[kind], fields)
            if isinstance(outcome, Point):
                outcome = replace(outcome, tiers=_records(TierUse, outcome.tiers))
            journal.outcomes += (outcome,)

        journal._lines.read(take)
        return journal

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(
            None if self.folder is None else self.folder / _NAME,
            "choose another folder",
            "choose another folder, or begin anew (--restart, restart=True)",
        )

    def begin(self, survey: Survey) -> None:
        """Notes the survey; points follow.

        Raises:
            UsageError: IRC442 when the file cannot be written.
        """
        self.survey = survey
        row = {"format": _FORMAT, "identity": asdict(self.identity), "survey": asdict(survey)}
        self._lines.append(row, is_first=True)

    def append(self, outcome: Point | Refusal) -> None:
        """Notes what planning gave at one budget.

        Raises:
            UsageError: IRC442 when the file cannot be written.
        """
        self.outcomes += (outcome,)
        kind = "point" if isinstance(outcome, Point) else "refusal"
        self._lines.append({kind: asdict(outcome)})


# ---------------------------------------------------------------------- reading


def _begun(row: dict[str, Any]) -> tuple[Identity, Survey]:
    """The words of the first line."""
    if row["format"] != _FORMAT:
        raise ValueError(f"its format is {row['format']!r}, not {_FORMAT!r}")
    survey = _record(Survey, row["survey"])
    survey = replace(
        survey,
        budgets=tuple(map(int, survey.budgets)),
        known=_records(Known, survey.known),
        swap=tuple(map(str, survey.swap)),
        tiers=_records(Tier, survey.tiers),
    )
    return _record(Identity, row["identity"]), survey


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def _records(kind: type[_Record], rows: Iterable[Any]) -> tuple[_Record, ...]:
    return tuple(_record(kind, row) for row in rows)


def _record(kind: type[_Record], row: Any) -> _Record:
    """A dataclass from its fields, each checked to be of its type.

    Raises:
        ValueError: A field is missing, unknown or of another type.
    """
    wanted = {field.name: str(field.type) for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if row.keys() != wanted.keys():
        raise ValueError(f"{kind.__name__} has other fields")
    for name, type_name in wanted.items():
        value, kinds = row[name], _KINDS.get(type_name, (list,))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{name} is {value!r}")
    return kind(**row)
