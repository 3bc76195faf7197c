"""Tells how irc did with a program, beside eager: numbers, generators and measured memory."""

from __future__ import annotations

import contextlib
import logging
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
from torch.utils.checkpoint import set_checkpoint_early_stop

import irc
from irc.compiler.frozen_heap import frozen_heap
from irc.ir import BudgetError, IrcError, Plan, TimeLimitError, first_line
from irc.torch_support.bits import same_bits

from .loops import (
    OPTIMIZERS,
    StepRecord,
    around,
    generator_states,
    keeping_generators,
    loss_of,
    run,
)
from .programs import Program, arguments, build, to_json
from .rounding import Declared, is_rounding, noise, ulps_apart

__all__ = ["BAD", "Outcome", "Verdict", "examine"]

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
        roundings: The texts of the plans' roundings, and `reordered` if sums are in another order.
        differing: Those of which a tensor differs.
        off: The tensors that differ, each named by a rounding.
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
    differing: tuple[str, ...] = ()
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
        self.differing: set[str] = set()
        self.off: set[str] = set()
        self.codes: list[str] = []
        self._noise: dict[str, float] | None = None

    def noise(self, program: Program, records: list[StepRecord]) -> dict[str, float]:
        """How far eager's own noise moves each tensor: measured once, if it is asked for."""
        if self._noise is None:
            self._noise = noise(program, records)
        return self._noise


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
            # a checkpoint that stops early reads noise of RReLU that nobody wrote: a fault of torch
            with set_checkpoint_early_stop(False):
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
        tuple(sorted(notes.differing)),
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
        steps, reference = run(program, fitted, applies=False), None
        for number, record in enumerate(records):
            differs = _check_part(records, number, steps.send(reference), fitted, notes, program)
            reference = record if differs else None
    # a decomposition may fail on numbers that one more update of this data makes, in eager too
    with _errors("measuring"), frozen_heap(), contextlib.suppress(torch.linalg.LinAlgError):
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


def _check_part(
    records: list[StepRecord], number: int, record: StepRecord, fitted: Any, notes: _Notes, program: Program
) -> bool:
    """Compares what a part of a step leaves, tensor by tensor.

    Args:
        records: Eager's.
        number: The place of this part among them.
        record: The fitted module's.
        fitted: That module.
        notes: What the run has seen so far.
        program: The program.

    Returns:
        Whether something is off by a rounding that a plan names.

    Raises:
        _Ended: A difference of a tensor that no plan names, or one that is not a rounding.
    """
    expected, declared = records[number], Declared.by(fitted)
    notes.roundings |= {str(each) for each in declared.roundings}
    if states := _other_states(expected.states, record.states):
        raise _Ended(Verdict.DIFFERENT, f"generators {states}", expected.where)
    pairs = {name: (value, record.numbers.get(name, "missing")) for name, value in expected.numbers.items()}
    apart = [name for name, pair in pairs.items() if ulps_apart(*pair) is not None]
    naming = {
        name: declared.naming(name, apart, "optimizer_in_backward" in program.options) for name in apart
    }
    unnamed = [name for name, roundings in naming.items() if not roundings]
    if unnamed:
        unsteady = _unsteady(program, expected, number)
        changed = {name: pairs[name] for name in unnamed if name not in unsteady}
        size = "rounding" if all(is_rounding(*pair) for pair in changed.values()) else "not rounding"
        _refuse(f"undeclared, {size}", expected.where, changed, declared)
    larger = {
        name: pairs[name]
        for name, roundings in naming.items()
        if roundings and not any(each.is_more for each in roundings) and not is_rounding(*pairs[name])
    }
    if larger:
        shifts = notes.noise(program, records)
        wrong = {n: pair for n, pair in larger.items() if not is_rounding(*pair, shifts.get(n, 0.0))}
        _refuse("named, but not rounding", expected.where, wrong, declared)
    notes.off.update(name for name, roundings in naming.items() if roundings)
    notes.differing |= {str(each) for roundings in naming.values() for each in roundings}
    return bool(apart)


def _refuse(cause: str, where: str, pairs: Mapping[str, tuple[Any, Any]], declared: Declared) -> None:
    """Ends the run if there are tensors that differ.

    Raises:
        _Ended: There are.
    """
    if pairs:
        ulps = {name: ulps_apart(*pair) or 0.0 for name, pair in pairs.items()}
        worst, others = max(ulps, key=lambda name: ulps[name]), ", ".join(list(ulps)[:6])
        told = f"{where}: {worst} by {ulps[worst]:.3g} ulp; {len(ulps)} tensors: {others}"
        named = sorted(map(str, declared.roundings))
        raise _Ended(Verdict.DIFFERENT, cause, f"{told}; named {named}" if named else told)


def _unsteady(program: Program, expected: StepRecord, number: int) -> set[str]:
    """The tensors of a part that differ if eager runs again, as after the first call of scripted code."""
    with keeping_generators():
        again = [_eager(program)[number].numbers for _ in range(2)]
    pairs = [(name, value, other[name]) for other in again for name, value in expected.numbers.items()]
    return {name for name, value, other in pairs if ulps_apart(value, other) is not None}


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
