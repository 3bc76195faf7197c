"""What was found so far, one line each in a file, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from irc.ir import UsageError

__all__ = ["Journal"]

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Entry = TypeVar("_Entry", bound="DataclassInstance")


@dataclass
class Journal(Generic[_Entry]):
    """The entries of each case; with a file, on disk at once.

    Args:
        path: The file; None keeps everything in memory.
        options: What the entries depend on beside their keys; those of other options do not mix.
        form: The name of the file's format, with its version.
        found: By key, such as `gtx1080 resnet50-32`. Entries are dataclasses of what JSON can hold.
    """

    path: Path | None
    options: Mapping[str, Any]
    form: str
    found: dict[str, list[_Entry]]

    @staticmethod
    def open(
        path: Path | None, options: Mapping[str, Any], form: str, entry: type[_Entry]
    ) -> Journal[_Entry]:
        """The journal with what an earlier run left; a last line that was cut off is dropped.

        Args:
            path: The file; None keeps everything in memory.
            options: What the entries depend on beside their keys.
            form: The name of the file's format.
            entry: The dataclass of its entries.

        Raises:
            UsageError: IRC441 when the file is of other options; IRC442 when it cannot be written; IRC446
                when it is damaged.
        """
        journal = Journal[_Entry](path, dict(options), form, {})
        if path is None:
            return journal
        try:
            written = path.read_bytes() if path.exists() else b""
            whole = written[: written.rfind(b"\n") + 1]
            if path.exists() and len(whole) < len(written):
                os.truncate(path, len(whole))
        except OSError as error:
            raise _unwritable(path, error) from error
        if not whole:
            journal._write({"format": form, "options": journal.options})
            return journal
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                if number == 1:
                    journal._check(row)
                else:
                    journal.found[row["key"]] = [entry(**each) for each in row["entries"]]
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise UsageError(
                    "IRC446",
                    f"{path} is damaged in line {number}: {type(error).__name__}: {error}",
                    help="delete it, or name another file",
                ) from error
        return journal

    def _check(self, row: Mapping[str, Any]) -> None:
        if row["format"] != self.form:
            raise ValueError(f"its format is {row['format']!r}, not {self.form!r}")
        if row["options"] != self.options:
            raise UsageError(
                "IRC441",
                f"{self.path} was written with the options {row['options']}, not {self.options}",
                help="name another file, or give the same options",
            )

    def append(self, key: str, entries: Sequence[_Entry]) -> None:
        """Notes what was found for a key.

        Raises:
            UsageError: IRC442 when the file cannot be written.
        """
        self.found[key] = list(entries)
        self._write({"key": key, "entries": [asdict(each) for each in entries]})

    def _write(self, row: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError("IRC442", f"{path} cannot be written: {error}", help="name another file")
