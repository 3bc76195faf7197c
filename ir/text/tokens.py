"""Tokens of the text form."""

from __future__ import annotations

import re

__all__ = ["LOCATION_FIELDS", "NAME", "OPTIONAL", "TOKEN", "VERSION", "WORD"]

VERSION = 1
"""The version of the text form, which the first line of a file says: `irc 1`."""

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(?::\d+)?", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*", re.ASCII)
_STRING = r'"(?:[^"\\]|\\.)*"'
TOKEN = re.compile(
    rf"[%@](?:{NAME.pattern}|{_STRING})"
    rf"|{_STRING}"
    r"|-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|-inf\b"
    rf"|{WORD.pattern}"
    r'|"[^\n]*'  # a string without an end takes the rest of its line, once
    r"|->|#.*|\S",
    re.ASCII,
)
OPTIONAL = {"loss_held_bytes": 0, "loss_saved_bytes": 0, "reserved_bytes": 0, "forwards_in_flight": 1}
"""The fields that a graph's first line states unless they have these values."""
LOCATION_FIELDS = (("module", "module"), ("onnx", "onnx_node"), ("source", "source"))
