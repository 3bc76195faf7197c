"""Plans the published networks on a described machine, and writes the tables beside the published numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from irc.ir import Graph, UsageError
from irc.passes import Machine, Planner, machine_named

from ..command import chosen, parser_of, run_command, run_tasks
from .page import Fitted, to_section
from .published import MODELS, Case, cases, largest_batches
from .simulated import (
    Entry,
    Maker,
    captured,
    entries,
    fitted,
    largest_original,
    original,
    program_on,
    reached,
)

__all__ = ["main"]

_SECTION = "swap-tables"
_QUICK = ("resnet18", "resnet50")
_BATCH_MODEL = "resnet50"
_GROWTH = (1.0, 1.25, 1.5, 1.75, 2.0)
"""Batches that are planned, over the one in proportion to OME's."""


def main(argv: Sequence[str] | None = None, *, make: Maker | None = None) -> int:
    """Runs the command; the exit status is 2 for a wrong command.

    Args:
        argv: The arguments; those of the process if None.
        make: Makes the networks; the benchmark models if None.
    """
    return run_command(_parser(), partial(_run, make=make), argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "swap_tables",
        "Plans the networks of the published tables of Large Model Support and OME.",
        journal=None,
        markdown=None,
    )
    parser.add_argument(
        "--costs", default="gtx1080", metavar="MACHINE", help="a described machine, or its file"
    )
    parser.add_argument("--models", metavar="A,B", help=f"some of {', '.join(MODELS)}")
    parser.add_argument(
        "--quick", action="store_true", help=f"only {' and '.join(_QUICK)}, at their base batch"
    )
    parser.add_argument("--seconds", type=float, default=40.0, metavar="S", help="for each search (40)")
    return parser


@dataclass
class _Work:
    """What all rows share."""

    found: Mapping[str, Sequence[Entry]]
    seconds: float
    make: Maker | None
    graphs: dict[tuple[str, int], Graph] = field(default_factory=dict[tuple[str, int], Graph])

    def graph(self, model: str, batch: int) -> Graph:
        """The step of a network; the last few are kept."""
        key = model, batch
        if key not in self.graphs:
            while len(self.graphs) > 2:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[key] = captured(model, batch, self.make)
        return self.graphs[key]

    def planner(self, machine: Machine, model: str, batch: int) -> Planner:
        return Planner(program_on(self.graph(model, batch), machine))


def _run(options: argparse.Namespace, make: Maker | None) -> int:
    machine = machine_named(options.costs)
    picked = _picked(options)
    if machine.tier("host") is None:
        raise UsageError(
            "IRC408", f"machine {machine.name} has no tier host", help="choose one of a GPU, such as gtx1080"
        )
    if not 0 <= options.seconds < math.inf:
        raise UsageError("IRC400", f"--seconds is {options.seconds:g}", help="give 0 seconds or more")
    fit = next(case for case in cases() if case.model == _BATCH_MODEL)
    target = fit.published["original"].seconds
    work = _Work({}, options.seconds, make)
    machines = (machine, fitted(machine, work.graph(fit.model, fit.batch), target))
    about = [Fitted(machines[0], None), Fitted(machines[1], (fit, target))]
    run_tasks(
        options,
        "irc-swap-tables-1",
        {"machine": machine.to_json(), "seconds": options.seconds},
        Entry,
        lambda found: _rows(replace(work, found=found), machines, picked, is_quick=options.quick),
        lambda found: to_section(about, picked, found),
        _SECTION,
    )
    return 0


def _picked(options: argparse.Namespace) -> list[Case]:
    names = chosen(options.models, MODELS, "published model")
    found = [case for case in cases() if case.model in names]
    return [case for case in found if case.model in _QUICK and case.batch < 100] if options.quick else found


_Task = tuple[str, Callable[[], list[Entry]]]


def _rows(
    work: _Work, machines: Sequence[Machine], picked: Sequence[Case], *, is_quick: bool
) -> Iterator[_Task]:
    """All rows, the base batches first."""
    base = [case for case in picked if case.batch < 100]
    for case in base:
        yield from _cases(work, machines, case)
    if not is_quick and any(case.model == _BATCH_MODEL for case in picked):
        yield from _batches(work, machines)
    for case in picked:
        if case not in base:
            yield from _cases(work, machines, case)


def _cases(work: _Work, machines: Sequence[Machine], case: Case) -> Iterator[_Task]:
    def found(machine: Machine) -> list[Entry]:
        return list(entries(work.planner(machine, case.model, case.batch), case, work.seconds))

    for machine in machines:
        yield f"{machine.name} {case.name}", partial(found, machine)


def _batches(work: _Work, machines: Sequence[Machine]) -> Iterator[_Task]:
    """The largest batch of the original, and the joint plan at larger ones, one machine after the other."""
    known = largest_batches()
    budget_bytes = known["original"].device_bytes

    def baseline(batch: int) -> int:
        return work.planner(machines[0], _BATCH_MODEL, batch).baseline_bytes

    def largest_of_original() -> list[Entry]:
        largest = largest_original(baseline, budget_bytes, known["original"].batch)
        return [replace(original(work.planner(machines[0], _BATCH_MODEL, largest)), note=str(largest))]

    def joint(machine: Machine, batch: int) -> list[Entry]:
        planner = work.planner(machine, _BATCH_MODEL, batch)
        return [original(planner), reached(planner, "joint", budget_bytes, work.seconds)]

    key = f"{machines[0].name} {_BATCH_MODEL} original"
    yield key, largest_of_original
    largest = int(work.found[key][0].note)
    for growth in _GROWTH:
        batch = math.ceil(largest * known["ome"].batch / known["original"].batch * growth)
        for machine in machines:
            yield f"{machine.name} {_BATCH_MODEL} batch {batch}", partial(joint, machine, batch)


if __name__ == "__main__":
    raise SystemExit(main())
