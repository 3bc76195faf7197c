"""Plans the networks of published tables of recomputation, and writes them beside the published numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from irc.ir import UsageError
from irc.passes import Machine, machine_named

from ..command import chosen, parser_of, run_command, run_tasks
from ..harness import hardware
from ..swap_tables.published import cases
from ..swap_tables.simulated import fitted
from .page import ladder_section, resnet_section, searched_section
from .planned import Maker, Outcome, benchmark_model
from .published import Resnet, Searched, resnets, searched
from .runs import Trained, runs_section, trained_row
from .tables import LADDER_MODEL, Networks, ladder_row, resnet_row, searched_row

__all__ = ["main"]

_Row = TypeVar("_Row", Searched, Resnet)

_FITTED = "resnet50"
_REPEATS = 5
"""Timed steps of each plan that is run."""


_Tasks = Iterable[tuple[str, Callable[[], list[Any]]]]


class Table(NamedTuple):
    """The work for one table.

    Args:
        about: The conditions of its rows: those of others do not mix with them.
        entry: The dataclass of its rows.
        tasks: A key and a function for each row.
        section: Makes the table of the rows that are there.
    """

    about: Mapping[str, Any]
    entry: type[Any]
    tasks: _Tasks
    section: Callable[[Mapping[str, list[Any]]], str]


def main(argv: Sequence[str] | None = None, *, make: Maker = benchmark_model) -> int:
    """Runs the command; the exit status is 2 for a wrong command.

    Args:
        argv: The arguments; those of the process if None.
        make: Makes the networks.
    """
    return run_command(_parser(), partial(_run, make=make), argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "recompute_tables", "Plans the networks of published tables.", threads=1, journal=None, markdown=None
    )
    help = "plans of optimal gradient checkpoint search, runs of them, a ladder of checkpoints, OME's ResNets"
    parser.add_argument("table", choices=_TABLES, help=help)
    parser.add_argument("--models", metavar="A,B", help="some of the table's networks")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="for each search (20)")
    return parser


def _run(options: argparse.Namespace, make: Maker) -> int:
    if not 0 <= options.seconds < math.inf:
        raise UsageError("IRC400", f"--seconds is {options.seconds:g}", help="give 0 seconds or more")
    table = _TABLES[options.table](options, make)
    about = {"table": options.table, "seconds": options.seconds, **table.about}
    form, name = "irc-recompute-tables-1", f"recompute-{options.table}"
    run_tasks(options, form, about, table.entry, lambda _: table.tasks, table.section, name)
    return 0


def _picked(options: argparse.Namespace) -> list[Searched]:
    names = chosen(options.models, [row.model for row in searched()], "network in the table")
    return [row for row in searched() if row.model in names]


def _searched(options: argparse.Namespace, make: Maker) -> Table:
    machine, networks, rows = machine_named("gtx1080ti"), Networks(make), _picked(options)
    fit = next(row for row in searched() if row.model == _FITTED)
    step, _ = networks.steps(fit.model, batch=fit.batch, size=fit.size)
    machines = machine, fitted(machine, step.graph, fit.seconds)
    tasks = _tasks(machines, rows, lambda row, on: searched_row(networks, row, on, options.seconds))
    return Table({"machine": machine.to_json()}, Outcome, tasks, partial(searched_section, machines, rows))


def _tasks(
    machines: Sequence[Machine], rows: Sequence[_Row], outcomes: Callable[[_Row, Machine], list[Outcome]]
) -> _Tasks:
    """Each row on each machine, one network after the other."""
    for row in rows:
        for machine in machines:
            yield f"{machine.name} {row.name}", partial(outcomes, row, machine)


def _trained(options: argparse.Namespace, make: Maker) -> Table:
    rows = _picked(options)
    tasks = ((row.model, partial(trained_row, row, options.seconds, _REPEATS, make)) for row in rows)
    return Table({"hardware": hardware()}, Trained, tasks, partial(runs_section, rows))


def _ladder(options: argparse.Namespace, make: Maker) -> Table:
    chosen(options.models, [LADDER_MODEL], "network in the table")
    machine, networks = machine_named("gtx1080ti"), Networks(make)
    tasks = [(machine.name, partial(ladder_row, networks, machine, options.seconds))]
    return Table({"machine": machine.to_json()}, Outcome, tasks, partial(ladder_section, machine))


def _resnets(options: argparse.Namespace, make: Maker) -> Table:
    names = chosen(options.models, dict.fromkeys(row.model for row in resnets()), "network in the table")
    machine, networks = machine_named("gtx1080"), Networks(make)
    rows = [row for row in resnets() if row.model in names]
    fit = next(case for case in cases() if case.model == _FITTED)
    step, _ = networks.steps(fit.model, batch=fit.batch)
    machines = machine, fitted(machine, step.graph, fit.published["original"].seconds)
    tasks = _tasks(machines, rows, lambda row, on: resnet_row(networks, row, on, options.seconds))
    return Table({"machine": machine.to_json()}, Outcome, tasks, partial(resnet_section, machines, rows))


_TABLES = {"ogc": _searched, "runs": _trained, "ladder": _ladder, "resnets": _resnets}


if __name__ == "__main__":
    raise SystemExit(main())
