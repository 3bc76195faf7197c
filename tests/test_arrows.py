"""Holds the arrows between the rooms: who may import whom, read from the source of every file.

Imports within functions and for type checkers count as well. A file that needs an import which is not
allowed here belongs in another room, or hands over what the other room needs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]

_SHARED = {"ir", "torch_support"}
MAY_IMPORT: dict[str, set[str]] = {
    "ir": set(),
    "torch_support": {"ir"},
    "passes": _SHARED,
    "frontends": _SHARED,
    "backends": _SHARED,
    "compiler": {*_SHARED, "passes", "frontends", "backends"},
    "tools": {*_SHARED, "passes", "frontends", "backends", "compiler"},
}
"""The rooms of the product, each with the other rooms that its files may import."""

STILL_IMPORTED: set[tuple[str, str]] = set()
"""Imports against the arrows, which are to go: nothing is ever added here."""

STILL_CIRCLES: set[tuple[str, ...]] = set()
"""Files that import one another, which are to be parted: nothing is ever added here."""

SOLVERS = {"passes/combinatorial.py", "passes/constraint_programming.py", "passes/milp.py"}
"""The files that import OR-Tools: the doors that others use."""


@dataclass(frozen=True)
class Import:
    """An import of one name or module.

    Args:
        line: The line of the statement.
        module: Dotted name of the module, `irc.` included for one of the package itself.
        name: The name taken from it; None when the module itself is imported.
    """

    line: int
    module: str
    name: str | None = None

    @property
    def top(self) -> str:
        """The package at the root of the module's name."""
        return self.module.partition(".")[0]

    @property
    def room(self) -> str | None:
        """The room of irc that it comes from; None for other packages, and for `irc` itself."""
        parts = (*self.module.split("."), self.name or "")
        return parts[1] if parts[0] == "irc" and parts[1] in MAY_IMPORT else None


@cache
def files_of(room: str) -> tuple[Path, ...]:
    """The files of Python of a folder at the root, relative to it."""
    return tuple(sorted(path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")))


def module_of(path: Path) -> str:
    """The dotted name of a file of the product."""
    return ".".join(("irc", *path.with_suffix("").parts)).removesuffix(".__init__")


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """All imports of a file, wherever they stand in it."""
    return tuple(_imports(path, ast.parse((ROOT / path).read_text())))


def _imports(path: Path, tree: ast.AST) -> Iterator[Import]:
    package = ("irc", *path.parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from (Import(node.lineno, module, alias.name) for alias in node.names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    against = {
        (str(path), each.room): f"{path}:{each.line} imports {each.room}"
        for path in files_of(room)
        for each in imports_of(path)
        if each.room not in (None, room, *MAY_IMPORT[room])
    }
    excused = {(path, other) for path, other in STILL_IMPORTED if path.startswith(f"{room}/")}
    assert [text for key, text in against.items() if key not in excused] == []
    assert excused <= against.keys(), "this import is gone: take it out of STILL_IMPORTED"


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_the_product_stands_without_tests_and_benchmarks(room: str) -> None:
    outside = {"benchmarks", "tests", "support", *MAY_IMPORT}
    found = [
        f"{path}:{each.line}" for path in files_of(room) for each in imports_of(path) if each.top in outside
    ]
    assert found == []


def test_the_intermediate_representation_is_free_of_torch() -> None:
    known = {*sys.stdlib_module_names, "irc"}
    found = [
        f"{path}:{each.line} imports {each.module}"
        for path in files_of("ir")
        for each in imports_of(path)
        if each.top not in known
    ]
    assert found == []


def test_files_of_the_product_do_not_import_one_another_in_a_circle() -> None:
    files = {module_of(path): path for room in MAY_IMPORT for path in files_of(room)}
    arrows: nx.DiGraph[str] = nx.DiGraph()
    for path in files.values():
        for each in imports_of(path):
            target = files.get(f"{each.module}.{each.name}") or files.get(each.module)
            if target is not None and target != path:
                arrows.add_edge(str(path), str(target))
    circles = {tuple(sorted(each)) for each in nx.strongly_connected_components(arrows) if len(each) > 1}
    assert circles - STILL_CIRCLES == set()
    assert circles >= STILL_CIRCLES, "these files are parted: take them out of STILL_CIRCLES"


def test_few_files_import_the_solvers() -> None:
    found = {
        str(path)
        for room in MAY_IMPORT
        for path in files_of(room)
        if any(each.top == "ortools" for each in imports_of(path))
    }
    assert found - SOLVERS == set()
    assert found >= SOLVERS, "this file does without OR-Tools: take it out of SOLVERS"


def test_only_the_registry_names_the_published_methods() -> None:
    """It does so by text: they are imported when one of them is asked for."""
    paths = [path for room in MAY_IMPORT for path in files_of(room)]
    importing = {
        str(path.parent)
        for path in paths
        if any(f"{each.module}.{each.name}".startswith("irc.passes.published") for each in imports_of(path))
    }
    assert importing == {"passes/published"}
    naming = {str(path) for path in paths if '"published.' in (ROOT / path).read_text()}
    assert naming == {"passes/strategy_registry.py"}
