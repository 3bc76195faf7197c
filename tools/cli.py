"""The command line: `irc optimize`, `pareto`, `compare`, `inspect`, `run`, `export`, `machine` and others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..ir import IrcError, UsageError, printable
from . import (
    compare,
    estimate,
    explain,
    export,
    inspect,
    machine,
    max_batch,
    optimize,
    pareto,
    report,
    run,
    schedule,
)
from .options import EXITS

__all__ = ["main"]

_COMMANDS = (
    optimize,
    estimate,
    max_batch,
    pareto,
    compare,
    inspect,
    explain,
    run,
    report,
    export,
    machine,
    schedule,
)


class _Parser(argparse.ArgumentParser):
    """Reports its errors in the form of all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError("IRC400", message, help=f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        options = _parser().parse_args(argv)
        return options.command(options)
    except IrcError as error:
        _report(error)
        return error.exit_status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt as interrupt:
        print("error[IRC001]: interrupted", file=sys.stderr)
        _report_notes(interrupt)
        return 1
    except Exception as error:
        if os.environ.get("IRC_TRACEBACK"):
            raise
        text = printable(" ".join(str(error).split()), 1000)
        print(
            f"error[IRC000]: internal error: {type(error).__name__}: {text}\n"
            "  help: this is a defect of irc; set IRC_TRACEBACK=1 to see where",
            file=sys.stderr,
        )
        return 1


def _report(error: IrcError) -> None:
    print(error, file=sys.stderr)
    _report_notes(error)


def _report_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        print(f"  note: {printable(note, 1000)}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = _Parser(prog="irc", description="A compiler for training memory.", epilog=EXITS)
    parser.add_argument("--version", action="version", version=f"irc {__version__}")
    commands = parser.add_subparsers(dest="subcommand", required=True, parser_class=_Parser)
    for command in _COMMANDS:
        command.add(commands)
    return parser
