"""Tells which numbers of a step may be off from the model's own by rounding, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .graph import Gradients, Graph, Input, InputRole, Node, OutputRole, Region, Trait
from .types import DType, Storage, TensorType, Value

__all__ = [
    "Reordered",
    "Rounding",
    "computed_from",
    "gradients_through",
    "reordered",
    "reordered_lines",
    "tensor_names",
]


@dataclass(frozen=True, slots=True)
class Rounding:
    """A reason why numbers of a step may differ from the model's own by rounding; its text is `str` of it.

    Args:
        text: The numbers and the reason, with the line of the model if it has one.
        tensors: The tensors that may differ, as `Reordered.name` names them; None for all.
        is_more: Whether they may differ by more than rounding, as a buffer that eager writes once more.
    """

    text: str
    tensors: tuple[str, ...] | None = None
    is_more: bool = False

    @staticmethod
    def from_json(row: Any) -> Rounding:
        """Reads what `asdict` gives, or the text alone, as earlier versions wrote it.

        Raises:
            ValueError: For something else.
            LookupError: When something is missing.
        """
        if isinstance(row, str):
            return Rounding(row)
        text, tensors, is_more = row["text"], row["tensors"], row["is_more"]
        is_known = (
            isinstance(text, str) and isinstance(tensors, list | tuple | None) and isinstance(is_more, bool)
        )
        if not is_known or not all(isinstance(name, str) for name in tensors or ()):
            raise ValueError(f"a rounding is {row!r}")
        return Rounding(text, None if tensors is None else tuple(tensors), is_more)

    def __str__(self) -> str:
        return self.text


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
    reached = _reached(graph, lambda node: Trait.REORDERED in node.traits)
    return tuple(_of_all(name, each, micro_batches) for name, each in reached.items())


def computed_from(graph: Graph, nodes: Iterable[Node]) -> tuple[str, ...]:
    """Names the tensors that a step leaves that are computed from the results of some nodes."""
    return tuple(_reached(graph, frozenset(nodes).__contains__))


def gradients_through(graph: Graph, values: Iterable[Value]) -> tuple[str, ...]:
    """Names the tensors whose gradients are computed from the gradients of some values."""
    before = {value.storage for value in values}
    for node in reversed(graph.nodes):
        if node.region is Region.FORWARD and not before.isdisjoint(value.storage for value in node.values):
            before.update(value.storage for value in node.operands)
    inputs = (each for each in graph.inputs if each.requires_grad and each.value.storage in before)
    return tuple(map(_tensor_name, inputs))


def _reached(graph: Graph, is_off: Callable[[Node], bool]) -> dict[str, _Sum | None]:
    """The tensors that a step leaves that the results of some nodes reach, by name.

    An output that they reach is one from which the loss computes the gradients of all outputs.
    """
    reached: dict[Storage, _Sum | None] = {}
    """The storages that may be off: sums of numbers that are not, or (None) computed from such sums."""
    names: dict[str, _Sum | None] = {}
    inputs = {e.value.storage: e for e in reversed(graph.inputs) if e.role is not InputRole.TANGENT}
    entries = {(entry.role, entry.target): entry for entry in graph.inputs}
    all_names = tensor_names(graph.inputs)
    outputs = {o.value.storage for o in graph.outputs if o.value and o.role is OutputRole.OUTPUT}
    tangents = [e.value.storage for e in graph.inputs if e.role is InputRole.TANGENT]
    for node in graph.nodes:
        is_reached = any(value.storage in reached for value in node.operands)
        if node.is_view or not (is_reached or is_off(node)):
            continue
        what = _sum_of(node, reached)
        for value in node.values:
            reached[value.storage] = what
            if value.storage in outputs:
                reached |= dict.fromkeys(tangents)
        entry = inputs.get(node.operands[0].storage) if Trait.EFFECT in node.traits else None
        if entry is not None:
            is_added = node.releases is Gradients.ACCUMULATED
            sum_of_it = reached[node.operands[1].storage] if is_added else None
            names |= dict.fromkeys(all_names[entry.value], sum_of_it)
            if not is_added:
                reached[entry.value.storage] = None
    for output in graph.outputs:
        if output.value is None or output.value.storage not in reached:
            continue
        if output.role is OutputRole.OUTPUT:
            of = (f"output {output.target}",)
        else:
            of = all_names[entries[output.gradient_of].value]
        names |= dict.fromkeys(of, reached[output.value.storage])
    return names


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


def _tensor_name(entry: Input) -> str:
    """The name of a parameter, a buffer or an input, or of its gradient."""
    return f"input {entry.target}" if entry.role is InputRole.INPUT else entry.target


def tensor_names(inputs: Sequence[Input]) -> dict[Value, tuple[str, ...]]:
    """All names of each parameter, buffer or input, or of its gradient: one that is tied has several."""
    names: dict[tuple[Storage, TensorType], list[str]] = {}
    by_value = {
        entry.value: names.setdefault((entry.value.storage, entry.value.type), []) for entry in inputs
    }
    for entry in inputs:
        by_value[entry.value].append(_tensor_name(entry))
    return {value: tuple(same) for value, same in by_value.items()}


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
