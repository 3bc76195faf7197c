"""Text of others, made safe to show: on a terminal, in a comment, in a message."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, most: int = 200) -> str:
    r"""Returns a text on one line, without control characters, and cut.

    Line breaks of any kind, NUL, terminal escapes, characters that change the direction of others, and
    surrogates become escapes such as `\n` and `\u2028`.

    Args:
        text: What a file, a model or a user gave.
        most: The most characters of it that are shown; how many there were follows.
    """
    shown = "".join(map(_shown, text[:most]))
    return shown if len(text) <= most else f"{shown}... ({len(text)} characters)"


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
