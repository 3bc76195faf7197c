"""Numbers that depend on the length of a call's tensors, and objects of the IR that have such numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from typing import Any

from .types import Storage, Value, allocation_bytes

__all__ = ["DiffersByLength", "Polynomial", "fit", "generalize", "numbers_by_length", "specialize"]


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A number `c[0] + c[1] L + c[2] L²` of a length L. It stands for a number in an object of the IR.

    Args:
        coefficients: c, with as many terms as it takes.
        block: The number that it is rounded up to a multiple of, as the allocator of a device does.
        is_float: Whether the number is a float.
    """

    coefficients: tuple[int, ...]
    block: int = 1
    is_float: bool = False

    def at(self, length: int) -> int | float:
        """The number for a length."""
        number = sum(c * length**power for power, c in enumerate(self.coefficients))
        number = -(-number // self.block) * self.block
        return float(number) if self.is_float else number

    def is_most_at(self, first: int, last: int) -> bool:
        """Whether no length from `first` to `last` has a larger number than `last`."""
        if all(c >= 0 for c in self.coefficients[1:]):
            return True
        most = self.at(last)
        return all(self.at(length) <= most for length in range(first, last))

    def __str__(self) -> str:
        """The number as Python, of a variable `length`."""
        terms = [
            " * ".join([*([str(c)] if c != 1 or not power else []), *["length"] * power])
            for power, c in enumerate(self.coefficients)
            if c
        ]
        text = " + ".join(reversed(terms)) or "0"
        return f"float({text})" if self.is_float else text


class DiffersByLength(Exception):
    """Two objects differ in something that is not a polynomial of the length."""


def fit(lengths: Sequence[int], numbers: Sequence[int | float]) -> Polynomial | None:
    """Fits the polynomial of the lowest degree, at most 2, whose coefficients are whole numbers.

    Args:
        lengths: Three different lengths or more.
        numbers: The number at each.
    """
    if any(number != int(number) for number in numbers):
        return None
    is_float = isinstance(numbers[0], float)
    for terms in (2, 3):
        found = _through(
            [Fraction(each) for each in lengths[:terms]], [int(each) for each in numbers[:terms]]
        )
        if all(c.denominator == 1 for c in found):
            polynomial = Polynomial(tuple(map(int, found)), is_float=is_float)
            if all(polynomial.at(k) == number for k, number in zip(lengths, numbers, strict=True)):
                return polynomial
    return None


def _through(points: Sequence[Fraction], numbers: Sequence[int]) -> list[Fraction]:
    """Returns the coefficients of the polynomial through some points, the constant first (Lagrange)."""
    total = [Fraction(0)] * len(points)
    for k, (point, number) in enumerate(zip(points, numbers, strict=True)):
        basis, scale = [Fraction(1)], Fraction(number)
        for other in (each for place, each in enumerate(points) if place != k):
            basis = [a - other * b for a, b in zip([Fraction(0), *basis], [*basis, Fraction(0)], strict=True)]
            scale /= point - other
        total = [t + scale * b for t, b in zip(total, basis, strict=True)]
    return total


def generalize(versions: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Returns one object for several that are alike but for numbers: these become polynomials of the length.

    Args:
        versions: The same object (a graph, a type, a tuple of them) at each length.
        lengths: The lengths, three or more.

    Raises:
        DiffersByLength: They differ in something else.
    """
    return _Generalization(lengths).of(tuple(versions))


class _Generalization:
    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.known: dict[tuple[int, ...], Any] = {}
        """What was made of objects that are compared by identity, by the versions' identities."""
        self.seen: set[tuple[int, int]] = set()
        self.payloads: dict[int, tuple[int, ...]] = {}
        """The payloads of values, by the identity of the first version of their storage."""

    def of(self, versions: tuple[Any, ...]) -> Any:
        first = versions[0]
        if _is_of_ir(first) and all(type(each) is type(first) for each in versions):
            return self._object(versions)
        if all(each is first for each in versions):
            return first
        kind = type(first)
        if any(type(each) is not kind for each in versions):
            raise DiffersByLength(f"{first!r} and {versions[1]!r}")
        if isinstance(first, tuple):
            if any(len(each) != len(first) for each in versions):
                raise DiffersByLength(f"{len(first)} and {len(versions[-1])} of {kind.__name__}")
            made = tuple(self.of(items) for items in zip(*versions, strict=True))
            return first if all(a is b for a, b in zip(made, first, strict=True)) else made
        if all(each == first for each in versions):
            return first
        polynomial = fit(self.lengths, versions) if kind in (int, float) else None
        if polynomial is None:
            raise DiffersByLength(" and ".join(map(str, versions)))
        return polynomial

    def _object(self, versions: tuple[Any, ...]) -> Any:
        key = tuple(map(id, versions))
        if key not in self.known:
            if type(versions[0]).__eq__ is object.__eq__:
                seen = {(place, id(each)) for place, each in enumerate(versions)}
                if not seen.isdisjoint(self.seen):
                    raise DiffersByLength(f"{versions[0]!r} is two at another length")
                self.seen |= seen
            self.known[key] = self._made(versions)
        return self.known[key]

    def _made(self, versions: tuple[Any, ...]) -> Any:
        first = versions[0]
        found: dict[str, Any] = {}
        if isinstance(first, Value):
            self.payloads[id(first.storage)] = tuple(version.type.nbytes for version in versions)
        for each in fields(first):
            numbers = tuple(getattr(version, each.name) for version in versions)
            if isinstance(first, Storage) and each.name == "nbytes":
                found[each.name] = self._allocated(numbers, first)
            else:
                found[each.name] = self.of(numbers)
        if all(value is getattr(first, name) for name, value in found.items()):
            return first
        return type(first)(**found)

    def _allocated(self, numbers: tuple[int, ...], storage: Storage) -> int | Polynomial:
        """Returns the bytes of a storage, which the allocator of a GPU has rounded up to blocks."""
        block = allocation_bytes(1, storage.device)
        payloads = numbers if block == 1 else self.payloads.get(id(storage), numbers)
        if all(each == payloads[0] for each in payloads) and all(each == numbers[0] for each in numbers):
            return numbers[0]
        found = fit(self.lengths, payloads)
        if found is None or tuple(allocation_bytes(each, storage.device) for each in payloads) != numbers:
            raise DiffersByLength(f"storages of {', '.join(map(str, numbers))} B on {storage.device}")
        return replace(found, block=block)


def specialize(general: Any, length: int) -> Any:
    """Returns an object of `generalize` for a length: its polynomials become numbers again."""
    return _specialized(general, length, {})


def _specialized(general: Any, length: int, known: dict[int, Any]) -> Any:
    if isinstance(general, Polynomial):
        return general.at(length)
    if type(general) is tuple:
        made = tuple(_specialized(each, length, known) for each in general)
        return general if all(a is b for a, b in zip(made, general, strict=True)) else made
    if not _is_of_ir(general):
        return general
    if id(general) not in known:
        found = {
            each.name: _specialized(getattr(general, each.name), length, known) for each in fields(general)
        }
        is_same = all(value is getattr(general, name) for name, value in found.items())
        known[id(general)] = general if is_same else type(general)(**found)
    return known[id(general)]


def numbers_by_length(general: Any) -> set[Polynomial]:
    """Returns the different polynomials within an object of `generalize`."""
    found: set[Polynomial] = set()
    known: dict[int, Any] = {}
    waiting = [general]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Polynomial):
            found.add(each)
        elif type(each) is tuple:
            waiting.extend(each)
        elif _is_of_ir(each) and id(each) not in known:
            known[id(each)] = each
            waiting.extend(getattr(each, field.name) for field in fields(each))
    return found


def _is_of_ir(value: object) -> bool:
    return is_dataclass(value) and type(value).__module__.startswith(__package__ or "irc.ir")
