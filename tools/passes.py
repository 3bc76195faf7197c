"""`irc passes`: the passes, strategies, machines and ONNX lowerings that are installed."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator

from ..ir import GROUPS, plugins, printable
from .options import Commands, add_verbosity

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc passes` to the command line."""
    passes = commands.add_parser(
        "passes", help="list passes with their options, and what other distributions add by entry points"
    )
    add_verbosity(passes)
    passes.set_defaults(command=_passes)


def _passes(options: argparse.Namespace) -> int:
    from ..passes import pass_kinds

    theirs = plugins("irc.passes")
    rows = [
        (name, _text_of(kind), inspect.getdoc(kind) or "", _owner(name) if name in theirs else "irc")
        for name, kind in pass_kinds().items()
    ]
    others = list(_others())
    if options.json:
        keys = ("name", "text", "doc", "from")
        data = {
            "format": "irc-passes-1",
            "passes": [dict(zip(keys, row, strict=True)) for row in rows],
            "others": [{"group": group, "name": name, "from": owner} for group, name, owner in others],
        }
        print(json.dumps(data, indent=1))
    elif not options.quiet:
        for _, text, doc, owner in rows:
            first, _, _ = doc.partition("\n")
            print(f"{text}{f'   (of {owner})' if owner != 'irc' else ''}\n    {printable(first)}")
        for group, name, owner in others:
            print(f"{group}: {printable(name)}   (of {owner})")
    return 0


def _text_of(kind: type) -> str:
    """A pass with its options at their usual values."""
    from ..passes import print_pass

    return print_pass(kind())


def _others() -> Iterator[tuple[str, str, str]]:
    for group in GROUPS:
        if group != "irc.passes":
            yield from ((group, name, _owner(name, group)) for name in plugins(group))


def _owner(name: str, group: str = "irc.passes") -> str:
    dist = plugins(group)[name].dist
    return "a distribution" if dist is None else printable(f"{dist.name} {dist.version}")
