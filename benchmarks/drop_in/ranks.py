"""Two processes with a gloo group, which run the body of a check side by side."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from irc.ir import IrcError, first_line

from .comparison import Difference
from .models import MODELS
from .plans import PLANS
from .trial import Trial, Workshop, came_in_backward

__all__ = ["BODIES", "on_ranks"]

_RANKS = 2
_SECONDS = 120.0

Body = Callable[[Trial], None]

BODIES: dict[str, Body] = {}
"""What runs on each rank, by name."""


def on_ranks(name: str) -> Callable[[Body], Body]:
    """Makes of a check's body one that runs on two ranks at once; both must pass.

    Args:
        name: Under which the ranks find it.
    """

    def enter(body: Body) -> Body:
        BODIES[name] = body

        @functools.wraps(body)
        def run(trial: Trial) -> None:
            _ranks().run(name, trial.plan.name, trial.subject_name)

        return run

    return enter


class _Ranks:
    """Two processes, started once; after a failure they are ended, and the next check starts new ones."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        meeting = Path(self.folder.name) / "meeting"
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(meeting), theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, name: str, plan: str, model: str | None) -> None:
        """Runs a body on both ranks.

        Raises:
            IrcError: Both refuse.
            Difference: One of them fails, or does not answer.
        """
        for pipe in self.pipes:
            pipe.send((name, plan, model))
        answers: list[tuple[str, Any] | None] = [p.recv() if p.poll(_SECONDS) else None for p in self.pipes]
        if any(answer != ("pass", None) for answer in answers):
            self.end()
        for rank, answer in enumerate(answers):
            if answer is None:
                raise Difference(f"rank {rank} has not answered within {_SECONDS:.0f} seconds")
        kinds = {answer[0] for answer in answers if answer is not None}
        failures = [a[1] for a in answers if a is not None and a[0] == "fail"]
        if failures:
            raise Difference(failures[0])
        if kinds == {"refused"}:
            raise next(a[1] for a in answers if a is not None)
        if "refused" in kinds:
            raise Difference("one rank refuses, the other goes on")

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
        _ranks.cache_clear()


@functools.cache
def _ranks() -> _Ranks:
    ranks = _Ranks()
    atexit.register(ranks.end)
    return ranks


def _serve(rank: int, meeting: str, pipe: Connection) -> None:
    """What a rank does: it runs bodies until nobody asks for more."""
    from . import families

    assert families
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the reducer warns there; failures come back as answers
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=_RANKS,
        timeout=timedelta(seconds=_SECONDS / 2),
    )
    workshop = Workshop()
    while True:
        name, plan, model = pipe.recv()
        trial = Trial(PLANS[plan], None if model is None else MODELS[model], workshop)
        try:
            BODIES[name](trial)
            answer: tuple[str, Any] = ("pass", None)
        except IrcError as refusal:
            answer = _refused(trial, refusal)
        except Difference as difference:
            answer = ("fail", f"on rank {rank}: {difference}")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            first = first_line(error)
            answer = (
                "fail",
                f"on rank {rank}: {type(error).__name__}: {first} ({place.name}:{place.lineno})",
            )
        pipe.send(answer)


def _refused(trial: Trial, refusal: IrcError) -> tuple[str, Any]:
    """A refusal, as far as it left everything alone."""
    if came_in_backward(refusal):
        return "fail", f"refused only in backward: {refusal.code}: {refusal.message}"
    try:
        trial.check_unchanged("what refuses")
    except Difference as difference:
        return "fail", f"{difference}: {refusal.code}: {refusal.message}"
    return "refused", IrcError(refusal.code, refusal.message, help=refusal.help)
