"""Files that are written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .errors import UsageError

__all__ = ["check_folder", "write_whole"]


def check_folder(path: Path) -> None:
    """Refuses a file that cannot be written later, because its folder is missing.

    Raises:
        UsageError: IRC435.
    """
    if not path.absolute().parent.is_dir():
        raise UsageError("IRC435", f"there is no folder {path.parent}", help="make it, or name another file")


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole or not at all.

    Raises:
        UsageError: IRC435 when it cannot be written.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staging.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(staging, path)
    except OSError as error:
        raise UsageError(
            "IRC435", f"{path} cannot be written: {error}", help="choose another file"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # if there is no such folder
            staging.unlink(missing_ok=True)
