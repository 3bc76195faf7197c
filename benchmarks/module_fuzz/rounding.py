"""Judges tensors of a step that differ from eager's: whether a plan names them, and whether it is a rounding.

A difference is a rounding if it is at most 100 ulp of the tensor's largest element, in the tensor's own type
(16 in types of 16 bits, where 100 would be most of it).

That measure fails where a tensor is noise in itself. The gradient of a bias before a norm is a sum whose
exact value is zero: its largest element is what rounding left of far larger terms. Numbers that were computed
in 16 bits and stored in 32 have the noise of 16. So where a named tensor differs by more, eager's own noise
is measured, by Monte Carlo arithmetic: its step runs three times with each number that an operation computes
moved by one ulp of its type, up or down by chance. The tensor may differ by ten times the most
that this moves it: an operation that adds terms in another order is off by more than one ulp of its result. A
wrong gradient differs by its own size, which is millions of ulps.

Source:
    Parker, Monte Carlo Arithmetic (1997): random errors of one ulp in each operation show what rounding does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from irc.backends.torch.compiled_plan import CompiledPlan
from irc.backends.torch.original import FITTED
from irc.compiler.compare import difference, largest, names_in_plan
from irc.ir import Plan, Rounding, tensor_names
from irc.torch_support.bits import same_bits

from .loops import StepRecord, keeping_generators, run
from .programs import Program, build

__all__ = ["Declared", "is_rounding", "noise", "ulps_apart"]

_MOST_ULPS = 100.0
_MOST_HALF_ULPS = 16.0
_MOST_SHIFTS = 10.0
_NOISY_RUNS = 3


@dataclass(frozen=True)
class Declared:
    """The declarations that the plans of a fitted module make of the tensors of a step.

    Args:
        plans: The plans, with what the steps so far showed.
        outputs: The plans' names of each tensor of the result, by its place in the result.
        written: The names of the inputs that a plan writes: their values may differ, too.
    """

    plans: tuple[Plan, ...]
    outputs: Mapping[str, frozenset[str]]
    written: frozenset[str]

    @staticmethod
    def by(fitted: Any) -> Declared:
        """The declarations by now: a backward may show more."""
        compiled: Sequence[CompiledPlan] = vars(fitted)[FITTED].compiled_plans
        outputs: dict[str, frozenset[str]] = {}
        written: set[str] = set()
        for each in compiled:
            statics = each.program.statics
            for place, name in names_in_plan(each.signature.deliveries, statics).items():
                outputs[place] = outputs.get(place, frozenset()) | {name}
            names = tensor_names(statics)
            written |= {name for k in each.program.written for name in names[statics[k].value]}
        plans = (each.noticing_plan for each in compiled)
        return Declared(tuple(plan for plan in plans if plan), outputs, frozenset(written))

    @property
    def roundings(self) -> frozenset[Rounding]:
        """The declarations of all plans; what `reordered` names is one of them."""
        reordered = tuple({each.name for plan in self.plans for each in plan.reordered})
        more = (Rounding("reordered", reordered),) if reordered else ()
        return frozenset((*more, *(each for plan in self.plans for each in plan.roundings)))

    def naming(self, name: str, apart: Iterable[str], sets_parameters: bool) -> list[Rounding]:
        """The roundings that name a tensor of a record.

        Args:
            name: Its name there.
            apart: The tensors of the record that differ: a loss that the loop computes from them may, too.
            sets_parameters: Whether the plan does, within backward.
        """
        if name.startswith("loss "):
            results = [other for other in apart if re.fullmatch(r"forward \d+, output \d+", other)]
            return [each for other in results for each in self.naming(other, (), sets_parameters)]
        names = self._plan_names(name, sets_parameters)
        return [each for each in self.roundings if names and _is_named(each, names)]

    def _plan_names(self, name: str, sets_parameters: bool) -> frozenset[str]:
        """The plans' names of a tensor that they compute; none for what the loop computes, or eager."""
        kind, _, target = name.partition(" ")
        if match := re.fullmatch(r"forward \d+, (output \d+)", name):
            return self.outputs.get(match[1], frozenset())
        if name.startswith("gradient of input "):
            return frozenset(("input 0",))
        if name.startswith("gradient of "):
            return frozenset((name.removeprefix("gradient of "),))
        target = "input 0" if kind == "input" else target
        is_computed = kind == "buffer" or (kind == "parameter" and sets_parameters) or target in self.written
        return frozenset((target,) if kind in ("buffer", "parameter", "input") and is_computed else ())


def _is_named(rounding: Rounding, names: Iterable[str]) -> bool:
    return rounding.tensors is None or any(name in rounding.tensors for name in names)


def ulps_apart(expected: Any, value: Any) -> float | None:
    """How far a tensor is off, in ulps of its largest element in its type; None if its bits are the same."""
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        same = type(expected) is type(value) and (expected == value or expected != expected)
        return None if same else math.inf
    if same_bits(expected, value):
        return None
    if expected.dtype != value.dtype or not (expected.is_floating_point() or expected.is_complex()):
        return math.inf
    off, ulp = difference(expected, value), torch.finfo(expected.dtype).eps * largest(expected)
    if off == 0:
        return 0.0  # zeros of another sign
    return off / ulp if ulp else math.inf


def is_rounding(expected: Any, value: Any, shift: float = 0.0) -> bool:
    """Whether a difference is a rounding.

    Args:
        expected: Eager's.
        value: The fitted module's.
        shift: How far eager's own noise moves the tensor.
    """
    ulps = ulps_apart(expected, value)
    if ulps is None or (math.isinf(ulps) and not shift):
        return ulps is None
    if not isinstance(expected, Tensor) or expected.dtype != value.dtype:
        return False
    is_half = torch.finfo(expected.dtype).bits == 16
    most = _MOST_HALF_ULPS if is_half else _MOST_ULPS
    return ulps <= most or difference(expected, value) <= _MOST_SHIFTS * shift


def noise(program: Program, records: Sequence[StepRecord]) -> dict[str, float]:
    """How far each tensor moves if eager's operations are off by an ulp.

    Args:
        program: The program.
        records: Eager's.

    Returns:
        The largest shift of each tensor in any record and run, by name: where a sum cancels out, one tells
        little. None if a step cannot run so.
    """
    try:
        with keeping_generators():
            runs = [list(_moved(program, records, seed)) for seed in range(_NOISY_RUNS)]
    except Exception:
        return {}  # an operation that no mode can see: 100 ulp are then all that passes
    largest_shifts: dict[str, float] = {}
    for name, shift in (each for steps in runs for shifts in steps for each in shifts.items()):
        largest_shifts[name] = max(shift, largest_shifts.get(name, 0.0))
    return largest_shifts


def _moved(program: Program, records: Sequence[StepRecord], seed: int) -> Iterable[dict[str, float]]:
    steps, reference = run(program, build(program)), None
    for record in records:
        with _Moving(seed):
            other = steps.send(reference)
        tensors = {name: value for name, value in record.numbers.items() if isinstance(value, Tensor)}
        yield {name: _shift(value, other.numbers.get(name)) for name, value in tensors.items()}
        reference = record


def _shift(expected: Tensor, value: Any) -> float:
    shift = difference(expected, value) if isinstance(value, Tensor) else 0.0
    return shift if math.isfinite(shift) else 0.0


class _Moving(TorchDispatchMode):
    """Moves each number that an operation computes by one ulp, up or down."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = all(each.alias_info is None for each in func._schema.returns)
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if is_new and operands:
            for leaf in pytree.tree_leaves(result):
                is_float = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
                if is_float and not _is_selected(leaf, operands):
                    self._move(leaf)
        return result

    def _move(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or any(
            size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            return
        signs = torch.randint(0, 2, tensor.shape, generator=self._generator).mul_(2).sub_(1)
        tensor.mul_(1 + torch.finfo(tensor.dtype).eps * signs.to(torch.float64))


def _is_selected(result: Tensor, operands: Iterable[Tensor]) -> bool:
    """Whether all numbers of a result stand in one operand: a gradient may look for a maximum there."""
    alike = [each for each in operands if each.dtype == result.dtype and each.layout is torch.strided]
    return (
        result.layout is torch.strided
        and not result.is_complex()
        # torch.isin refuses few elements to look for that are not contiguous
        and any(bool(torch.isin(result.contiguous(), each.contiguous()).all()) for each in alike)
    )
