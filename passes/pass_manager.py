"""Runs passes in order, verifies what they return, and reads and writes pipelines as text."""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..ir import IrcError, UsageError, load_plugin, plugins, verify_graph, verify_schedule
from .costs.measure_costs import Cost
from .offload.offer_tiers import OfferTiers
from .plan_memory import PlanMemory
from .program import Program
from .progress import Progress, report
from .rewrites.fuse_operations import FuseOperations
from .rewrites.hold_forwards import HoldForwards
from .rewrites.loss_gradients import LossGradientsInForward
from .rewrites.release_gradients import ReleaseGradients
from .rewrites.replay_draws import ReplayDraws
from .rewrites.split_convolutions import SplitConvolutions
from .rewrites.tile_rows import TileRows
from .rewrites.write_in_place import WriteInPlace

__all__ = ["Observer", "Pass", "PassManager", "parse_passes", "pass_kinds", "print_pass"]


class Pass(Protocol):
    """One step of a pipeline: a frozen dataclass whose fields are its options."""

    name: ClassVar[str]

    def run(self, program: Program, /) -> Program:
        """The program after this pass."""
        ...


class Observer(Protocol):
    """Looks on while a pipeline runs."""

    def before(self, step: Pass, program: Program) -> None:
        """Called with what the pass is given."""
        ...

    def after(self, step: Pass, program: Program, seconds: float) -> None:
        """Called with what the pass returned, once verified."""
        ...


_PASSES: dict[str, type[Any]] = {
    step.name: step
    for step in (
        ReleaseGradients,
        ReplayDraws,
        SplitConvolutions,
        LossGradientsInForward,
        TileRows,
        FuseOperations,
        WriteInPlace,
        HoldForwards,
        Cost,
        OfferTiers,
        PlanMemory,
    )
}


def pass_kinds() -> dict[str, type[Any]]:
    """Returns the passes by their names, those of other distributions last.

    Raises:
        UsageError: IRC597 if one of them cannot be imported, IRC404 if one is not a pass.
    """
    return {**_PASSES, **{name: _kind(name) for name in plugins("irc.passes")}}


_RENAMED = {"select-checkpoints": "plan-memory"}
"""Passes by their names in the version before, which go with the next one."""


@dataclass(frozen=True)
class PassManager:
    """Passes in order.

    Args:
        passes: Run one after the other; the graph and the schedule are verified before, between and after.
        observers: Told before and after each pass.
    """

    passes: Sequence[Pass]
    observers: Sequence[Observer] = ()

    def run(self, program: Program) -> Program:
        """The program after all passes.

        Raises:
            IrcError: The error of a pass, with a note that names the pass.
        """
        _verify(program)
        for step in self.passes:
            for observer in self.observers:
                observer.before(step, program)
            report(Progress(step.name, len(program.graph.operations)))
            started = time.perf_counter()
            try:
                before, program = program, step.run(program)
                _verify(program, before)
            except IrcError as error:
                error.add_note(f"in pass {print_pass(step)}")
                raise
            for observer in self.observers:
                observer.after(step, program, time.perf_counter() - started)
        return program

    def __str__(self) -> str:
        return ",".join(print_pass(step) for step in self.passes)


def _verify(program: Program, before: Program | None = None) -> None:
    """Verifies the graph and the schedule of a program, each only if the pass before changed it."""
    if before is None or program.graph is not before.graph:
        verify_graph(program.graph)
    if program.schedule is not None and (before is None or _claims(program) != _claims(before)):
        assert program.costs is not None and program.plan is not None, (
            "a schedule comes with costs and a plan"
        )
        verify_schedule(
            program.schedule,
            program.costs.workspace_bytes,
            budget_bytes=program.plan.budget_bytes,
            peak_bytes=program.plan.peak_bytes,
            tiers=program.tiers,
        )


def _claims(program: Program) -> list[int]:
    """The identities of all that the verifier holds a schedule to."""
    return [id(part) for part in (program.schedule, program.plan, program.costs, program.tiers)]


# ---------------------------------------------------------------------- pipelines as text

_STEP = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\{([^{}]*)\})?\s*(,|$)")


def parse_passes(text: str) -> tuple[Pass, ...]:
    """The passes of a pipeline such as `cost{profile=cpu},plan-memory{budget=4GiB}`.

    Raises:
        UsageError: IRC404 for text that is no pipeline, an unknown pass or option, or a value that does
            not fit.
    """
    steps: list[Pass] = []
    position = 0
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None:
            raise UsageError(
                "IRC404",
                f"the pipeline cannot be read at column {position + 1}: {text[position : position + 30]!r}",
                help="write name{option=value,...},name{...}",
            )
        steps.append(_parse_pass(match[1], match[2] or ""))
        position = match.end()
        if match[3] == "," and position == len(text):
            raise UsageError(
                "IRC404", "the pipeline ends in a comma", help="name another pass, or drop the comma"
            )
    if not steps:
        raise UsageError("IRC404", "the pipeline is empty", help=f"passes: {', '.join(_PASSES)}")
    return tuple(steps)


def _parse_pass(name: str, options: str) -> Pass:
    if name in _RENAMED:
        warnings.warn(f"the pass {name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=3)
        name = _RENAMED[name]
    kind = _kind(name)
    fields = {f.name.replace("_", "-"): f for f in _options(kind)}
    values: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, equals, value = option.partition("=")
        key = key.strip().replace("_", "-")
        if not equals or key not in fields:
            raise UsageError(
                "IRC404",
                f"pass {name} has no option {option!r}",
                help=f"options: {', '.join(fields)} (as option=value)",
            )
        if fields[key].name in values:
            raise UsageError("IRC404", f"option {key} of pass {name} is given twice", help="give it once")
        values[fields[key].name] = _parse_value(name, key, value.strip(), fields[key])
    return kind(**values)


def _kind(name: str) -> type[Any]:
    """The class of a pass by its name, perhaps of another distribution."""
    kind: Any = _PASSES.get(name) or load_plugin("irc.passes", name)
    if kind is None:
        known = (*_PASSES, *plugins("irc.passes"))
        raise UsageError("IRC404", f"there is no pass {name!r}", help=f"passes: {', '.join(known)}")
    if not _is_pass(kind, name):
        raise UsageError(
            "IRC404",
            f"the pass {name!r} of another distribution is not a dataclass of that name whose options have "
            "defaults",
            help=f"write a class with `name: ClassVar[str] = {name!r}` and @dataclass(frozen=True)",
        )
    return kind


def _is_pass(kind: object, name: str) -> bool:
    if not (
        isinstance(kind, type) and dataclasses.is_dataclass(kind) and getattr(kind, "name", None) == name
    ):
        return False
    missing = dataclasses.MISSING
    return all(f.default is not missing or f.default_factory is not missing for f in dataclasses.fields(kind))


def _options(kind: type[Any]) -> list[dataclasses.Field[Any]]:
    """The options of a pass that have a text form: all but functions."""
    return [field for field in dataclasses.fields(kind) if field.metadata.get("in_text", True)]


def _parse_value(name: str, key: str, value: str, field: dataclasses.Field[Any]) -> Any:
    if field.type == "int | str":
        return int(value) if value.isdecimal() else value
    try:
        match field.default:
            case bool():
                return {"true": True, "false": False}[value.lower()]
            case int():
                return int(value)
            case float():
                return float(value)
            case _:
                return value
    except (ValueError, KeyError):
        raise UsageError(
            "IRC404",
            f"option {key} of pass {name} is {value!r}",
            help=f"give a value like {_print_value(field.default)}",
        ) from None


def print_pass(step: Pass) -> str:
    """A pass as text, with all options that have a text form."""
    fields = _options(type(step))
    options = ",".join(f"{f.name.replace('_', '-')}={_print_value(getattr(step, f.name))}" for f in fields)
    return f"{step.name}{{{options}}}"


def _print_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
