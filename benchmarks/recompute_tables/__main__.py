"""Plans the networks of published tables of recomputation, and writes them beside the published numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from irc.ir import UsageError
from irc.passes import machine_named

from ..command import chosen, parser_of, run_command, run_tasks
from ..harness import hardware
from ..swap_tables.published import cases
from ..swap_tables.simulated import fitted
from .page import ladder_section, resnet_section, searched_section
from .planned import Maker, Outcome
from .published import Searched, resnets, searched
from .runs import Trained, runs_section, trained_row
from .tables import LADDER_MODEL, Networks, ladder_row, resnet_row, searched_row

__all__ = ["main"]

_FITTED = "resnet50"
_REPEATS = 5
"""Timed steps of each plan that is run."""


class Table(NamedTuple):
    """What there is to find for a table.

    Args:
        about: What its rows depend on.
        entry: The dataclass of its rows.
        tasks: A key and a function for each row.
        section: The table of what was found.
    """

    about: Mapping[str, Any]
    entry: type[Any]
    tasks: Iterable[tuple[str, Callable[[], list[Any]]]]
    section: Callable[[Mapping[str, list[Any]]], str]


def main(argv: Sequence[str] | None = None, *, make: Maker | None = None) -> int:
    """Runs the command; the exit status is 2 for a wrong command.

    Args:
        argv: The arguments; those of the process if None.
        make: Makes the networks; the benchmark models if None.
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


def _run(options: argparse.Namespace, make: Maker | None) -> int:
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


def _searched(options: argparse.Namespace, make: Maker | None) -> Table:
    machine, networks, rows = machine_named("gtx1080ti"), Networks(make), _picked(options)
    fit = next(row for row in searched() if row.model == _FITTED)
    step = networks.steps(fit.model, fit.batch, fit.size)[0]
    machines = (machine, fitted(machine, step.graph, fit.seconds))
    tasks = (
        (f"{each.name} {row.model}", partial(searched_row, networks, row, each, options.seconds))
        for row in rows
        for each in machines
    )
    about = {"machine": machine.to_json()}
    return Table(about, Outcome, tasks, partial(searched_section, machines, rows))


def _trained(options: argparse.Namespace, make: Maker | None) -> Table:
    rows = _picked(options)
    tasks = ((row.model, partial(trained_row, row, options.seconds, _REPEATS, make)) for row in rows)
    return Table({"hardware": hardware()}, Trained, tasks, partial(runs_section, rows))


def _ladder(options: argparse.Namespace, make: Maker | None) -> Table:
    chosen(options.models, [LADDER_MODEL], "network in the table")
    machine, networks = machine_named("gtx1080ti"), Networks(make)
    tasks = [(machine.name, partial(ladder_row, networks, machine, options.seconds))]
    return Table({"machine": machine.to_json()}, Outcome, tasks, partial(ladder_section, machine))


def _resnets(options: argparse.Namespace, make: Maker | None) -> Table:
    names = chosen(options.models, dict.fromkeys(row.model for row in resnets()), "network in the table")
    machine, networks = machine_named("gtx1080"), Networks(make)
    rows = [row for row in resnets() if row.model in names]
    fit = next(case for case in cases() if case.model == _FITTED)
    step = networks.steps(fit.model, fit.batch)[0]
    machines = (machine, fitted(machine, step.graph, fit.published["original"].seconds))
    tasks = (
        (f"{each.name} {row.model}-{row.batch}", partial(resnet_row, networks, row, each, options.seconds))
        for row in rows
        for each in machines
    )
    about = {"machine": machine.to_json()}
    return Table(about, Outcome, tasks, partial(resnet_section, machines, rows))


_TABLES = {"ogc": _searched, "runs": _trained, "ladder": _ladder, "resnets": _resnets}


if __name__ == "__main__":
    raise SystemExit(main())
