"""How the commands of `python -m irc.tools` begin and end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from irc.ir import IrcError

__all__ = ["exit_status"]


def exit_status(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Runs a command; what is wrong with its use is one message, and the exit status of that error.

    Args:
        parser: Of its arguments.
        run: Does its work, and gives the exit status.
        argv: The arguments; those of the process if None.
    """
    try:
        return run(parser.parse_args(argv))
    except IrcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
