"""Files are written as a whole, and a folder that is not there is told beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from irc.ir import UsageError
from irc.ir.files import check_parent, write_whole


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
    check_parent(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="no folder") as refused:
        check_parent(tmp_path / "no" / "a.txt")
    assert refused.value.code == "IRC435"
