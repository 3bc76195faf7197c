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
        seconds: Time of these runs.
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

    The numbered children of a module are equal if the same modules are in them, where a few may be missing;
    children without modules, if they make storages of the same operations and bytes. If all are equal their
    number is `*` (`h.*.attn`), or else a list of numbers (`features.10-12,15`).

    Args:
        made: The path of a module, an operation and bytes, for each storage.
    """

    def __init__(self, made: Iterable[tuple[str, str, int]]) -> None:
        self._root = _Module()
        for path, op, nbytes in made:
            module = self._root
            for name in filter(None, path.split(".")):
                module = module.inner.setdefault(name, _Module())
            module.made.append((op, nbytes))

    @staticmethod
    def of(decisions: Iterable[Decision]) -> ModuleGroups:
        """Returns the groups of the modules that make these storages."""
        return ModuleGroups((module_path(*_place(d), _op(d)), _op(d), d.nbytes) for d in decisions)

    def name(self, path: str) -> str:
        """Returns the name of a module, which is its path if nobody else is like it."""
        names: list[str] = []
        module: _Module | None = self._root
        for part in filter(None, path.split(".")):
            below = None if module is None else module.inner.get(part)
            label, module = (part, below) if module is None else module.labels.get(part, (part, below))
            names.append(label)
        return ".".join(names)


@dataclass
class _Module:
    """A module with what is in it, and what it makes itself."""

    inner: dict[str, _Module] = field(default_factory=lambda: {})
    made: list[tuple[str, int]] = field(default_factory=lambda: [])

    @cached_property
    def paths(self) -> frozenset[str]:
        """The paths of all modules in it."""
        below = (f"{name}.{path}" for name, each in self.inner.items() for path in each.paths)
        return frozenset((*self.inner, *below))

    @cached_property
    def labels(self) -> dict[str, tuple[str, _Module]]:
        """The label of each child with a number, and the child like it that has the most modules."""
        alike: list[list[str]] = []
        numbered = [name for name in self.inner if name.isdecimal()]
        for name in sorted(numbered, key=lambda name: -len(self.inner[name].paths)):
            first = next((g for g in alike if self.inner[g[0]].covers(self.inner[name])), None)
            if first is None:
                alike.append([name])
            else:
                first.append(name)
        return {
            name: ("*" if 1 < len(names) == len(numbered) else _ranges(names), self.inner[names[0]])
            for names in alike
            for name in names
        }

    def covers(self, other: _Module) -> bool:
        """Whether another module is a layer like this one."""
        if not other.paths:
            return not self.paths and sorted(self.made) == sorted(other.made)
        return other.paths <= self.paths and 2 * len(other.paths) >= len(self.paths)


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
    known = list(decisions)
    groups = ModuleGroups.of(known)
    return [(groups.name(module_path(*_place(d), _op(d))), d) for d in known]


def by_module(decisions: Iterable[Decision]) -> dict[str, Totals]:
    """The sums by module, equal layers merged, the largest first."""
    found: dict[str, Totals] = defaultdict(Totals)
    for name, decision in _grouped(decisions):
        found[name].add(decision)
    return dict(sorted(found.items(), key=lambda each: -each[1].all_bytes))


def _tree(decisions: Sequence[Decision]) -> Iterator[tuple[str, Totals]]:
    """Yields each module after the one around it, with all that is within it, the largest first."""
    totals: dict[tuple[str, ...], Totals] = defaultdict(Totals)
    for name, decision in _grouped(decisions):
        path = tuple(filter(None, name.split(".")))
        for depth in range(len(path) + 1):
            totals[path[:depth]].add(decision)

    def under(path: tuple[str, ...], depth: int) -> Iterator[tuple[str, Totals]]:
        inner = [p for p in totals if len(p) == len(path) + 1 and p[: len(path)] == path]
        for each in sorted(inner, key=lambda p: -totals[p].all_bytes):
            name = each[-1]
            while (only := _only_child(totals, each)) is not None:
                each, name = only, f"{name}.{only[-1]}"
            yield "  " * depth + name, totals[each]
            yield from under(each, depth + 1)

    yield "(model)", totals[()]
    yield from under((), 1)


def _only_child(totals: dict[tuple[str, ...], Totals], path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The module that holds all of another one's storages."""
    inner = [p for p in totals if len(p) == len(path) + 1 and p[: len(path)] == path]
    return inner[0] if len(inner) == 1 and totals[inner[0]].count == totals[path].count else None


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
