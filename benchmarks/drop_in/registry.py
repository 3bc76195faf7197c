"""The checks, by the row that they stand for, and how one of them is run."""

from __future__ import annotations

import enum
import inspect
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from irc.ir import IrcError, first_line

from .comparison import Difference
from .models import MODELS, the
from .plans import PlanKind
from .trial import Trial, Unavailable, Workshop, came_in_backward

__all__ = [
    "CHECKS",
    "OWN",
    "ROWS",
    "Check",
    "Outcome",
    "Verdict",
    "check",
    "every",
    "having",
    "run_check",
    "selected",
    "the",
]

ROWS = {
    1: "BatchNorm",
    2: "random numbers",
    3: "order-sensitive operations",
    4: "autocast",
    5: "writes in place",
    6: "views and aliases",
    7: "tied weights",
    8: "frozen parameters",
    9: "DistributedDataParallel",
    10: "fully_shard",
    11: "state, copies, files",
    12: "modes",
    13: "derivatives of other kinds",
    14: "retained graphs, several losses",
    15: "several forwards, accumulation",
    16: "structures of arguments and results",
    17: "hooks",
    18: "other shapes",
    19: "leaks",
    20: "threads, data loaders",
}
"""What a training script relies on."""

OWN = "own"
"""In place of a model's name, where a check brings its own."""


class Verdict(enum.Enum):
    """How a check ended."""

    PASS = "pass"
    REFUSED = "refused"
    FAIL = "FAIL"
    ABSENT = "not run"


@dataclass(frozen=True)
class Outcome:
    """How one check of one model under one plan ended.

    Args:
        verdict: Pass, refused, FAIL, or not run because something is not installed.
        message: Why it is no pass.
        code: Of the refusal.
        help: What the refusal says to do.
        seconds: How long it took.
    """

    verdict: Verdict
    message: str = ""
    code: str = ""
    help: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """One thing that holds for the original and must hold for the fitted module.

    Args:
        row: Which row it belongs to.
        name: In words.
        promise: What must hold, in a sentence.
        models: Names of models; `OWN` alone where the check brings its own.
        run: Returns where it holds; raises `Difference` where it does not, `IrcError` where it is refused.
        refusable: Whether the module may refuse.
        in_backward: Whether it may refuse as late as in backward, because nothing tells earlier.
    """

    row: int
    name: str
    promise: str
    models: tuple[str, ...]
    run: Callable[[Trial], None]
    refusable: bool
    in_backward: bool


CHECKS: dict[str, Check] = {}
"""Every check by its name, in the order of the rows once sorted."""


def having(*traits: str) -> tuple[str, ...]:
    """The names of the models that have all of these traits."""
    names = tuple(name for name, subject in MODELS.items() if subject.traits.issuperset(traits))
    assert names, f"no model has {traits}"
    return names


def every() -> tuple[str, ...]:
    """The names of all models."""
    return tuple(MODELS)


def check(
    row: int,
    models: tuple[str, ...] = (OWN,),
    *,
    name: str | None = None,
    promise: str | None = None,
    refusable: bool = False,
    in_backward: bool = False,
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Enters a function as a check; its name and its docstring say what it shows.

    Args:
        row: As in `Check`.
        models: As in `Check`.
        name: If it is another than the function's.
        promise: If it is another than the beginning of the function's docstring.
        refusable: As in `Check`.
        in_backward: As in `Check`.
    """

    def enter(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        called = name or run.__name__.strip("_").replace("_", " ")
        about = promise or run.__doc__
        assert called not in CHECKS and row in ROWS and about
        about = inspect.cleandoc(about).split("\n\n")[0].replace("\n", " ")
        CHECKS[called] = Check(row, called, about, models, run, refusable or in_backward, in_backward)
        return run

    return enter


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies in memory, as its text says: another in each run."""


def run_check(chosen: Check, plan: PlanKind, model: str, workshop: Workshop) -> Outcome:
    """Runs a check, and says how it ended; nothing that it raises goes further."""
    started = time.monotonic()

    def ended(verdict: Verdict, message: str = "", code: str = "", help: str | None = "") -> Outcome:
        message = _ADDRESS.sub("", message)
        return Outcome(verdict, message, code, help or "", time.monotonic() - started)

    trial = Trial(plan, None if model == OWN else MODELS[model], workshop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen.run(trial)
    except IrcError as refusal:
        late = came_in_backward(refusal) and not chosen.in_backward
        problem = _problem(trial, refusal, chosen, late=late)
        if problem is not None:
            return ended(Verdict.FAIL, f"{problem}: {refusal.code}: {refusal.message}", refusal.code)
        return ended(Verdict.REFUSED, refusal.message, refusal.code, refusal.help)
    except Unavailable as missing:
        return ended(Verdict.ABSENT, str(missing))
    except Difference as difference:
        return ended(Verdict.FAIL, str(difference))
    except Exception as error:
        return ended(Verdict.FAIL, f"{type(error).__name__}: {first_line(error)} ({_place(error)})")
    return ended(Verdict.PASS)


def _problem(trial: Trial, refusal: IrcError, chosen: Check, *, late: bool) -> str | None:
    """What is wrong with a refusal."""
    try:
        trial.check_unchanged("what refuses")
    except Difference as difference:
        return str(difference)
    if late:
        return "refused only in backward"
    if not chosen.refusable:
        return "refused where the row promises that it works"
    return None if refusal.help else "refused without a word on what to do"


def _place(error: Exception) -> str:
    """The last line of irc or of the check itself on the way to an error."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    last = ours[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"


def selected(
    rows: Iterable[int] | None = None, models: Iterable[str] | None = None
) -> list[tuple[Check, str]]:
    """Every check with every model that it applies to, in order of rows.

    Args:
        rows: These alone; all where None.
        models: These alone, `OWN` among them; all where None.
    """
    wanted = set(rows) if rows is not None else set(ROWS)
    kept = None if models is None else set(models)
    return [
        (chosen, model)
        for chosen in sorted(CHECKS.values(), key=lambda chosen: chosen.row)
        if chosen.row in wanted
        for model in chosen.models
        if kept is None or model in kept
    ]
