"""Runs the programs of many seeds in a process that may die, and keeps what it finds."""

from __future__ import annotations

import logging
import math
import multiprocessing
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from .compare import BAD, Outcome, Verdict, examine
from .programs import Program, draw, to_json
from .shrink import shrunk

__all__ = ["Worker", "outcomes", "shrink_outcome"]

_MOST_CPU_SECONDS = 120
_MOST_SECONDS = 10 * _MOST_CPU_SECONDS
"""One that waits ends by the clock, which runs faster than the processor where others compute."""
_PROGRAMS_OF_A_PROCESS = 150
"""torch keeps what it has traced: a process grows."""


class Worker:
    """A process that examines one program after another."""

    def __init__(self) -> None:
        self._process: Any = None
        self._ours: Connection | None = None
        self._left = 0

    def examine(self, program: Program) -> Outcome:
        """How irc did; CRASH if the process died or takes too long."""
        if self._left == 0:
            self.close()
            context = multiprocessing.get_context("spawn")
            self._ours, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._left = _PROGRAMS_OF_A_PROCESS
        self._left -= 1
        assert self._ours is not None
        try:
            self._ours.send(program)
            if self._ours.poll(_MOST_SECONDS):
                return self._ours.recv()
            cause = f"no end in {_MOST_SECONDS} s"
        except (EOFError, OSError):
            self._process.join(10)
            cause = f"the process ended with {self._process.exitcode}"
            if self._process.exitcode == -signal.SIGXCPU:
                cause = f"no end in {_MOST_CPU_SECONDS} s of the processor"
        self.close()
        kinds = tuple(block.kind for block in program.blocks)
        return Outcome(program.seed, Verdict.CRASH, cause, str(program), kinds, program=to_json(program))

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process, self._left = None, 0


def _serve(theirs: Connection) -> None:
    torch.set_num_threads(1)
    logging.getLogger("irc").setLevel(logging.ERROR)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    while True:
        program = theirs.recv()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + _MOST_CPU_SECONDS, most))
        theirs.send(examine(program))


def outcomes(seeds: Iterable[int], most_shrunk: int = 2) -> Iterator[Outcome]:
    """How irc did with each seed.

    Args:
        seeds: The seeds.
        most_shrunk: How many of the programs with the same verdict and cause are shrunk.
    """
    worker, causes = Worker(), Counter[tuple[str, str]]()
    try:
        for seed in seeds:
            program = draw(seed)
            outcome = worker.examine(program)
            fault = outcome.verdict, outcome.cause
            if outcome.verdict in BAD and causes[fault] < most_shrunk:
                outcome = shrink_outcome(outcome, program, worker.examine)
            causes[fault] += 1
            yield outcome
    finally:
        worker.close()


def shrink_outcome(outcome: Outcome, program: Program, examine: Callable[[Program], Outcome]) -> Outcome:
    """The outcome of the smallest program near this one with the same verdict and cause."""
    smallest = outcome

    def is_same(smaller: Program) -> bool:
        nonlocal smallest
        other = examine(smaller)
        if (other.verdict, other.cause) != (outcome.verdict, outcome.cause):
            return False
        smallest = other
        return True

    program = shrunk(program, is_same)
    return replace(smallest, seconds=outcome.seconds, kinds=outcome.kinds, program=to_json(program))
