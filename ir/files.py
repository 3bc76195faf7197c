"""Files that are written as a whole or not at all, and numbers of files that others wrote."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any, NoReturn

from .errors import UsageError
from .printable import printable

__all__ = ["check_fields", "check_parent", "read_json", "require_files", "write_whole"]


def check_parent(path: Path) -> None:
    """Refuses a file that cannot be written later, because its folder is missing.

    Raises:
        UsageError: IRC435.
    """
    if not path.absolute().parent.is_dir():
        raise UsageError("IRC435", f"there is no folder {path.parent}", help="make it, or name another file")


def require_files(folder: Path, *names: str) -> None:
    """Refuses a folder without these files, which `irc optimize -o` writes.

    Raises:
        UsageError: IRC431.
    """
    missing = next((name for name in names if not os.path.isfile(folder / name)), None)
    if missing is not None:
        what = "is not a folder" if not os.path.isdir(folder) else f"has no {missing}"
        raise UsageError(
            "IRC431", f"{folder} {what}", help="give a folder written by irc optimize MODEL -o DIR"
        )


def read_json(text: str | bytes) -> Any:
    """Returns JSON data whose numbers are finite and, if whole, have at most 63 bits.

    Raises:
        ValueError: It is not JSON, has another number, or lies too deep.
    """
    try:
        return json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("lists or objects lie too deep in one another") from error


def _whole(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 1 << 63:
        raise ValueError(f"{printable(text, 40)} is too large for a number of bytes or seconds")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{printable(text, 40)} is not a finite number")
    return number


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def write_whole(path: Path, content: str | bytes, code: str = "IRC435") -> None:
    """Writes a file as a whole or not at all.

    Args:
        path: Its place.
        content: What it holds.
        code: The code of the refusal.

    Raises:
        UsageError: With that code when it cannot be written.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staging.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(staging, path)
    except OSError as error:
        raise UsageError(code, f"{path} cannot be written: {error}", help="choose another file") from error
    finally:
        with contextlib.suppress(OSError):  # if there is no such folder
            staging.unlink(missing_ok=True)


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str": (str,),
    "bool": (bool,),
}
"""The values of a field by its annotation; of any other it is a tuple."""


def check_fields(
    record: object,
    columns: Iterable[Field[Any]],
    *,
    words: Mapping[str, Collection[str]] | None = None,
    signed: Collection[str] = (),
) -> None:
    """Refuses a record of a file that others wrote if a field holds what its annotation does not say.

    Args:
        record: A dataclass.
        columns: The fields to look at.
        words: The words that some fields may hold, by field.
        signed: The fields whose numbers compare, and may be as low as -1; others begin at 0.

    Raises:
        TypeError: A value has another type.
        ValueError: A number is out of its range, or a text is none of its field's words.
    """
    for each in columns:
        value, types = getattr(record, each.name), _TYPES.get(str(each.type), (tuple,))
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"{each.name} is {printable(repr(value), 100)}")
        if words and value not in words.get(each.name, (value,)):
            raise ValueError(f"{each.name} is {value!r}; it is one of {', '.join(words[each.name])}")
        least = -1 if each.name in signed else 0
        if isinstance(value, int | float) and not least <= value < 1 << 63:
            raise ValueError(f"{each.name} is {value!r}; it is a number from {least} on, below 2**63")
