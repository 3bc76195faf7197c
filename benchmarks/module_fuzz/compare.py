"""Tells how irc did with a program, beside eager: numbers, generators and measured memory."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

import irc
from irc.compiler.compare import difference, largest
from irc.ir import BudgetError, IrcError, Plan, TimeLimitError, first_line
from irc.torch_support.bits import same_bits

from .loops import OPTIMIZERS, StepRecord, around, generator_states, loss_of, run
from .programs import Program, arguments, build, sources, to_json

__all__ = ["BAD", "Outcome", "Verdict", "examine"]

_MOST_ULPS = 100.0
_MOST_HALF_ULPS = 16.0
"""The same where something is computed in 16 bits."""

_SECONDS = 0.3
_MOST_SECONDS = 20.0
"""For searches: at first, and if no plan was found by then."""


class Verdict(StrEnum):
    """How irc did."""

    EQUAL = "equal"
    ROUNDING = "rounding"
    REFUSED = "refused"
    EAGER = "eager refuses"
    DIFFERENT = "DIFFERENT"
    CRASH = "CRASH"
    OVER = "OVER"


BAD = (Verdict.DIFFERENT, Verdict.CRASH, Verdict.OVER)


@dataclass(frozen=True)
class Outcome:
    """How irc did with the program of a seed.

    Args:
        seed: The seed.
        verdict: In a word.
        cause: What tells one fault from another: a code, an error with its place, or what differs.
        message: More about it.
        kinds: Of the program's blocks.
        roundings: The names in the plans' `roundings`, and `reordered` if sums are in another order.
        off: The tensors that differ by rounding, each with its ulps.
        budget_codes: The refusals of a budget after which the smallest one was taken.
        program: The fields of the program, if the verdict is bad or a refusal.
        seconds: Of the processor.
    """

    seed: int
    verdict: Verdict
    cause: str = ""
    message: str = ""
    kinds: tuple[str, ...] = ()
    roundings: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    budget_codes: tuple[str, ...] = ()
    program: Mapping[str, Any] | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.seed:>6} {self.verdict:<13} {self.cause} {self.message[:300]}".rstrip()


class _Ended(Exception):
    """Ends a run with a verdict."""

    def __init__(self, verdict: Verdict, cause: str, message: str = "") -> None:
        super().__init__(cause)
        self.verdict, self.cause, self.message = verdict, cause, message


class _Notes:
    """What a run has seen so far."""

    def __init__(self) -> None:
        self.roundings: set[str] = set()
        self.off: set[str] = set()
        self.codes: list[str] = []


def examine(program: Program) -> Outcome:
    """Runs a program in eager and fitted, and compares; nothing that either raises goes further."""
    started, notes = time.process_time(), _Notes()
    ended = _Ended(Verdict.EQUAL, "")
    logger = logging.getLogger("irc")
    level = logger.level
    logger.setLevel(logging.ERROR)
    dtype = torch.get_default_dtype()
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            _compare(program, notes, folder)
        if notes.off:
            ended = _Ended(Verdict.ROUNDING, "")
    except _Ended as end:
        ended = end
    finally:
        logger.setLevel(level)
        torch.set_default_dtype(dtype)
    is_plain = ended.verdict in (Verdict.EQUAL, Verdict.ROUNDING, Verdict.EAGER)
    return Outcome(
        program.seed,
        ended.verdict,
        ended.cause,
        ended.message,
        tuple(block.kind for block in program.blocks),
        tuple(sorted(notes.roundings)),
        tuple(sorted(notes.off)),
        tuple(notes.codes),
        None if is_plain else to_json(program),
        time.process_time() - started,
    )


def _compare(program: Program, notes: _Notes, folder: str) -> None:
    records = _eager(program)
    original = build(program)
    before = _state(original), generator_states()
    try:
        with _errors("planning"):
            fitted = _planned(program, original, folder, notes)
    finally:
        _check_unchanged(before, original)
    with _errors("step"):
        steps = run(program, fitted, applies=False)
        reference = None
        for number, record in enumerate(records):
            mine = steps.send(reference)
            reference = (
                record if _check_step(record, mine, fitted, notes, f"step {number}", program) else None
            )
    with _errors("measuring"):
        _check_peak(program, fitted)


def _eager(program: Program) -> list[StepRecord]:
    """The steps of the original.

    Raises:
        _Ended: The original raises.
    """
    try:
        return list(run(program, build(program)))
    except Exception as error:
        raise _Ended(Verdict.EAGER, f"{type(error).__name__}", first_line(error)) from error


def _planned(program: Program, original: nn.Module, folder: str, notes: _Notes) -> Any:
    """The fitted module, at the smallest budget if that of the program is too small."""
    options: dict[str, Any] = {"costs": "analytic", "time_limit": _SECONDS, **program.options}
    if "swap" in options:
        options["swap"] = f"disk:{folder}:1GiB"
    if name := options.get("optimizer_in_backward"):
        options["optimizer_in_backward"] = OPTIMIZERS[name]
    if options.get("dynamic") == "rows":
        options["dynamic"] = {"x": {0: (2, 4)}}
    if program.loop.is_told:
        options["loss"] = loss_of(program)
    budget: str | int = 1 if program.budget == "min" else program.budget
    for left in reversed(range(4)):  # a minimum that was estimated may be raised, once the plan is tried
        try:
            with around(program):
                return irc.optimize(original, arguments(program, 0), budget, **options)
        except BudgetError as error:
            if budget != 1:
                asked = budget if isinstance(budget, str) else "its minimum"
                notes.codes.append(f"{error.code} at {asked}")
            if left == 0:
                raise
            budget = error.minimum_bytes
        except TimeLimitError:
            if left == 0:
                raise
            options["time_limit"] = _MOST_SECONDS
    raise AssertionError


@contextlib.contextmanager
def _errors(where: str) -> Generator[None]:
    """Turns an error of irc into a verdict."""
    try:
        yield
    except IrcError as error:
        verdict = Verdict.CRASH if error.code == "IRC000" else Verdict.REFUSED
        raise _Ended(verdict, f"{error.code} in {where}", f"{error.message} | {error.help}") from error
    except _Ended:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = [
            f
            for f in frames
            if "/torch/" not in f.filename
            or "/backends/torch/" in f.filename
            or "/frontends/torch/" in f.filename
        ]
        file = re.sub(r" \d+", "", last[-1].filename.rpartition("/")[2]) if last else ""
        place = f"{file}:{last[-1].name}" if last else ""
        raise _Ended(
            Verdict.CRASH, f"{type(error).__name__} in {where} at {place}", first_line(error)
        ) from error


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in (*module.named_parameters(), *module.named_buffers())}


def _check_unchanged(before: tuple[dict[str, Tensor], dict[str, Any]], module: nn.Module) -> None:
    """Planning, refused or not, leaves the module and the generators as they were."""
    now, states = _state(module), generator_states()
    changed = [
        name for name, value in before[0].items() if name not in now or not same_bits(value, now[name])
    ]
    changed += [f"generator {name}" for name in _other_states(before[1], states)]
    if changed:
        raise _Ended(Verdict.DIFFERENT, "planning changes something", ", ".join(changed))


def _other_states(expected: Mapping[str, Any], states: Mapping[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return [name for name in expected if not same(expected[name], states[name])]


def _check_step(
    expected: StepRecord, record: StepRecord, fitted: Any, notes: _Notes, where: str, program: Program
) -> bool:
    """Compares what a step leaves.

    Returns:
        Whether something is off by a rounding that a plan names.

    Raises:
        _Ended: A difference that no plan names, or one that is not a rounding.
    """
    plans: list[Plan] = [plan for _, plan in fitted.irc_plans]
    names = {text for plan in plans for text in plan.roundings}
    reordered = {entry.name for plan in plans for entry in plan.reordered}
    notes.roundings |= names | ({"reordered"} if reordered else set())
    if states := _other_states(expected.states, record.states):
        raise _Ended(Verdict.DIFFERENT, f"generators {states}", where)
    apart: dict[str, float] = {}
    unit = _unit(program)
    written_twice = " ".join(text for text in names if text.startswith("buffers "))
    for name, value in expected.numbers.items():
        if name.startswith("buffer ") and f" {name.removeprefix('buffer ')}," in written_twice:
            continue  # named, and more than a rounding
        apart |= _ulps(name, value, record.numbers.get(name, "missing"), unit)
    if not apart:
        return False
    worst = max(apart, key=lambda name: apart[name])
    size = _size(apart, expected)
    others = ", ".join(list(apart)[:6])
    told = f"{where}: {worst} by {apart[worst]:.3g} ulp; {len(apart)} tensors: {others}"
    if names or reordered:
        if size == "not rounding":
            raise _Ended(
                Verdict.DIFFERENT, "named, but not rounding", f"{told}; named {[*names, *reordered]}"
            )
        notes.off |= apart.keys()
    elif size == "not rounding" or not _is_unsteady(program):
        raise _Ended(Verdict.DIFFERENT, f"undeclared, {size}", told)
    return True


def _size(apart: Mapping[str, float], expected: StepRecord) -> str:
    """What differences look like: roundings of each tensor, or beside the largest gradient, or more.

    A sum that cancels, as the gradient of a bias before a norm, is noise in itself.
    """
    if max(apart.values()) <= _MOST_ULPS:
        return "rounding"
    gradients = {name: t for name, t in expected.numbers.items() if name.startswith("gradient")}
    most = {name: largest(t) for name, t in gradients.items() if t is not None}
    limit = _MOST_ULPS * max(most.values(), default=0.0)
    is_small = all(off * most.get(name, math.inf) <= limit for name, off in apart.items())
    return "small" if is_small else "not rounding"


def _is_unsteady(program: Program) -> bool:
    """Whether eager itself gives other numbers when it runs again."""
    twice = [_eager(program) for _ in range(2)]
    return any(
        _ulps(name, value, other.numbers[name], 0.0)
        for one, other in zip(*twice, strict=True)
        for name, value in one.numbers.items()
    )


def _unit(program: Program) -> float:
    """The ulp of 1 in the coarsest type that a program computes in."""
    words = str(program) + " ".join(sources(program))
    if any(word in words for word in ("autocast", "float16", "half", "cast(")):
        return torch.finfo(torch.bfloat16).eps * _MOST_HALF_ULPS / _MOST_ULPS
    return torch.finfo(getattr(torch, program.dtype)).eps


def _ulps(name: str, expected: Any, value: Any, unit: float) -> dict[str, float]:
    """How far a tensor is off, in ulps of its largest element; empty if its bits are the same.

    Args:
        name: Of the tensor.
        expected: The original's.
        value: The fitted module's.
        unit: The least ulp of 1.
    """
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        same = type(expected) is type(value) and (expected == value or expected != expected)
        return {} if same else {name: math.inf}
    if same_bits(expected, value):
        return {}
    off, scale = difference(expected, value), largest(expected)
    if expected.dtype != value.dtype or not (expected.is_floating_point() or expected.is_complex()):
        return {name: math.inf}
    if off == 0:
        return {name: 0.0}  # zeros of another sign
    ulp = max(unit, torch.finfo(expected.dtype).eps) * scale
    return {name: off / ulp if ulp else math.inf}


def _check_peak(program: Program, fitted: Any) -> None:
    """Measures a step like the planned one.

    Raises:
        _Ended: It takes more than its plan or the budget says.
    """
    loop = program.loop
    is_other_step = loop.drops or loop.penalizes or loop.retains or loop.gradient == "given" or loop.freezes
    if is_other_step or loop.autocast or not (loop.is_told or program.result == "loss"):
        return
    forwards = loop.in_flight
    if forwards > program.options.get("forwards_in_flight", 1):
        return
    for parameter in fitted.parameters():
        parameter.grad = None
    args = arguments(program, 0)
    loss_of(program)(fitted(*args)).backward()
    plan: Plan = fitted.irc_plans[0][1]
    peak = irc.measured_peak_bytes(fitted, args, loss=loss_of(program), forwards=forwards)
    if peak > min(plan.peak_bytes, plan.budget_bytes):
        costs = program.options.get("costs", "analytic")
        raise _Ended(
            Verdict.OVER,
            f"by {costs} costs",
            f"measured {peak}, predicted {plan.peak_bytes}, budget {plan.budget_bytes}",
        )
