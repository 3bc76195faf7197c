"""What a user writes for tiers is read, or refused with what to write instead."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from irc.ir import TierRequest, UsageError, parse_tiers

TEMPORARY = str(Path(tempfile.gettempdir()).absolute())


@pytest.mark.parametrize(
    ("swap", "requests"),
    [
        ("host", [TierRequest("host")]),
        ("host:64GiB", [TierRequest("host", "", 64 << 30)]),
        (" host:1.5 GB ", [TierRequest("host", "", 1_500_000_000)]),
        ("disk", [TierRequest("disk", TEMPORARY)]),
        ("disk:200GiB", [TierRequest("disk", TEMPORARY, 200 << 30)]),
        ("disk:{}", [TierRequest("disk", "{}")]),
        ("disk:{}:200GiB", [TierRequest("disk", "{}", 200 << 30)]),
        (["host:4096", "disk:{}"], [TierRequest("host", "", 4096), TierRequest("disk", "{}")]),
        (("disk",), [TierRequest("disk", TEMPORARY)]),
        ("disk:./8GiB:1MB", [TierRequest("disk", "{}/8GiB", 1_000_000)]),
        ("disk:a:b", [TierRequest("disk", "{}/a:b")]),
        ("disk:a:b:1kB", [TierRequest("disk", "{}/a:b", 1000)]),
        ("disk:~/mine:1B", [TierRequest("disk", "{}/mine", 1)]),
    ],
)
def test_tiers_are_read(
    swap: str | Sequence[str],
    requests: list[TierRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("8GiB", "a:b", "mine"):
        (tmp_path / name).mkdir()
    texts = swap.format(tmp_path) if isinstance(swap, str) else [text.format(tmp_path) for text in swap]
    expected = [TierRequest(r.name, r.folder.format(tmp_path), r.capacity_bytes) for r in requests]
    found = parse_tiers(texts)
    assert [(r.name, r.capacity_bytes) for r in found] == [(r.name, r.capacity_bytes) for r in expected]
    assert [os.path.normpath(r.folder) for r in found] == [os.path.normpath(r.folder) for r in expected]


@pytest.mark.parametrize(
    ("swap", "code", "said"),
    [
        (None, "IRC423", "swap=None names no tier"),
        ([], "IRC423", "names no tier"),
        (64 << 30, "IRC423", "names no tier"),
        (["host", 3], "IRC423", "names no tier"),
        ("tape:64GiB", "IRC424", "there is no tier 'tape'"),
        ("", "IRC424", "there is no tier ''"),
        ("64GiB", "IRC424", "there is no tier '64GiB'"),
        ("host:", "IRC425", "nothing follows the colon"),
        ("host:64Gib", "IRC425", "a small b is for bits"),
        ("host:much", "IRC425", "'much' is not an amount"),
        ("host:1GiB:2GiB", "IRC425", "'1GiB' is not an amount"),
        ("host:0", "IRC425", "must be positive"),
        ("host:-1GiB", "IRC425", "'-1GiB' is not an amount"),
        ("disk:50%", "IRC425", "'50%' says no bytes"),
        ("disk:200Gib", "IRC425", "there is no unit 'Gib'"),
        ("disk:.:200Gib", "IRC425", "there is no unit 'Gib'"),
        ("disk:.:", "IRC425", "is not an amount"),
        (["host", "host:1GiB"], "IRC426", "the tier 'host' 2 times"),
        (["disk", "disk:."], "IRC426", "the tier 'disk' 2 times"),
        ("disk:missing:1GiB", "IRC427", "there is no folder missing"),
        ("disk:file", "IRC427", "file is not a folder"),
        ("host:/scratch", "IRC429", "has no folder"),
        ("host:/scratch:1GiB", "IRC429", "has no folder"),
    ],
)
def test_what_names_no_tier_is_refused(
    swap: Any, code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as raised:
        parse_tiers(swap)
    assert raised.value.code == code and said in raised.value.message, raised.value
    assert raised.value.help is not None
    assert "host:64GiB" in raised.value.help or "name" in raised.value.help


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:  # root may write anywhere
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError) as raised:
        parse_tiers(f"disk:{tmp_path}")
    assert raised.value.code == "IRC428" and "Permission denied" in raised.value.message
    assert "disk:/scratch" in (raised.value.help or "")
