"""The registry of strategies: a table of irc's own, and the entry points of other distributions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from ..ir import Tier, load_plugin
from .remat.problem import CheckpointProblem, Solution

__all__ = ["SEARCHES", "STRATEGIES", "Asked", "Strategy", "load_strategies", "needs_tiers", "strategy_named"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The request to a strategy.

    Args:
        budget_bytes: The most that may be alive at once, static bytes included; most strategies know none.
        number: The number in the strategy's name, if it has one.
        deadline: `time.thread_time()` at which to stop.
        tiers: The tiers that there are to copy to, the fastest first; none for a strategy that does not copy.
    """

    budget_bytes: int
    number: int
    deadline: float
    tiers: tuple[Tier, ...] = ()


@dataclass(frozen=True, slots=True)
class Strategy:
    """A published method.

    Args:
        name: Its name; `<k>` stands for a number of one or more, `<n>` for one of none or more.
        source: Who published it, and when.
        find: Its schedules for a request, in any order; those over the budget are not asked for.
        numbers: The numbers to try, if there is one in the name.
        copies: Whether it copies to tiers; it may then be asked for only if there are some.
        without_budget: Names of its first schedules, which look at no budget: a front shows them.
    """

    name: str
    source: str
    find: Callable[[CheckpointProblem, Asked], Iterable[Solution]]
    numbers: tuple[int, ...] = ()
    copies: bool = False
    without_budget: tuple[str, ...] = ()

    @property
    def examples(self) -> tuple[str, ...]:
        """Its name, with each of these numbers in it."""
        return tuple(re.sub("<[kn]>", str(number), self.name) for number in self.numbers) or (self.name,)


SEARCHES = ("auto", "ilp", "eviction")
"""The searches of this project, beside which `STRATEGIES` are there for comparison."""

STRATEGIES: Mapping[str, EntryPoint] = {
    name: EntryPoint(name, f"{__package__}.{value}", "irc.strategies")
    for name, value in {
        "checkmate": "published.checkmate:CHECKMATE",
        "moccasin": "published.moccasin:MOCCASIN",
        "rotor": "published.rotor:ROTOR",
        "revolve": "published.revolve:REVOLVE",
        "ogc": "published.ogc:OGC",
        "h-dtr": "published.dtr:H_DTR",
        "h-dtr-eq": "published.dtr:H_DTR_EQ",
        "h-dtr-local": "published.dtr:H_DTR_LOCAL",
        "min-cut": "remat.strategies:MIN_CUT",
        "gradient-checkpointing-speed": "published.gradient_checkpointing:SPEED",
        "gradient-checkpointing-memory": "published.gradient_checkpointing:MEMORY",
        "gradient-checkpointing-collection": "published.gradient_checkpointing:COLLECTION",
        "checkpoints-<n>": "published.gradient_checkpointing:CHECKPOINTS",
        "per-block": "remat.strategies:PER_BLOCK",
        "sqrt-n": "remat.strategies:SQRT_N",
        "every-<k>": "remat.strategies:EVERY_K",
        "keep-none": "remat.strategies:KEEP_NONE",
        "keep-all": "remat.strategies:KEEP_ALL",
        "lms": "published.lms:LMS",
        "ome": "published.ome:OME",
        "pofo": "published.pofo:POFO",
        "swap": "offload.strategies:SWAP",
    }.items()
}
"""The strategies that ship with irc, by name, as entry points of another distribution would name them.

They stand here and not in irc's metadata, since a checkout that is not installed has none.
"""


def load_strategies(*, copies: bool) -> list[Strategy]:
    """Imports those of `STRATEGIES` that copy to tiers, or the others."""
    return [strategy for entry in STRATEGIES.values() if (strategy := entry.load()).copies == copies]


def strategy_named(name: str) -> tuple[Strategy, int] | None:
    """Imports the strategy of a name, such as `every-8`; with it comes the number in the name, or 0.

    Another distribution's is imported if no strategy of irc has the name. None if there is none, and for
    `SEARCHES`.
    """
    if name in SEARCHES:
        return None
    for known, entry in STRATEGIES.items():
        pattern = known.replace("<k>", "([1-9][0-9]{0,8})").replace("<n>", "(0|[1-9][0-9]{0,8})")
        match = re.fullmatch(pattern, name)
        if match is not None:
            return entry.load(), int(match[1]) if match.groups() else 0
    strategy = load_plugin("irc.strategies", name, Strategy)
    return None if strategy is None else (strategy, 0)


def needs_tiers(name: str) -> bool:
    """Whether a strategy needs tiers to copy to; `auto`, which can do without, does not."""
    named = strategy_named(name)
    return named is not None and named[0].copies
