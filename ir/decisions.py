"""Says what becomes of each storage of a plan: by module, by line of the user's code, or one by one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .printable import printable
from .units import format_bytes

__all__ = [
    "ACTIONS",
    "Decision",
    "ModuleGroups",
    "Totals",
    "by_module",
    "lines_by",
    "module_path",
    "storage_lines",
]

ACTIONS = ("keep", "recompute", "swap", "free")
"""The actions of decisions, in the order of the columns."""

_SMALL = 0.002
"""Rows with less than this part of all bytes are folded into one."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Holds the decision for one forward storage, or for an offloaded tensor, and its reason.

    Args:
        storage: Name of the storage in the program.
        operation: The operation that makes it.
        nbytes: Its size.
        action: `keep`, `recompute`, `swap` or `free` (backward does not need it).
        runs_again: The number of times that its operation runs again.
        seconds: Time of these runs, in equal parts for each storage that the operation makes.
        reason: Why, in words.
        location: The origin of the operation, or "".
        annotation: The annotation of the user that decided, or "".
    """

    storage: str
    operation: str
    nbytes: int
    action: str
    runs_again: int
    seconds: float
    reason: str
    location: str = ""
    annotation: str = ""


@dataclass
class Totals:
    """The sums of some storages.

    Args:
        nbytes: The bytes by action.
        count: The number of storages.
        seconds: The time of the operations that run again.
    """

    nbytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACTIONS, 0))
    count: int = 0
    seconds: float = 0.0

    def add(self, decision: Decision) -> None:
        """Counts a storage."""
        self.nbytes[decision.action] += decision.nbytes
        self.count += 1
        self.seconds += decision.seconds

    @property
    def all_bytes(self) -> int:
        """The bytes of all of them."""
        return sum(self.nbytes.values())


class ModuleGroups:
    """Names modules so that equal layers share a name.

    The numbered children of a module are equal if the same operations are at the same places in them, up to
    half of which may be missing; children without modules, if their operations make the same bytes too. If
    all are equal their number is `*` (`h.*.attn`), or else a list of numbers (`features.10-12,15`).

    Args:
        made: The path of a module, an operation and bytes, for each storage.
    """

    def __init__(self, made: Iterable[tuple[str, str, int]]) -> None:
        self._root = _Module()
        for path, op, nbytes in made:
            module, parts = self._root, _parts(path)
            for place, name in enumerate(parts):
                module = module.inner.setdefault(name, _Module())
                module.below.add((".".join(parts[place + 1 :]), op))
            module.made.append((op, nbytes))

    @staticmethod
    def of(decisions: Iterable[Decision]) -> ModuleGroups:
        """Returns the groups of the modules that make these storages."""
        return ModuleGroups((_path(d), _op(d), d.nbytes) for d in decisions)

    def name(self, path: str) -> str:
        """Returns the name of a module, which is its path if nobody else is like it."""
        names: list[str] = []
        module: _Module | None = self._root
        for part in _parts(path):
            below = None if module is None else module.inner.get(part)
            label, module = (part, below) if module is None else module.labels.get(part, (part, below))
            names.append(label)
        return ".".join(names)


_MOST_DEPTH = 32
"""Levels of modules: what is deeper in one another is taken for one module."""

_MOST_KINDS = 100
"""Kinds of layers in one list that are compared with each other; others are equal only to the same."""

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


def _parts(path: str) -> list[str]:
    return path.split(".", _MOST_DEPTH - 1) if path else []


@dataclass
class _Module:
    """A module with what is in it, and what it makes itself.

    Args:
        inner: The modules in it.
        below: The place and the operation of each storage that is made in it.
        made: The operation and the bytes of each storage that it makes itself.
    """

    inner: dict[str, _Module] = field(default_factory=lambda: {})
    below: set[tuple[str, str]] = field(default_factory=lambda: set())
    made: list[tuple[str, int]] = field(default_factory=lambda: [])

    @cached_property
    def labels(self) -> dict[str, tuple[str, _Module]]:
        """The label of each child with a number, and the child like it in which most is made."""
        numbered = [name for name in self.inner if _NUMBER.fullmatch(name)]
        same: dict[object, list[str]] = defaultdict(list)
        for name in numbered:
            each = self.inner[name]
            same[frozenset(each.below) if each.inner else tuple(sorted(each.made))].append(name)
        alike: list[list[str]] = []
        for names in sorted(same.values(), key=lambda names: -len(self.inner[names[0]].below)):
            each = self.inner[names[0]]
            first = next((g for g in alike[:_MOST_KINDS] if self.inner[g[0]].covers(each)), None)
            if first is None:
                alike.append(names)
            else:
                first += names
        return {
            name: ("*" if 1 < len(names) == len(numbered) else _ranges(names), self.inner[names[0]])
            for names in alike
            for name in names
        }

    def covers(self, other: _Module) -> bool:
        """Whether another module is a layer like this one, of which something may be missing."""
        if not self.inner or not other.inner:
            return False
        return other.below <= self.below and 2 * len(other.below) >= len(self.below)


def _ranges(names: Sequence[str]) -> str:
    """Joins numbers that follow each other: `1-2,5`."""
    numbers = sorted(map(int, names))
    ends = [[number, number] for number in numbers[:1]]
    for number in numbers[1:]:
        if number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def module_path(module: str, source: str, op: str = "") -> str:
    """Returns the path of the module that an operation belongs to.

    Args:
        module: The path of its module, or "".
        source: The line of the user's code, or `ONNX node NAME`, whose path stands for a module; or "".
        op: The operation, which stands for a module in a file whose nodes have only numbers.
    """
    if module:
        return module
    node = source.removeprefix("ONNX node ")
    if node == source:
        return ""
    path, _, last = node.strip("/").rpartition("/")
    if path:
        return path.replace("/", ".")
    stem = re.sub(r"\d+$", "*", last)
    return stem if len(stem) >= _WORD else op.split(".")[1] if op.count(".") > 1 else op


_WORD = 5
"""The fewest letters of the name of an ONNX node that says more than its operation."""


def _path(decision: Decision) -> str:
    """The path of the module that makes a storage."""
    return module_path(*_place(decision), _op(decision))


def _op(decision: Decision) -> str:
    """The operation that makes a storage."""
    _, _, op = decision.operation.rpartition("(")
    return op.rstrip(")")


def _place(decision: Decision) -> tuple[str, str]:
    """The module and the source of a storage."""
    module = source = node = ""
    for part in decision.location.split(", "):
        if part.startswith("module "):
            module = part.removeprefix("module ")
        elif part.startswith("ONNX node "):
            node = part
        elif part:
            source = part
    return module, source if module or not node else node


def storage_lines(decisions: Sequence[Decision], top: int | None = None) -> list[str]:
    """A table of the storages that are not kept, or that an annotation keeps, largest first, with reasons."""
    changed = sorted((d for d in decisions if d.action != "keep" or d.annotation), key=lambda d: -d.nbytes)
    rows = [
        (
            *map(printable, (d.storage, d.operation)),
            format_bytes(d.nbytes),
            *map(printable, (d.action, d.reason, d.location)),
        )
        for d in changed[:top]
    ]
    lines = _table(("storage", "made by", "size", "action", "reason", "where"), rows)
    if top is not None and len(changed) > top:
        lines.append(f"{len(changed) - top} more ({format_bytes(sum(d.nbytes for d in changed[top:]))})")
    kept = [d for d in decisions if d.action == "keep"]
    total = format_bytes(sum(d.nbytes for d in kept))
    return [*lines, f"{len(kept)} storages are kept until backward reads them ({total})"]


def lines_by(what: str, decisions: Iterable[Decision], top: int | None = None) -> list[str]:
    """A table of the bytes of all storages by `module` (a tree, equal layers merged) or by `line`."""
    known = list(decisions)
    if what == "line":
        leaves = {line: totals for line, totals in _by_line(known)}
        rows = sorted(leaves.items(), key=lambda each: -each[1].all_bytes)
    else:
        rows = list(_tree(known))
    return _totals_table(what, rows, known, top)


def _by_line(decisions: Iterable[Decision]) -> Iterator[tuple[str, Totals]]:
    found: dict[str, Totals] = defaultdict(Totals)
    for decision in decisions:
        _, source = _place(decision)
        found[source or "(not known)"].add(decision)
    yield from found.items()


def _grouped(decisions: Iterable[Decision]) -> list[tuple[str, Decision]]:
    """Each decision with the name of its module."""
    made = [(_path(decision), decision) for decision in decisions]
    groups = ModuleGroups((path, _op(decision), decision.nbytes) for path, decision in made)
    return [(groups.name(path), decision) for path, decision in made]


def by_module(decisions: Iterable[Decision]) -> dict[str, Totals]:
    """The sums by module, equal layers merged, the largest first."""
    found: dict[str, Totals] = defaultdict(Totals)
    for name, decision in _grouped(decisions):
        found[name].add(decision)
    return dict(sorted(found.items(), key=lambda each: -each[1].all_bytes))


def _tree(decisions: Sequence[Decision]) -> Iterator[tuple[str, Totals]]:
    """Yields each module after the one around it, with all that is within it, the largest first."""
    totals: dict[tuple[str, ...], Totals] = defaultdict(Totals)
    inner: dict[tuple[str, ...], dict[tuple[str, ...], None]] = defaultdict(dict)
    for name, decision in _grouped(decisions):
        path = tuple(_parts(name))
        totals[()].add(decision)
        for depth in range(len(path)):
            inner[path[:depth]][path[: depth + 1]] = None
            totals[path[: depth + 1]].add(decision)

    def under(path: tuple[str, ...], depth: int) -> Iterator[tuple[str, Totals]]:
        for each in sorted(inner[path], key=lambda p: -totals[p].all_bytes):
            name = each[-1]
            while (
                len(inner[each]) == 1 and totals[only := next(iter(inner[each]))].count == totals[each].count
            ):
                each, name = only, f"{name}.{only[-1]}"
            yield "  " * depth + name, totals[each]
            yield from under(each, depth + 1)

    yield "(model)", totals[()]
    yield from under((), 1)


def _totals_table(
    what: str, rows: Sequence[tuple[str, Totals]], decisions: Sequence[Decision], top: int | None
) -> list[str]:
    least = _SMALL * sum(decision.nbytes for decision in decisions)
    large = [(name, totals) for name, totals in rows if totals.all_bytes >= least or totals.seconds]
    shown = large[:top]
    cells = [
        (
            printable(name),
            str(totals.count),
            *(format_bytes(totals.nbytes[action]) if totals.nbytes[action] else "" for action in ACTIONS),
            f"{totals.seconds * 1e3:.3g} ms" if totals.seconds else "",
        )
        for name, totals in shown
    ]
    lines = _table((what, "storages", "kept", "recomputed", "swapped", "not needed", "time again"), cells)
    if len(shown) < len(rows):
        more = len(rows) - len(shown)
        lines.append(f"{more} smaller row{'s' if more > 1 else ''}")
    return lines


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
