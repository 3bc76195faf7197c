"""The command line: `irc optimize`, `pareto`, `compare`, `inspect`, `run`, `export`, `machine` and others."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ..ir import IrcError, UsageError, printable
from . import (
    compare,
    completion,
    doctor,
    estimate,
    explain,
    export,
    inspect,
    machine,
    max_batch,
    opt,
    optimize,
    pareto,
    passes,
    report,
    run,
    schedule,
)
from .config import apply_config
from .options import EXITS

__all__ = ["main", "parser"]

_COMMANDS = (
    optimize,
    estimate,
    max_batch,
    pareto,
    compare,
    inspect,
    explain,
    report,
    run,
    export,
    machine,
    schedule,
    opt,
    passes,
    doctor,
    completion,
)


class _Parser(argparse.ArgumentParser):
    """Reports its errors in the form of all others, with the word that was perhaps meant."""

    commands: Mapping[str, argparse.ArgumentParser]
    """The parsers of the commands, by name; only the outermost parser has some."""

    def error(self, message: str) -> NoReturn:
        help = f"see {self.prog} --help"
        meant = self._meant(message)
        raise UsageError("IRC400", message, help=f"did you mean {meant}? {help}" if meant else help)

    def _meant(self, message: str) -> str | None:
        """The choice or the option that is most like a wrong one."""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = [word.strip("' ") for word in choice[2].split(",")]
            return next(iter(difflib.get_close_matches(choice[1], known, 1)), None)
        if wrong := re.search(r"unrecognized arguments: .*?(--?[a-z][^ =]*)", message):
            parsers = [self, *getattr(self, "commands", {}).values()]
            options = {option for parser in parsers for option in parser._option_string_actions}
            return next(iter(difflib.get_close_matches(wrong[1], sorted(options), 1)), None)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        known = parser()
        if not (sys.argv[1:] if argv is None else argv):
            known.print_help()
            return 0
        options = known.parse_args(argv)
        defaults = apply_config(known.commands, Path.cwd(), options)
        if defaults is not None:
            options = known.parse_args(argv)
            if not getattr(options, "quiet", False):
                print(f"defaults: {printable(str(defaults), 1000)}", file=sys.stderr)
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


def parser() -> _Parser:
    """Returns the parser of the command line."""
    from .. import __version__

    found = _Parser(prog="irc", description="A compiler for training memory.", epilog=EXITS)
    found.add_argument("--version", action="version", version=f"irc {__version__}")
    commands = found.add_subparsers(dest="subcommand", required=True, parser_class=_Parser)
    for command in _COMMANDS:
        command.add(commands)
    found.commands = commands.choices
    found.set_defaults(whole=found)
    return found
