"""The command line that the benchmarks share: options, rows, pages and exit statuses."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from irc import __version__
from irc.ir import IrcError, UsageError
from irc.ir.files import check_parent, write_whole

from .harness import threads
from .journal import Journal
from .pages import replace_section

__all__ = [
    "chosen",
    "parser_of",
    "run_command",
    "run_row_alone",
    "run_rows",
    "run_tasks",
    "write_json",
    "write_page",
]

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_OPTIONS: dict[str, dict[str, Any]] = {
    "models": {"metavar": "A,B", "help": "names, or package.module:factory"},
    "budgets": {"metavar": "A,B", "help": "of each model"},
    "scratch": {"metavar": "DIR", "help": "folder of the scratch file"},
    "only": {"metavar": "TEXT", "help": "some rows instead of all"},
    "time_limit": {"type": float, "metavar": "SECONDS", "help": "for each search"},
    "repeats": {"type": int, "metavar": "N", "help": "timed steps of each module"},
    "threads": {"type": int, "metavar": "N", "help": "that compute"},
    "seed": {"type": int, "help": "of drawn weights and of the generator"},
    "costs": {"metavar": "SOURCE", "help": "of operations, as irc optimize takes it"},
    "journal": {"type": Path, "metavar": "FILE", "help": "keep rows there; a new run goes on"},
    "json": {"type": Path, "metavar": "FILE", "help": "write all results there"},
    "markdown": {"type": Path, "metavar": "FILE", "help": "write the tables there"},
    "row": {"nargs": 3, "help": argparse.SUPPRESS},
}
_FILES = ("json", "markdown", "plot", "refusals")
_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""Settings of glibc by which freed memory leaves the process at once."""


class Row(Protocol):
    """One row of a table."""

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken."""
        ...

    def cells(self) -> Sequence[str]:
        """The row for a table."""
        ...


_Row = TypeVar("_Row", bound=Row)
_Entry = TypeVar("_Entry", bound="DataclassInstance")


def parser_of(name: str, description: str, **shared: Any) -> argparse.ArgumentParser:
    """The parser of a benchmark, with those of the shared options that it takes.

    Args:
        name: The module below `benchmarks`.
        description: One line.
        shared: The names of shared options, each with its default.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    for option, default in shared.items():
        settings = dict(_OPTIONS[option])
        if default is not None and not isinstance(default, bool):
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            settings["help"] += f" ({shown})".replace("%", "%%")
        parser.add_argument(f"--{option.replace('_', '-')}", default=default, **settings)
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Runs a benchmark, and returns its exit status; what is wrong with its use is one message.

    Args:
        parser: Of its arguments. The namespace also gets `given`, the arguments, and `command`, the line that
            a page shows.
        run: Does the work, and returns the exit status.
        argv: The arguments; those of the process if None.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(given)
    options.given, options.command = given, shlex.join([*parser.prog.split(), *given])
    try:
        for path in (getattr(options, name, None) for name in _FILES):
            if path is not None:
                check_parent(path)
        if not hasattr(options, "threads"):
            return run(options)
        with threads(options.threads):
            return run(options)
    except IrcError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def run_rows(rows: Iterable[_Row], page: Callable[[Sequence[_Row]], str]) -> tuple[list[_Row], str, int]:
    """Measures rows, tells each as it is there, and prints the page.

    Args:
        rows: Measures one row after the other.
        page: Makes the text of all rows.

    Returns:
        The rows, the text, and the exit status: 1 if a row has failed.
    """
    found: list[_Row] = []
    for row in rows:
        found.append(row)
        print("  ".join(row.cells()), file=sys.stderr, flush=True)
    text = page(found)
    print(text, flush=True)
    return found, text, int(any(row.has_failed for row in found))


def run_tasks(
    options: argparse.Namespace,
    form: str,
    about: Mapping[str, Any],
    entry: type[_Entry],
    tasks: Callable[[Mapping[str, list[_Entry]]], Iterable[tuple[str, Callable[[], Sequence[_Entry]]]]],
    page: Callable[[Mapping[str, list[_Entry]]], str],
    section: str | None = None,
) -> Mapping[str, list[_Entry]]:
    """Does what the journal of an earlier run does not hold, and writes the page after each task.

    Args:
        options: With `journal` and `markdown`.
        form: Of the journal, with its version.
        about: What the entries depend on beside their keys and the version of irc.
        entry: The dataclass of the journal's entries.
        tasks: Yields tasks, each with its key; it is given what was found so far.
        page: Makes the text of the page of what was found so far.
        section: Of the page; all of it if None.

    Returns:
        What was found, by key.
    """
    if options.markdown is not None and section is not None:
        replace_section(options.markdown, section, "")  # a page without it must not show after hours
    journal = Journal.open(options.journal, {"irc": __version__, **about}, form, entry)
    for key, task in tasks(journal.found):
        if key not in journal.found:
            journal.append(key, task())
            print(f"{time.strftime('%H:%M:%S')} {key}", *journal.found[key], sep="\n    ", flush=True)
            write_page(options.markdown, page(journal.found), section)
    write_page(options.markdown, page(journal.found), section)
    return journal.found


def run_row_alone(options: argparse.Namespace, name: str, row: Sequence[str]) -> dict[str, Any]:
    """The fields of one row that a benchmark measures in a process of its own.

    The process gives freed memory back to the system at once.

    Args:
        options: Of the command; the process gets the same, and `--row`.
        name: The module below `benchmarks`.
        row: Which row: model, budget and kind of plan.

    Raises:
        UsageError: IRC452 when the process fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--row", *row, *options.given],
        env={**os.environ, **_AT_ONCE},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError(
            "IRC452",
            f"measuring {row[0]} at {row[1]} ended with status {done.returncode}",
            help="see above",
        )
    return json.loads(done.stdout.splitlines()[-1])


def chosen(text: str | None, known: Iterable[str], what: str, code: str = "IRC400") -> list[str]:
    """The names in a list with commas; all that are known if there is no list.

    Raises:
        UsageError: A name is not known.
    """
    names = list(known)
    asked = names if text is None else [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in names:
            raise UsageError(code, f"there is no {what} {name!r}", help=f"choose some of {', '.join(names)}")
    return asked


def write_json(path: Path | None, data: Any) -> None:
    """Writes data, in which dataclasses are their fields, as a whole; nothing without a path."""
    if path is not None:
        write_whole(path, json.dumps(data, indent=1, default=_fields) + "\n")


def _fields(row: DataclassInstance) -> dict[str, Any]:
    return asdict(row)


def write_page(path: Path | None, text: str, section: str | None = None) -> None:
    """Writes a page as a whole, or a section of it between its markers; nothing without a path.

    Raises:
        UsageError: The page cannot be written, or has no such section.
    """
    if path is not None:
        write_whole(path, text + "\n" if section is None else replace_section(path, section, text))
