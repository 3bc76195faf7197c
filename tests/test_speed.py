"""Tests are marked by speed, and one that takes longer than its marker says fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import speed

INI = "[pytest]\nmarkers = slow\n    fast\n    default\n"
WITH = ("-p", "support.speed", "-p", "no:cacheprovider")
BURN = """
import pytest, time

def burn():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass

@pytest.fixture
def prepared():
    burn()

def test_quick(prepared):
    time.sleep(0.3)  # waiting is no work

def test_long():
    burn()

@pytest.mark.slow
def test_long_and_slow():
    burn()
"""

OF_IR = """
import pytest

def test_quick_of_ir(): pass

@pytest.mark.default
def test_longer_of_ir(): pass

@pytest.mark.slow
def test_slow_of_ir(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Tests whose limit is a tenth of a second, on a machine that is as slow as said."""
    monkeypatch.setattr(speed, "slowness", lambda: 1.0)
    pytester.makeini(f"{INI}most_cpu_seconds = 0.1\n")
    pytester.makepyfile(BURN)
    return pytester


def test_a_test_that_takes_long_and_is_not_marked_fails(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess(*WITH)
    result.assert_outcomes(passed=2, failed=1)
    said = result.stdout.str()
    assert re.search(r"took 0\.[2-9] s of the processor, and a test .* takes 0\.1 s at most", said)
    assert re.search(r"FAILED .*::test_long ", said)


def test_a_slow_machine_fails_no_test(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "slowness", lambda: 100.0)
    suite.runpytest_inprocess(*WITH).assert_outcomes(passed=3)


def test_a_machine_is_as_slow_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.slowness() >= 1
    monkeypatch.setattr(speed, "_QUIET_SECONDS", 1e-9)
    assert speed.slowness() > 100


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("fast", ["quick_of_ir"]),
        ("not slow", ["longer_of_ir", "quick_of_ir", "quick_of_tools"]),
        ("slow", ["slow_of_ir", "any_of_benchmarks"]),
        ("", ["any_of_benchmarks", "longer_of_ir", "quick_of_ir", "quick_of_tools", "slow_of_ir"]),
    ],
)
def test_each_test_is_slow_or_not_and_fast_ones_are_not(
    expression: str, expected: list[str], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "TESTS", pytester.path)
    pytester.makeini(INI)
    files = {
        "ir/test_a.py": OF_IR,
        "tools/test_b.py": "def test_quick_of_tools(): pass\n",
        "benchmarks/test_c.py": "def test_any_of_benchmarks(): pass\n",
    }
    for name, text in files.items():
        (pytester.path / name).parent.mkdir()
        (pytester.path / name).write_text(text)
    result = pytester.runpytest_inprocess(*WITH, "-v", "-m", expression)
    ran = re.findall(r"::test_(\w+) PASSED", result.stdout.str())
    assert sorted(ran) == sorted(expected)


def test_places_exist() -> None:
    assert [place for place in (*speed.FAST, *speed.SLOW) if not (speed.TESTS / place).exists()] == []
    assert not any(speed.is_in(Path(speed.TESTS / place), speed.SLOW) for place in speed.FAST)
