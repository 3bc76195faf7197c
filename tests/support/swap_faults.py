"""Training with copies to a disk, while faults happen at random: what is lost, and what is left behind.

Run more faults than the tests do, from the root of the repository:

    PYTHONPATH=src:tests python -m support.swap_faults --runs 500
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import gc
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from irc.ir import IrcError
from support.swap_cases import assert_next_step_is_right, deep, step, swapping

__all__ = ["FAULTS", "run_faults"]

FAULTS = ("kill", "full", "folder gone")
_MOST_SECONDS = 0.1


def _killed(folder: Path, drawn: random.Random) -> str:
    """A process that trains is killed; the module from which it was forked goes on."""
    module, args = deep()
    original, ours = copy.deepcopy(module), swapping(module, folder)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            mine = swapping(copy.deepcopy(original), folder)
            while True:
                step(mine, args)
        os._exit(1)
    time.sleep(drawn.uniform(0, _MOST_SECONDS))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert_next_step_is_right(ours, original, args)
    return "killed" if status == signal.SIGKILL else f"status {status}"


def _full(folder: Path, drawn: random.Random) -> str:
    """The system refuses files beyond some size, once; the next step is that of the original."""
    module, args = deep()
    original, ours = copy.deepcopy(module), swapping(module, folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (drawn.randrange(1 << 12, 1 << 20), hard))
    try:
        said = _code_of(lambda: step(ours, args))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if said != "no error":
        assert_next_step_is_right(ours, original, args)
    return said


def _folder_gone(folder: Path, drawn: random.Random) -> str:
    """The folder is removed before the first step, or between two; then it is back."""
    module, args = deep()
    original, ours = copy.deepcopy(module), swapping(module, folder)
    if drawn.random() < 0.5:
        assert_next_step_is_right(ours, original, args)
        original.load_state_dict(ours.state_dict())
    shutil.rmtree(folder)
    said = _code_of(lambda: ours(*args))
    folder.mkdir()
    if said != "no error":
        assert_next_step_is_right(ours, original, args)
    return said


def _code_of(act: Callable[[], object]) -> str:
    try:
        act()
    except IrcError as error:
        return error.code
    return "no error"


_RUN = dict(zip(FAULTS, (_killed, _full, _folder_gone), strict=True))


def run_faults(runs: int, seed: int) -> collections.Counter[str]:
    """The outcomes of some faults, by fault.

    Raises:
        AssertionError: When the step after a fault has other numbers than the original's, when a file is left
            in the folder, or a file stays open in this process.
    """
    drawn = random.Random(seed)
    found = collections.Counter[str]()
    for number in range(runs):
        fault = FAULTS[number % len(FAULTS)]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "scratch"
            folder.mkdir()
            found[f"{fault}: {_RUN[fault](folder, drawn)}"] += 1
            assert os.listdir(folder) == [], f"run {number}, {fault}: files are left"
        gc.collect()
        left = [name for name in _open_files() if place in name]
        assert not left, f"run {number}, {fault}: {left} stay open"
    return found


def _open_files() -> list[str]:
    names: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    found = run_faults(options.runs, options.seed)
    print(f"{options.runs} faults in {time.monotonic() - started:.0f} s: nothing lost, nothing left behind")
    for outcome, count in sorted(found.items()):
        print(f"  {count:4}  {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(_run())
