"""The published methods by name: what a user asks for to compare with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ....ir import UsageError, load_plugin
from ..problem import CheckpointProblem, Solution
from .blocks import per_block
from .checkmate import checkmate
from .dtr import HEURISTICS, dtr
from .gradient_checkpointing import collection, memory, speed
from .min_cut import min_cut_candidates
from .moccasin import moccasin
from .ogc import ogc
from .revolve import revolve
from .rotor import rotor
from .segments import checkpoints, every_k, keep_all, keep_none, sqrt_n

__all__ = ["PUBLISHED", "Asked", "Strategy", "strategy_named"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The request to a strategy.

    Args:
        budget_bytes: The most that may be alive at once, static bytes included; most strategies know none.
        number: The number in the strategy's name, if it has one.
        deadline: `time.thread_time()` at which to stop.
    """

    budget_bytes: int
    number: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Strategy:
    """A published method.

    Args:
        name: Its name; `<k>` stands for a number of one or more, `<n>` for one of none or more.
        source: Who published it, and when.
        find: Its schedules for a request, in no order; those over the budget are not asked for.
        numbers: The numbers to try, if there is one in the name.
    """

    name: str
    source: str
    find: Callable[[CheckpointProblem, Asked], Iterable[Solution]]
    numbers: tuple[int, ...] = ()

    @property
    def examples(self) -> tuple[str, ...]:
        """Its name, with each of these numbers in it."""
        return tuple(re.sub("<[kn]>", str(number), self.name) for number in self.numbers) or (self.name,)


def _found(best: Solution | None) -> list[Solution]:
    return [] if best is None else [best]


def _per_block(problem: CheckpointProblem) -> list[Solution]:
    found = list(per_block(problem))
    if not found:
        raise UsageError(
            "IRC403",
            "strategy per-block finds no blocks in the names of this model's modules",
            help="use strategy auto, or put the blocks into a Sequential or ModuleList",
        )
    return found


PUBLISHED = (
    Strategy(
        "checkmate",
        "Jain et al. 2020",
        lambda problem, asked: _found(checkmate(problem, asked.budget_bytes, deadline=asked.deadline).best),
    ),
    Strategy(
        "moccasin",
        "Bartan et al. 2023",
        lambda problem, asked: _found(moccasin(problem, asked.budget_bytes, deadline=asked.deadline).best),
    ),
    Strategy("rotor", "Beaumont et al. 2019", lambda problem, asked: rotor(problem, asked.budget_bytes)),
    Strategy("revolve", "Griewank and Walther 2000", lambda problem, _: revolve(problem)),
    Strategy("ogc", "Feng and Huang 2021", lambda problem, asked: [ogc(problem, asked.deadline)]),
    *(
        Strategy(
            heuristic,
            "Kirisame et al. 2021",
            lambda problem, asked, heuristic=heuristic: _found(
                dtr(problem, asked.budget_bytes, heuristic, deadline=asked.deadline)
            ),
        )
        for heuristic in HEURISTICS
    ),
    Strategy("min-cut", "PyTorch 2022", lambda problem, _: min_cut_candidates(problem)),
    Strategy(
        "gradient-checkpointing-speed", "Bulatov and Salimans 2018", lambda problem, _: [speed(problem)]
    ),
    Strategy(
        "gradient-checkpointing-memory", "Bulatov and Salimans 2018", lambda problem, _: [memory(problem)]
    ),
    Strategy(
        "gradient-checkpointing-collection",
        "Bulatov and Salimans 2018",
        lambda problem, _: [collection(problem)],
    ),
    Strategy(
        "checkpoints-<n>",
        "Bulatov and Salimans 2018",
        lambda problem, asked: _found(checkpoints(problem, asked.number, asked.deadline)),
        numbers=(0, 4, 16),
    ),
    Strategy("per-block", "torch.utils.checkpoint", lambda problem, _: _per_block(problem)),
    Strategy("sqrt-n", "Chen et al. 2016", lambda problem, _: [sqrt_n(problem)]),
    Strategy(
        "every-<k>",
        "Chen et al. 2016",
        lambda problem, asked: [every_k(problem, asked.number)],
        numbers=(8,),
    ),
    Strategy("keep-none", "torch.utils.checkpoint", lambda problem, _: [keep_none(problem)]),
    Strategy("keep-all", "eager", lambda problem, _: [keep_all(problem)]),
)


def strategy_named(name: str) -> tuple[Strategy, int] | None:
    """The strategy of a name, such as `every-8`, and the number in it; None if there is none.

    A distribution's own is imported if no published one has the name.
    """
    for strategy in PUBLISHED:
        pattern = strategy.name.replace("<k>", "([1-9][0-9]{0,8})").replace("<n>", "(0|[1-9][0-9]{0,8})")
        found = re.fullmatch(pattern, name)
        if found is not None:
            return strategy, int(found[1]) if found.groups() else 0
    other = load_plugin("irc.strategies", name, Strategy)
    return None if other is None else (other, 0)
