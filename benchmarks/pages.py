"""Tables as Markdown, and pages that hold a generated part between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from irc.ir import UsageError

__all__ = ["replace_section", "to_markdown"]


def to_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns, as Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def replace_section(path: Path, name: str, section: str) -> str:
    """The text of a file with what stands between its markers `name` replaced by `section`.

    The markers are the lines `<!-- begin NAME -->` and `<!-- end NAME -->`. A file that does not exist
    holds nothing but them.

    Args:
        path: The file; it is not written.
        name: Of the markers.
        section: Goes between them.

    Raises:
        UsageError: IRC435 when the file exists without the markers, or cannot be read.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    help = f"put the lines {begin} and {end} where the section belongs, or name another file"
    try:
        text = path.read_text() if path.exists() else f"{begin}\n{end}\n"
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("IRC435", f"{path} cannot be read: {error}", help=help) from error
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise UsageError("IRC435", f"{path} has no section {name}", help=help)
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"
