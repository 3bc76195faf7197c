"""The rows of the tables of plans: the questions to each network."""

from __future__ import annotations

from functools import lru_cache, partial

from irc.passes import Machine, Program

from .planned import Maker, Outcome, Planning, captured
from .published import Resnet, Searched, ladder

__all__ = ["LADDER_MODEL", "RESNET_STRATEGIES", "Networks", "ladder_row", "resnet_row", "searched_row"]

LADDER_MODEL = "plain_cnn"
RESNET_STRATEGIES = ("sqrt-n", "gradient-checkpointing-memory", "gradient-checkpointing-speed", "ogc")


class Networks:
    """The training steps of networks; the last one is kept.

    Args:
        make: Makes them.
    """

    def __init__(self, make: Maker) -> None:
        self._captured = lru_cache(maxsize=1)(partial(captured, make=make))

    def steps(self, model: str, **keywords: int) -> tuple[Program, Program]:
        """Both steps of `captured`."""
        return self._captured(model, **keywords)


def searched_row(networks: Networks, row: Searched, machine: Machine, seconds: float) -> list[Outcome]:
    """A network of optimal gradient checkpoint search.

    Returns:
        The outcome above parameters and gradients, as the publication counts, and that of everything.
    """
    whole_step, released = networks.steps(row.model, batch=row.batch, size=row.size)
    theirs, whole = Planning(released, machine, seconds), Planning(whole_step, machine, seconds)
    return [
        theirs.outcome(
            theirs.by("ogc"),
            theirs.at("their cut", theirs.cut_to(row.cut)),
            theirs.within("their time", row.overhead),
            theirs.deepest("deepest"),
        ),
        whole.outcome(whole.at("their cut", int((1 - row.cut) * whole.baseline_bytes))),
    ]


def ladder_row(networks: Networks, machine: Machine, seconds: float) -> list[Outcome]:
    """The rungs of the ladder of checkpoints."""
    planning = Planning(networks.steps(LADDER_MODEL)[0], machine, seconds)
    found: list[Outcome] = []
    for rung in ladder()[1]:
        own = planning.by(f"checkpoints-{rung.checkpoints}")
        found.append(
            planning.outcome(
                own,
                planning.at("its memory", own.peak_bytes),
                planning.at("their memory", int(rung.share * planning.baseline_bytes)),
                planning.within("their time", rung.overhead),
            )
        )
    return found


def resnet_row(networks: Networks, row: Resnet, machine: Machine, seconds: float) -> list[Outcome]:
    """A ResNet of OME's table."""
    planning = Planning(networks.steps(row.model, batch=row.batch)[0], machine, seconds)
    points = [planning.by(strategy) for strategy in RESNET_STRATEGIES]
    points.append(planning.at("their memory", row.device_bytes))
    if row.original_bytes is not None:
        part = row.device_bytes / row.original_bytes
        points.append(planning.at("their part", int(part * planning.baseline_bytes)))
    if row.overhead is not None and row.overhead > 0:
        points.append(planning.within("their time", row.overhead))
    return [planning.outcome(*points)]
