"""Passes, strategies, machines and ONNX lowerings of other distributions, found by their entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import UsageError
from .printable import printable

__all__ = ["GROUPS", "load_plugin", "plugins"]

GROUPS = {
    "irc.passes": "a pass: a frozen dataclass with a name and run(program)",
    "irc.strategies": "a strategy: a Strategy whose name is that of the entry point",
    "irc.machines": "a machine: a Machine",
    "irc.tiers": "a tier to swap to: a TierConfig whose kind is that of the entry point",
    "irc.onnx_lowerings": "a module whose functions enter themselves by @lowering",
}
"""The groups of entry points, each with what such an entry point names."""


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Returns the entry points of a group by their names; nothing of them is imported.

    Args:
        group: One of `GROUPS`.

    Raises:
        UsageError: IRC597 if two distributions have one of the same name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise UsageError(
                "IRC597",
                f"{_owner(other)} and {_owner(entry)} both have {entry.name!r} in {group}",
                help="uninstall one of them",
            )
    return found


@cache
def load_plugin(group: str, name: str, kind: type[Any] = object) -> Any:
    """Imports what an entry point names; None if no distribution has one of that name.

    Args:
        group: One of `GROUPS`.
        name: The name of the entry point.
        kind: The class that it has to be of.

    Raises:
        UsageError: IRC597 if it cannot be imported, if it is of another class, or as `plugins`.
    """
    entry = plugins(group).get(name)
    if entry is None:
        return None
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:
        raise UsageError(
            "IRC597",
            f"{name!r} of {_owner(entry)} ({printable(entry.value)}) cannot be imported: "
            f"{type(error).__name__}: {printable(str(error), 300)}",
            help=f"mend or uninstall {_owner(entry)}",
        ) from error
    if not isinstance(found, kind):
        raise UsageError(
            "IRC597",
            f"{name!r} of {_owner(entry)} ({printable(entry.value)}) is not a {kind.__name__}",
            help=f"mend or uninstall {_owner(entry)}; {group} names {GROUPS[group]}",
        )
    return found


def _owner(entry: EntryPoint) -> str:
    return printable(entry.dist.name) if entry.dist is not None else "a distribution"
