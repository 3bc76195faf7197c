"""A journal goes on where it was cut off, and rows come out of it as they went in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from benchmarks.journal import Journal, from_json
from irc.ir import UsageError


class Kind(Enum):
    ONE = "one"


@dataclass(frozen=True)
class Inner:
    ratio: float
    kind: str | None = None


@dataclass(frozen=True)
class Entry:
    name: str
    pair: tuple[int, Inner]
    parts: tuple[Inner, ...] = ()
    more: list[Inner] | None = None
    inner: Inner | None = None


ENTRY = Entry("a", (1, Inner(float("inf"), "b")), (Inner(0.5), Inner(1.5)), [Inner(2.0)])


def opened(path: Path, options: dict[str, Any] | None = None) -> Journal[Entry]:
    return Journal.open(path, options or {}, "irc-test-1", Entry)


def test_a_journal_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    opened(path, {"seconds": 1}).append("a", [ENTRY])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "b", "entr')
    journal = opened(path, {"seconds": 1})
    assert journal.found == {"a": [ENTRY]} and path.read_bytes() == whole
    with pytest.raises(UsageError, match="with the options") as caught:
        opened(path, {"seconds": 2})
    assert caught.value.code == "IRC441"
    path.write_bytes(whole + b'{"key": "b"}\n')
    with pytest.raises(UsageError, match="damaged in line 3") as caught:
        opened(path, {"seconds": 1})
    assert caught.value.code == "IRC446"
    with pytest.raises(UsageError, match="cannot be written") as caught:
        opened(tmp_path / "no" / "rows.jsonl")
    assert caught.value.code == "IRC442"
    path.write_text(json.dumps({"format": "other"}) + "\n")
    with pytest.raises(UsageError, match="damaged in line 1"):
        opened(path)


def test_rows_come_back_as_they_were() -> None:
    assert from_json(Entry, json.loads(json.dumps(asdict(ENTRY)))) == ENTRY
    assert from_json(Kind, "one") is Kind.ONE
    with pytest.raises(KeyError):
        from_json(Entry, {"other": 1})
    with pytest.raises(TypeError):
        from_json(Inner, {})
