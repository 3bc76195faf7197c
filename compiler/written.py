"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..ir import UsageError

__all__ = ["made_folder", "write_whole"]


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Writes a file beside its place, and puts it there once it is complete.

    Args:
        target: Its place.
        write: Writes it, given another path in the same folder.

    Raises:
        UsageError: IRC442 when it cannot be written.
    """
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(staging)
        os.replace(staging, target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        staging.unlink(missing_ok=True)


def made_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes a folder if need be.

    Raises:
        UsageError: IRC442 when it cannot be made.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(target, error) from error
    return target


def _unwritable(target: Path, error: OSError) -> UsageError:
    return UsageError("IRC442", f"{target} cannot be written: {error}", help="choose another folder")
