"""Plans the published networks on a described machine, and writes the tables beside the published numbers."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from irc import __version__
from irc.ir import Graph, UsageError
from irc.passes import Machine, Planner, machine_named

from ..command import chosen, parser_of, run_command, write_page
from ..journal import Journal
from ..pages import replace_section
from .page import Fitted, to_section
from .published import MODELS, Case, cases, largest_batches
from .simulated import (
    Entry,
    Maker,
    captured,
    entries,
    fitted,
    largest_original,
    open_journal,
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

    journal: Journal[Entry]
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
    if options.markdown is not None:
        replace_section(options.markdown, _SECTION, "")
    if machine.tier("host") is None:
        raise UsageError(
            "IRC408", f"machine {machine.name} has no tier host", help="choose one of a GPU, such as gtx1080"
        )
    if not 0 <= options.seconds < math.inf:
        raise UsageError("IRC400", f"--seconds is {options.seconds:g}", help="give 0 seconds or more")
    settings = {"irc": __version__, "machine": machine.to_json(), "seconds": options.seconds}
    work = _Work(open_journal(options.journal, settings), options.seconds, make)
    fit = next(case for case in cases() if case.model == _BATCH_MODEL)
    target = fit.published["original"].seconds
    machines = (machine, fitted(machine, work.graph(fit.model, fit.batch), target))
    about = [Fitted(machines[0], None), Fitted(machines[1], (fit, target))]
    for key, found in _rows(work, machines, picked, is_quick=options.quick):
        work.journal.append(key, found)
        print(_told(key, found), flush=True)
        _write(options.markdown, about, picked, work.journal)
    _write(options.markdown, about, picked, work.journal)
    return 0


def _write(
    path: Path | None, about: Sequence[Fitted], picked: Sequence[Case], journal: Journal[Entry]
) -> None:
    write_page(path, to_section(about, picked, journal.found), _SECTION)


def _picked(options: argparse.Namespace) -> list[Case]:
    names = chosen(options.models, MODELS, "published model")
    found = [case for case in cases() if case.model in names]
    return [case for case in found if case.model in _QUICK and case.batch < 100] if options.quick else found


def _rows(
    work: _Work, machines: Sequence[Machine], picked: Sequence[Case], *, is_quick: bool
) -> Iterator[tuple[str, list[Entry]]]:
    """What is not in the journal yet, the base batches first."""
    base = [case for case in picked if case.batch < 100]
    for case in base:
        yield from _cases(work, machines, case)
    if not is_quick and any(case.model == _BATCH_MODEL for case in picked):
        yield from _batches(work, machines)
    for case in picked:
        if case not in base:
            yield from _cases(work, machines, case)


def _cases(work: _Work, machines: Sequence[Machine], case: Case) -> Iterator[tuple[str, list[Entry]]]:
    for machine in machines:
        key = f"{machine.name} {case.name}"
        if key not in work.journal.found:
            planner = work.planner(machine, case.model, case.batch)
            yield key, list(entries(planner, case, work.seconds))


def _batches(work: _Work, machines: Sequence[Machine]) -> Iterator[tuple[str, list[Entry]]]:
    """The largest batch of the original, and the joint plan at larger ones, one machine after the other."""
    known = largest_batches()
    budget_bytes = known["original"].device_bytes
    key = f"{machines[0].name} {_BATCH_MODEL} original"
    if key not in work.journal.found:

        def baseline(batch: int) -> int:
            return work.planner(machines[0], _BATCH_MODEL, batch).baseline_bytes

        largest = largest_original(baseline, budget_bytes, known["original"].batch)
        found = original(work.planner(machines[0], _BATCH_MODEL, largest))
        yield key, [replace(found, note=str(largest))]
    largest = int(work.journal.found[key][0].note)
    for growth in _GROWTH:
        batch = math.ceil(largest * known["ome"].batch / known["original"].batch * growth)
        for machine in machines:
            key = f"{machine.name} {_BATCH_MODEL} batch {batch}"
            if key not in work.journal.found:
                planner = work.planner(machine, _BATCH_MODEL, batch)
                yield key, [original(planner), reached(planner, "joint", budget_bytes, work.seconds)]


def _told(key: str, found: Sequence[Entry]) -> str:
    """A row for the terminal."""
    step = found[0].seconds or math.nan
    lines = [f"{time.strftime('%H:%M:%S')} {key}: original {found[0].peak_bytes / 1e6:,.0f} MB, {step:.3f} s"]
    for entry in found[1:]:
        reached_bytes = f"{entry.peak_bytes / 1e6:,.0f} MB"
        did = "does not fit" if entry.seconds is None else f"{entry.seconds / step - 1:+.1%}"
        within = f"within {entry.budget_bytes / 1e6:,.0f} MB" if entry.budget_bytes else "all swapped"
        lines.append(f"    {entry.strategy} {within}: {reached_bytes}, {did} ({entry.plan_seconds:.0f} s)")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
