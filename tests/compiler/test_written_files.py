"""Tables are Markdown, and a generated section replaces only itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irc.compiler.written_files import check_folder, replace_section, to_markdown, write_whole
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


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.txt", "text")
    write_whole(tmp_path / "a.txt", b"bytes")
    assert (tmp_path / "a.txt").read_bytes() == b"bytes"
    with pytest.raises(UsageError, match="cannot be written") as refused:
        write_whole(tmp_path / "no" / "folder.txt", "text")
    assert refused.value.code == "IRC435"
    with pytest.raises(UsageError, match="cannot be written") as refused:
        write_whole(tmp_path / "a.txt" / "below-a-file.txt", "text")
    assert refused.value.code == "IRC435"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_missing_folder_is_told_beforehand(tmp_path: Path) -> None:
    check_folder(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="no folder") as refused:
        check_folder(tmp_path / "no" / "a.txt")
    assert refused.value.code == "IRC435"
