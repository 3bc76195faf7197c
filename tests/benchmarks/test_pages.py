"""Tables are Markdown, and a generated section replaces only itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pages import replace_section, to_markdown
from irc.ir import UsageError

PROSE = st.text(st.characters(codec="ascii", exclude_characters="\r<")).filter(lambda t: "begin" not in t)


def test_tables_are_markdown() -> None:
    assert to_markdown(("a", "b"), [("1", "x|y")]) == "| a | b    |\n|---|------|\n| 1 | x\\|y |"


@given(PROSE, PROSE, PROSE, PROSE)
def test_a_section_is_replaced_and_the_rest_stays(before: str, after: str, first: str, second: str) -> None:
    start = f"{before}<!-- begin table -->\n<!-- end table -->{after}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.md"

        def replaced(text: str, section: str) -> str:
            path.write_bytes(text.encode())
            return replace_section(path, "table", section)

        once = replaced(start, first)
        assert once.startswith(before) and once.endswith(after) and first in once
        assert replaced(once, second) == replaced(start, second)


def test_a_new_file_holds_the_section_alone(tmp_path: Path) -> None:
    text = replace_section(tmp_path / "new.md", "table", "| a |")
    assert text == "<!-- begin table -->\n\n| a |\n\n<!-- end table -->\n"


def test_a_file_without_markers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prose.md"
    path.write_text("nothing here\n")
    with pytest.raises(UsageError, match="no section table") as refused:
        replace_section(path, "table", "")
    assert refused.value.code == "IRC435" and "<!-- begin table -->" in (refused.value.help or "")
    with pytest.raises(UsageError, match="cannot be read"):
        replace_section(tmp_path, "table", "")
