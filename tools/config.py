"""Defaults of the command line that a project keeps in its pyproject.toml."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..ir import UsageError, printable

__all__ = ["apply_config"]

KEYS = (
    "budget",
    "compiler",
    "costs",
    "exact",
    "gap",
    "optimizer",
    "strategy",
    "swap",
    "time-limit",
)
"""The options that may have a default: none that names a file to write, or code to run."""


def apply_config(
    parsers: Mapping[str, argparse.ArgumentParser], folder: Path, given: argparse.Namespace
) -> Path | None:
    """Gives options of commands the defaults of `[tool.irc]`, and of `[tool.irc.COMMAND]`.

    The nearest pyproject.toml counts, of the folder or one above it. A pipeline of passes says all in its own
    way, and devices their budgets: beside `--passes` there are no defaults, beside `--device` no budget.

    Args:
        parsers: The parsers of the commands, by their names.
        folder: Where to begin.
        given: What the command line says.

    Returns:
        The file with the defaults: the command line is to be read again then. None if there are none.

    Raises:
        UsageError: IRC596 for a file that cannot be read, another option or a value that the option does not
            take.
    """
    file = next((f for each in (folder, *folder.parents) if (f := each / "pyproject.toml").is_file()), None)
    if file is None:
        return None
    table = _table(file)
    own = {name: values for name, values in table.items() if isinstance(values, dict)}
    unknown = [name for name in own if name not in parsers]
    if unknown:
        raise _refused(
            file, f"[tool.irc.{printable(unknown[0])}] is of no command", f"commands: {', '.join(parsers)}"
        )
    shared = {name: value for name, value in table.items() if name not in own}
    excluded = {*_excluded(given)}
    for name, values in (("", shared), *own.items()):
        for key in values:
            if key not in KEYS:
                where = f"[tool.irc{'.' * bool(name)}{name}]"
                raise _refused(file, f"{where} has {printable(key)}", f"it may have {', '.join(KEYS)}")
    for command, parser in parsers.items():
        values = {**shared, **own.get(command, {})}
        for action in _actions(parser):
            key = action.option_strings[0].removeprefix("--")
            if key in values and key not in excluded:
                parser.set_defaults(**{action.dest: _value(file, key, values[key], action)})
        missing = own.get(command, {}).keys() - {
            a.option_strings[0].removeprefix("--") for a in _actions(parser)
        }
        if missing:
            raise _refused(file, f"irc {command} has no option --{min(missing)}", f"see irc {command} --help")
    return file if table else None


def _excluded(given: argparse.Namespace) -> Iterator[str]:
    """Yields the options that others on the command line exclude."""
    if getattr(given, "passes", None):
        yield from KEYS
    if getattr(given, "device", None):
        yield "budget"


def _table(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("irc", {})
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        why = "lists or tables lie too deep in one another" if is_deep else error
        raise _refused(
            file, f"it cannot be read: {why}", "mend it, or call irc from another folder"
        ) from error
    if not isinstance(table, dict):
        raise _refused(file, "tool.irc is not a table", 'write [tool.irc], and below it budget = "4GiB"')
    return table


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.option_strings)  # pyright: ignore[reportPrivateUsage]


def _value(file: Path, key: str, value: Any, action: argparse.Action) -> Any:
    """The value as the command line would have it."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str | int | float) and not isinstance(text, bool) for text in texts):
        raise _refused(
            file, f"{key} is {printable(repr(value))}", f'write {key} = "...", as on the command line'
        )
    if isinstance(value, list) and not isinstance(action.default, list):
        raise _refused(file, f"{key} is a list", f'write {key} = "..."')
    if action.choices is not None and value not in action.choices:
        raise _refused(
            file, f"{key} is {printable(repr(value))}", f"choose from {', '.join(map(str, action.choices))}"
        )
    return [str(text) for text in texts] if isinstance(action.default, list) else str(value)


def _refused(file: Path, what: str, help: str) -> UsageError:
    return UsageError("IRC596", f"{file}: {what}", help=help)
