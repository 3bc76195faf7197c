"""Tells which numbers of a step may be off from the model's own by rounding, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .graph import Gradients, Graph, InputRole, Node, OutputRole, Trait
from .types import DType, Storage

__all__ = ["Reordered", "reordered", "reordered_lines"]


@dataclass(frozen=True, slots=True)
class Reordered:
    """A tensor that a step leaves, whose numbers may differ from the model's own by rounding.

    Args:
        name: A parameter, whose gradient it is (or which the optimizer in backward sets), or a buffer, by its
            dotted name; or `input 0`, whose gradient it is, or `output 0`.
        terms: The number of terms of each element, if it is a sum of numbers that have the same bits; None if
            it is computed from such sums.
        bound: The most by which an element differs, as a fraction of the sum of its terms' magnitudes; None
            if it is computed from sums, or in so few bits that there is no bound.
    """

    name: str
    terms: int | None = None
    bound: float | None = None

    @staticmethod
    def from_json(row: dict[str, Any]) -> Reordered:
        """Reads what `asdict` gives.

        Raises:
            ValueError: For a negative number, or one that is none.
            LookupError: When something is missing.
        """
        name, terms, bound = row["name"], row["terms"], row["bound"]
        is_known = isinstance(name, str) and isinstance(terms, int | None) and isinstance(bound, float | None)
        if not is_known or terms is True or not 0 <= (terms or 0) < 1 << 63 or not 0 <= (bound or 0.0) < 1:
            raise ValueError(f"a sum in another order is {row!r}")
        return Reordered(name, terms, bound)

    def __str__(self) -> str:
        if self.terms is None:
            return f"{self.name}, which is computed from sums in another order, or by kernels"
        most = "" if self.bound is None else f", by at most {self.bound:.2g} of their magnitudes' sum"
        return f"{self.name}, a sum of {self.terms:,} terms in another order{most}"


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum in another order.

    Args:
        terms: The number of its terms.
        parts: The number of operations that added them, each of which rounds to the type of its result.
        unit: The unit roundoff of the coarsest type of these.
    """

    terms: int
    parts: int
    unit: float

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(self.terms + other.terms, self.parts + other.parts, max(self.unit, other.unit))

    @property
    def bound(self) -> float | None:
        """The most by which two orders differ.

        Each is off from the sum by at most gamma(n) = n u / (1 - n u) of the magnitudes' sum, for n roundings
        with unit roundoff u. In 16 bits, operations add in 32 bits and round what they return.

        Source:
            Higham, Accuracy and Stability of Numerical Algorithms (2002), section 4.2.
        """
        inner = min(self.unit, _unit(DType.FLOAT32))
        gammas = (_gamma(self.terms, inner), _gamma(self.parts, self.unit) if self.unit > inner else 0.0)
        bound = 2 * sum(gammas)
        return bound if bound < 1 else None


def _gamma(roundings: int, unit: float) -> float:
    return roundings * unit / (1 - roundings * unit) if roundings * unit < 1 else math.inf


def _unit(dtype: DType) -> float:
    """The unit roundoff of a type; 1 if it is none of numbers with a point."""
    return _UNITS.get(dtype, 1.0)


_UNITS = {
    DType.FLOAT64: 2.0**-53,
    DType.FLOAT32: 2.0**-24,
    DType.FLOAT16: 2.0**-11,
    DType.BFLOAT16: 2.0**-8,
    DType.COMPLEX128: 2.0**-52,
    DType.COMPLEX64: 2.0**-23,
}

_PRODUCTS = frozenset(("aten.mm.default", "aten.addmm.default", "aten.addmm_.default"))
_SUM = "aten.sum.dim_IntList"
_ADDITIONS = frozenset(("aten.add.Tensor", "aten.add_.Tensor"))
_COPIES = frozenset(
    ("aten.cat.default", "aten.clone.default", "aten.detach.default", "aten._to_copy.default")
)
"""The operations whose results have the numbers of their operands, but for their type."""


def reordered(graph: Graph, micro_batches: int = 1) -> tuple[Reordered, ...]:
    """Lists what a step leaves that sums in another order reach: all else has the bits of the model's own.

    It follows from the nodes that are marked with `Trait.REORDERED`.

    Args:
        graph: The step, or that of one micro-batch.
        micro_batches: The number of them, whose gradients are added up.
    """
    reached: dict[Storage, _Sum | None] = {}
    """The storages that may be off: sums of numbers that are not, or (None) computed from such sums."""
    found: dict[str, _Sum | None] = {}
    inputs = {e.value.storage: e for e in reversed(graph.inputs) if e.role is not InputRole.TANGENT}
    for node in graph.nodes:
        is_reached = any(value.storage in reached for value in node.operands)
        if node.is_view or not (is_reached or Trait.REORDERED in node.traits):
            continue
        what = _sum_of(node, reached)
        for value in node.values:
            reached[value.storage] = what
        entry = inputs.get(node.operands[0].storage) if Trait.EFFECT in node.traits else None
        if entry is not None:
            is_added = node.releases is Gradients.ACCUMULATED
            found[_named(entry.role, entry.target)] = reached[node.operands[1].storage] if is_added else None
            if not is_added:
                reached[entry.value.storage] = None
    for output in graph.outputs:
        if output.value is None or output.value.storage not in reached:
            continue
        is_output = output.role is OutputRole.OUTPUT
        name = f"output {output.target}" if is_output else _named(*output.gradient_of)
        found[name] = reached[output.value.storage]
    return tuple(_of_all(name, each, micro_batches) for name, each in found.items())


def _of_all(name: str, each: _Sum | None, micro_batches: int) -> Reordered:
    """A tensor that each micro-batch leaves; the gradients of all of them are added up."""
    if each is None:
        return Reordered(name)
    if micro_batches > 1 and not name.startswith("output "):
        each = _Sum(each.terms * micro_batches, (each.parts + 1) * micro_batches, each.unit)
    return Reordered(name, each.terms, each.bound)


def reordered_lines(found: Sequence[Reordered]) -> Iterator[str]:
    """Says in a few lines what sums in another order reach."""
    sums = [str(each) for each in found if each.terms is not None]
    others = [each.name for each in found if each.terms is None]
    yield from sums[:_NAMED]
    if len(sums) > _NAMED:
        yield f"{len(sums) - _NAMED} more sums in another order"
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        named = ", ".join(others[:_NAMED])
        yield f"what is computed from sums in another order, or by kernels: {named}{more}"


_NAMED = 4
"""The most tensors that a row names."""


def _named(role: InputRole, target: str) -> str:
    return f"input {target}" if role is InputRole.INPUT else target


def _sum_of(node: Node, reached: Mapping[Storage, _Sum | None]) -> _Sum | None:
    """Describes the results of a node as sums of numbers that are not off; None if they are more."""
    own = _Sum(1, 1, max((_unit(value.type.dtype) for value in node.values), default=1.0))
    known = [reached.get(value.storage, _Sum(1, 0, 0.0)) for value in node.operands]
    sums = [each for each in known if each is not None]
    if len(sums) < len(known) or not node.operands:
        return None
    if node.op in _ADDITIONS and not node.keywords and len(node.operands) == 2:
        return sum(sums, replace(own, terms=0))
    if node.op in _COPIES:
        return max(sums, key=lambda each: each.terms) + replace(own, terms=0)
    if Trait.REORDERED not in node.traits:
        return None
    factors = node.operands if node.op == _SUM else node.operands[-2:]
    if any(value.storage in reached for value in factors):
        return None
    if node.op in _PRODUCTS:
        before = sums[0] if len(node.operands) == 3 else replace(own, terms=0, parts=0)
        return before + replace(own, terms=factors[0].type.shape[-1])
    if node.op == _SUM:
        return replace(own, terms=factors[0].type.numel // max(node.values[0].type.numel, 1))
    return None
