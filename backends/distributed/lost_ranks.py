"""Names ranks that are gone, wherever the others find out."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from ...ir import IrcError, first_line

__all__ = ["reaching"]


@contextlib.contextmanager
def reaching(rank: int | None = None, when: str = "within a step") -> Generator[None]:
    """Says that a rank is gone if exchanging something with it fails.

    Args:
        rank: Its number in the world; None if something is exchanged with several.
        when: The moment, for the message.

    Raises:
        IrcError: IRC493.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, IrcError):
            raise
        raise IrcError(
            "IRC493",
            f"{'another rank' if rank is None else f'rank {rank}'} cannot be reached {when}:"
            f" {first_line(error)}",
            help="see what that rank has printed, and start all ranks again",
        ) from error
