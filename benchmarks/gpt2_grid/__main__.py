"""The command: replays the grid, plans the same model, and writes the page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from irc.compiler.pipeline.request import CHECKPOINT_MODES
from irc.ir import UsageError, parse_budget

from ..command import parser_of, run_command, write_page
from ..models.gpt2_grid import GRID, gpt2
from ..pages import replace_section
from .own_plan import OwnPlan, Planning, RankRun, run_on_ranks
from .page import Page, told
from .published import PLANS, DeviceRow, PublishedRow, published
from .replay import Held, Run, replayed, stages_of

__all__ = ["main"]

_SECTION = "gpt2-grid"
_COMPARED = (4, 32)
"""The devices and micro-batches that plans are made for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 2 for a wrong command.

    Args:
        argv: The arguments; those of the process if None.
    """
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "gpt2_grid",
        "Predicts the peaks of a published grid of GPT-2 runs, and plans the same model.",
        time_limit=20.0,
        costs="thorough",
        markdown=None,
    )
    parser.add_argument("--devices", default="1,2,4", metavar="A,B", help="only these rows (1,2,4)")
    parser.add_argument("--micro-batches", metavar="A,B", help="only these rows (1,2,4,8,16,32,64)")
    parser.add_argument("--budget", default="650MiB", help="of each device, for our own plans (650MiB)")
    parser.add_argument("--no-plans", action="store_true", help="predict the grid, and plan nothing")
    parser.add_argument("--no-run", action="store_true", help="plan, and run nothing")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.markdown is not None:
        replace_section(options.markdown, _SECTION, "")
    budget_bytes = parse_budget(options.budget, 0)
    rows = _chosen(options)
    page = Page(tuple(_device_rows(rows)))
    print(page.summary(), flush=True)
    write_page(options.markdown, page.text(), _SECTION)
    for found in () if options.no_plans else _plans(options, budget_bytes):
        print(told(found), flush=True)
        page = page.with_(found)
        write_page(options.markdown, page.text(), _SECTION)
    return 0


def _chosen(options: argparse.Namespace) -> list[PublishedRow]:
    """The rows that were asked for.

    Raises:
        UsageError: IRC400 where there are none.
    """
    devices = _numbers(options.devices)
    counts = None if options.micro_batches is None else _numbers(options.micro_batches)
    rows = [
        row
        for row in published()
        if row.devices in devices and (counts is None or row.run.micro_batches in counts)
    ]
    if not rows:
        raise UsageError(
            "IRC400",
            "the grid has no such rows",
            help="choose among 1, 2 and 4 devices, and 1, 2, 4, 8, 16, 32 and 64 micro-batches",
        )
    return rows


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(
            "IRC400", f"{text!r} is no list of numbers", help="write numbers with commas, as 2,4"
        ) from None


def _device_rows(rows: Sequence[PublishedRow]) -> Iterator[DeviceRow]:
    """Each device of each row with its replay."""
    model = gpt2(GRID)
    found: dict[tuple[int, int, Run], Held] = {}
    for count in sorted({row.run.micro_batches for row in rows}):
        mine = [row for row in rows if row.run.micro_batches == count]
        needed = sorted({row.devices for row in mine})
        stages = stages_of(model, GRID, [PLANS[devices] for devices in needed], count)
        for devices, its in zip(needed, stages, strict=True):
            for run in dict.fromkeys(row.run for row in mine if row.devices == devices):
                for device, stage in enumerate(its):
                    found[devices, device, run] = replayed(stage, run)
    for row in rows:
        for device in range(row.devices):
            yield DeviceRow(row, device, found[row.devices, device, row.run])


def _plans(options: argparse.Namespace, budget_bytes: int) -> Iterator[OwnPlan | RankRun]:
    """Plans for 4 devices and 32 micro-batches; those within the budget are run."""
    planning = Planning(*_COMPARED, options.time_limit, is_measured=options.costs != "analytic")
    for schedule in ("gpipe", "1f1b"):
        for mode in CHECKPOINT_MODES:
            yield planning.even(schedule, mode)
        within = planning.plan(schedule, budget_bytes)
        yield within
        yield planning.least(schedule)
        if within.pipeline is not None and not options.no_run:
            yield run_on_ranks(planning, within)


if __name__ == "__main__":
    raise SystemExit(main())
