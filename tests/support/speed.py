"""Tests by speed: `fast` within `test`, and `slow` beside it; a test that is not marked `slow` is quick.

`make fast` runs the tests of `FAST`, `make test` all that are not slow, and `make slow` the others. A test is
slow if it has the marker, or if it is in one of the places of `SLOW`. A test in one of the places of `FAST`
that takes more than half a second of the processor is marked `default`: `make fast` leaves it out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

__all__ = ["FAST", "SLOW", "cpu_seconds", "is_in", "slowness"]

TESTS = Path(__file__).parents[1]

FAST = (
    "ir",
    "passes",
    "backends/test_emitted_names.py",
    "backends/test_torch_partial.py",
    "compiler/test_optimizers.py",
    "compiler/test_written_files.py",
    "tools/test_help.py",
    "tools/test_inspection.py",
    "tools/test_schedule.py",
    "test_layout.py",
    "test_speed.py",
)
"""Folders and files that `make fast` runs, except for tests in them that are marked `default` or `slow`."""

SLOW = (
    "benchmarks",
    "replay",
    "backends/test_distributed.py",
    "frontends/test_onnx_exporters.py",
    "frontends/test_onnx_fuzz.py",
    "frontends/test_torch_recorders.py",
    "test_drop_in.py",
    "test_examples.py",
)
"""Folders and files that are slow as a whole."""

_TRIES = 10
_ITEMS = 40_000
_QUIET_SECONDS = 0.018
"""Seconds of the processor to make a dict of `_ITEMS` on a quiet machine; on a busy one, up to 0.038."""


def is_in(path: Path, places: tuple[str, ...]) -> bool:
    """Whether a file of tests is one of some places, or in one of them."""
    return any(path.is_relative_to(TESTS / place) for place in places)


def cpu_seconds() -> float:
    """Seconds of the processor that this process and its ended children have taken, without waiting."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def slowness() -> float:
    """How much longer the same work takes here at present than on a quiet machine; 1 at the least.

    Beside others a core computes more slowly, and has less of the caches: seconds of the processor grow, too.
    """
    longest = 0.0
    for _ in range(_TRIES):
        started = time.process_time()
        made = {str(number): [number] for number in range(_ITEMS)}
        longest = max(longest, time.process_time() - started)
        del made
    return max(1.0, longest / _QUIET_SECONDS)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the limit, which stands in pyproject.toml."""
    parser.addini("most_cpu_seconds", "the most that a test takes that is not marked slow", default="2")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves unread what the chosen marker deselects as a whole: reading all tests takes seconds."""
    if collection_path.suffix != ".py":
        return None
    match config.option.markexpr:
        case "fast" if not is_in(collection_path, FAST):
            return True
        case "not slow" if is_in(collection_path, SLOW):
            return True
        case _:
            return None


def pytest_collection_finish() -> None:
    """Keeps no bytecode of what tests write: of a file rewritten within a second it would be stale."""
    sys.dont_write_bytecode = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by their place, before some are deselected."""
    for item in items:
        if is_in(item.path, SLOW):
            item.add_marker("slow")
        elif is_in(item.path, FAST) and not any(map(item.get_closest_marker, ("default", "slow"))):
            item.add_marker("fast")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that is not marked `slow` and takes long; what fixtures do is not counted."""
    most = float(item.config.getini("most_cpu_seconds"))
    started = cpu_seconds()
    result = yield
    seconds = cpu_seconds() - started
    if (
        item.get_closest_marker("slow") is None
        and seconds > most
        and (seconds := seconds / slowness()) > most
    ):
        pytest.fail(
            f"took {seconds:.1f} s of the processor, and a test not marked slow takes {most:g} s at most",
            pytrace=False,
        )
    return result
