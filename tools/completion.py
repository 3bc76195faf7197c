"""`irc completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import argparse

from .options import Commands

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds `irc completion` to the command line."""
    completion = commands.add_parser(
        "completion",
        help="print the completions of a shell",
        epilog='bash: eval "$(irc completion bash)" in ~/.bashrc; zsh: irc completion zsh > FOLDER/_irc, a '
        "folder of $fpath",
    )
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(command=_completion)


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(options.whole, options.shell))
    return 0
