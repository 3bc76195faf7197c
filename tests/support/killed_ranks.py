"""Kills ranks of a training pipeline at random moments, and tells how the others end.

Run more kills than the tests do, from the root of the repository:

    PYTHONPATH=src:tests python -m support.killed_ranks --kills 50
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from irc.__main__ import main as irc_main
from support.planned_pipelines import planned, written

__all__ = ["END_SECONDS", "KilledRank", "kill_ranks"]

END_SECONDS = 60.0
"""Time within which all other ranks end: some seconds, or tens of them on a machine that has other work."""
_START_SECONDS = 120.0


@dataclass(frozen=True)
class KilledRank:
    """How the other ranks ended after one was killed.

    Args:
        rank: The rank that was killed.
        after_seconds: The time from the moment at which all ranks had met.
        seconds: The time until the last one of the others had ended.
        exits: The exit status of each of the others; None for one that was still there.
        said: The code of the error that each of the others printed; for one that printed none, its place.
    """

    rank: int
    after_seconds: float
    seconds: float
    exits: tuple[int | None, ...]
    said: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether all others ended in time with an error that names a lost rank."""
        return all(code == 1 for code in self.exits) and set(self.said) == {"IRC493"}


def kill_ranks(folder: Path, ranks: int, kills: int, seed: int, most_seconds: float) -> list[KilledRank]:
    """Trains a written pipeline so often, and kills one of its ranks each time.

    Args:
        folder: What `irc optimize --stages` wrote.
        ranks: The number of ranks; without an agent that would end the others.
        kills: The number of kills.
        seed: Of which rank is killed, and when.
        most_seconds: The latest moment of a kill, from when the ranks have met.
    """
    drawn = random.Random(seed)
    found: list[KilledRank] = []
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as place:
            found.append(_kill(folder, ranks, drawn.randrange(ranks), drawn.uniform(0, most_seconds), place))
    return found


def _kill(folder: Path, ranks: int, victim: int, after_seconds: float, place: str) -> KilledRank:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(rank, ranks, str(folder), place)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        _wait_for(lambda: all(Path(place, f"met-{rank}").exists() for rank in range(ranks)), _START_SECONDS)
        time.sleep(after_seconds)
        pid = processes[victim].pid
        assert pid is not None and processes[victim].is_alive()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        others = [process for rank, process in enumerate(processes) if rank != victim]
        for process in others:
            process.join(max(killed + END_SECONDS - time.monotonic(), 0))
        seconds = time.monotonic() - killed
        if seconds >= END_SECONDS:
            for process in others:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGUSR1)  # it says where it is
            time.sleep(1)
    finally:
        exits = tuple(process.exitcode for process in processes)
        for process in processes:
            process.kill()
            process.join()
    said = [Path(place, f"stderr-{rank}").read_text() for rank in range(ranks) if rank != victim]
    codes = tuple(" ".join(re.findall(r"error\[(\w+)\]", text)) or text for text in said)
    return KilledRank(victim, after_seconds, seconds, (*exits[:victim], *exits[victim + 1 :]), codes)


def _wait_for(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the ranks do not meet"
        time.sleep(0.01)


def _rank(rank: int, ranks: int, folder: str, place: str) -> None:
    """Trains as `irc run` under torchrun does, and says when the ranks have met."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{place}/{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not those of pytest
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port(place)),
    }
    meet = dist.init_process_group

    def met(*args: object, **options: object) -> None:
        meet(*args, **options)  # type: ignore[arg-type]
        Path(place, f"met-{rank}").touch()

    dist.init_process_group = met
    sys.exit(irc_main(["run", folder, "--steps", "1000000"]))


def _port(place: str) -> int:
    return 20000 + hash(place) % 10000  # the ranks are forked: the hash is the same in all of them


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3.0, help="latest moment of a kill")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        pipe = planned("tied", options.ranks, "1f1b", 2 * options.ranks)
        folder = written(Path(place) / "out", "tied", pipe)
        found: list[KilledRank] = []
        for number in range(options.kills):
            found += kill_ranks(folder, options.ranks, 1, options.seed + number, options.seconds)
            print(number + 1, found[-1], flush=True)
    clean = [kill for kill in found if kill.is_clean]
    codes = collections.Counter(code for kill in found for code in kill.said)
    print(
        f"{len(clean)} of {len(found)} kills: all others ended with IRC493 within {END_SECONDS:g} s;"
        f" at most {max(kill.seconds for kill in found):.1f} s; {dict(codes)}"
    )
    return len(clean) != len(found)


if __name__ == "__main__":
    sys.exit(_run())
