"""Findings as they are made, one line of JSON each in a file, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ir import UsageError

__all__ = ["JsonLines"]


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A file with one line for each finding, on disk at once.

    Args:
        path: The file; with None nothing is kept.
        elsewhere: What to do if the file cannot be written.
        anew: What to do if it is damaged.
    """

    path: Path | None
    elsewhere: str
    anew: str

    def read(self, take: Callable[[int, Any], None]) -> bool:
        """Hands on what an earlier run left, and drops a last line that was cut off, from the file too.

        Args:
            take: Is called with the number of each line, from 1 on, and its data; the errors that it raises
                about them say that the file is damaged.

        Returns:
            Whether there is a line.

        Raises:
            UsageError: IRC442 when the file cannot be read or written; IRC446 when it is damaged.
        """
        if self.path is None:
            return False
        try:
            written = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise self._unwritable(error) from error
        whole = written[: written.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                take(number, json.loads(line))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise UsageError(
                    "IRC446",
                    f"{self.path} is damaged in line {number}: {type(error).__name__}: {error}",
                    help=self.anew,
                ) from error
        if len(whole) < len(written):
            try:
                os.truncate(self.path, len(whole))
            except OSError as error:
                raise self._unwritable(error) from error
        return bool(whole)

    def append(self, row: Any, *, is_first: bool = False) -> None:
        """Adds a line.

        Args:
            row: What JSON can hold.
            is_first: Whether the file begins anew, in a folder that is made if need be.

        Raises:
            UsageError: IRC442 when the file cannot be written.
        """
        if self.path is None:
            return
        try:
            if is_first:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "wb" if is_first else "ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError("IRC442", f"{self.path} cannot be written: {error}", help=self.elsewhere)
