"""The rows of each case of a benchmark, kept in a file, so that an interrupted run goes on."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from irc.compiler.journal import JsonLines
from irc.ir import UsageError

__all__ = ["Journal", "from_json"]

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Entry = TypeVar("_Entry", bound="DataclassInstance")


@dataclass(frozen=True)
class Journal(Generic[_Entry]):
    """The entries of each case; with a file, on disk at once.

    Args:
        lines: The file.
        found: By key, such as `gtx1080 resnet50-32`. Entries are what `from_json` can make.
    """

    lines: JsonLines
    found: dict[str, list[_Entry]]

    @staticmethod
    def open(
        path: Path | None, options: Mapping[str, Any], form: str, entry: type[_Entry]
    ) -> Journal[_Entry]:
        """The journal with what an earlier run left.

        Args:
            path: The file; None keeps everything in memory.
            options: What the entries depend on beside their keys; those of other options do not mix.
            form: The name of the file's format, with its version.
            entry: The dataclass of its entries.

        Raises:
            UsageError: IRC441 when the file is of other options; IRC442 when it cannot be written; IRC446
                when it is damaged.
        """
        lines = JsonLines(path, "name another file", "delete it, or name another file")
        found: dict[str, list[_Entry]] = {}

        def take(number: int, row: Any) -> None:
            if number > 1:
                found[row["key"]] = [from_json(entry, each) for each in row["entries"]]
            elif row["format"] != form:
                raise ValueError(f"its format is {row['format']!r}, not {form!r}")
            elif row["options"] != options:
                raise UsageError(
                    "IRC441",
                    f"{path} was written with the options {row['options']}, not {options}",
                    help="name another file, or give the same options",
                )

        if not lines.read(take):
            lines.append({"format": form, "options": dict(options)})
        return Journal(lines, found)

    def append(self, key: str, entries: Sequence[_Entry]) -> None:
        """Notes what was found for a key.

        Raises:
            UsageError: IRC442 when the file cannot be written.
        """
        self.found[key] = list(entries)
        self.lines.append({"key": key, "entries": [asdict(each) for each in entries]})


def from_json(kind: Any, data: Any) -> Any:
    """A dataclass, of dataclasses, enumerations, tuples and lists, from what `asdict` and JSON made of it.

    Raises:
        KeyError: There is no such field.
        TypeError: A field is missing, or the data has another shape.
        ValueError: An enumeration has no such member.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: from_json(hints[name], value) for name, value in data.items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType and data is not None:
        return from_json(next(each for each in inner if each is not type(None)), data)
    if data is not None and origin in (tuple, list, Sequence):
        found = [from_json(inner[place], each) for place, each in _placed(inner, data)]
        return found if origin is list else tuple(found)
    return kind(data) if isinstance(kind, type) and issubclass(kind, Enum) else data


def _placed(inner: Sequence[Any], data: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    """Each element with the place of its type: all have the first one in a list, or a tuple of any length."""
    is_open = len(inner) == 1 or inner[-1] is Ellipsis
    return ((0 if is_open else place, each) for place, each in enumerate(data))
