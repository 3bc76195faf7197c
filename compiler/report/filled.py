"""Fills the templates of pages with their data: pages need no network, and run nothing of what they show."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

__all__ = ["filled"]


def filled(template: str, data: dict[str, Any]) -> str:
    """Returns a page.

    The data are packed, and the page writes them as text, so that no name in them is read as HTML.

    Args:
        template: The name of the file beside this one.
        data: JSON-ready data for its script.
    """
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    parts = {
        "@HEAD@": _read("head.html"),
        "@STYLE@": _read("report.css"),
        "@SHARED@": _read("shared.js"),
        "@DATA@": base64.b64encode(packed).decode(),
    }
    text = _read(template)
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")
