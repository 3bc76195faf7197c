"""Plans AmoebaNet-D in the five settings of GPipe's and torchgpipe's tables of memory, beside their peaks."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from irc.ir import BudgetError

from .command import chosen, parser_of, run_command, run_tasks
from .models.amoebanet import AmoebaNet, amoebanet_d
from .pages import to_markdown
from .torchgpipe.programs import MACHINE, Simulation, again_seconds, model_bytes

__all__ = ["Row", "Setting", "main", "rows_of", "settings"]

_BATCH = 128
_TIME_LIMIT = 60.0
_GIB = 2**30
_GB = 10**9


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the published tables.

    Args:
        name: As torchgpipe calls it.
        layers: L.
        filters: D.
        torchgpipe_bytes: torchgpipe's peak activation; None where it ran out of memory.
        gpipe_bytes: That of GPipe's paper.
    """

    name: str
    layers: int
    filters: int
    torchgpipe_bytes: int | None
    gpipe_bytes: int

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return int(self.name.removeprefix("pipeline-")) if self.name != "baseline" else 1

    @property
    def micro_batches(self) -> int:
        """In how many parts the batch goes through."""
        return 1 if self.name == "baseline" else _BATCH

    @property
    def published_bytes(self) -> int:
        """What a plan has to stay within: torchgpipe's peak activation, or GPipe's where there is none."""
        return self.gpipe_bytes if self.torchgpipe_bytes is None else self.torchgpipe_bytes


def settings() -> tuple[Setting, ...]:
    """The published settings."""
    with open(Path(__file__).parent / "torchgpipe" / "amoebanet_d.csv", newline="") as file:
        return tuple(
            Setting(
                row["setting"],
                int(row["layers"]),
                int(row["filters"]),
                None
                if row["peak_activation_gib_torchgpipe"] == "oom"
                else round(float(row["peak_activation_gib_torchgpipe"]) * _GIB),
                round(float(row["peak_activation_gb_paper"]) * _GB),
            )
            for row in csv.DictReader(file)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of a setting.

    Args:
        asked: What its budgets are, in words.
        parameters: How many the model has.
        budget_bytes: Of each device, in the order in which the pipeline goes through them.
        peak_bytes: Of each device; the smallest budget of one device where the plan was refused.
        fits: Whether there is a plan.
        step_seconds: Predicted time of a step.
        bound_seconds: No partition takes less, whatever the memory.
        again: What is computed a second time, as a part of the time of a step's operations.
        capture_seconds: How long capturing one micro-batch took.
        planning_seconds: How long planning took.
    """

    asked: str
    parameters: int
    budget_bytes: list[int]
    peak_bytes: list[int]
    fits: bool
    step_seconds: float
    bound_seconds: float
    again: float
    capture_seconds: float
    planning_seconds: float

    @property
    def model_bytes(self) -> int:
        """Bytes of parameters, gradients and the optimizer's state: 12 for each parameter."""
        return 12 * self.parameters

    @property
    def activation_bytes(self) -> int:
        """The sum of the devices' peaks without the model: the published definition."""
        return sum(self.peak_bytes) - self.model_bytes


def rows_of(setting: Setting, time_limit: float) -> list[Row]:
    """The plans of a setting: as fast as the devices' memory lets it be, and within the published peak.

    The second is left out where the first stays within the published peak. For the baseline there is first
    one that keeps everything.

    Args:
        setting: The setting.
        time_limit: Seconds for each plan.
    """
    size = _BATCH // setting.micro_batches
    layers, filters = setting.layers, setting.filters
    simulation = Simulation.of(lambda: amoebanet_d(batch=size, layers=layers, filters=filters))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AmoebaNet(layers, filters, 1000).parameters())
    planner = _Planner(setting, simulation, parameters, time_limit)
    rows: list[Row] = []
    if setting.micro_batches == 1:
        rows.append(planner.row("everything is kept", [1 << 40]))
    rows.append(planner.row(f"{MACHINE.capacity_bytes >> 30} GiB on each device", planner.whole))
    if rows[-1].fits and rows[-1].activation_bytes > setting.published_bytes:
        rows.append(planner.within_published(rows[-1]))
    return rows


@dataclass
class _Planner:
    """Plans of one setting; the last one's model bytes on each device are known."""

    setting: Setting
    simulation: Simulation
    parameters: int
    time_limit: float

    def __post_init__(self) -> None:
        self.whole = [MACHINE.capacity_bytes] * self.setting.devices
        self.last_model: list[int] = []

    def row(self, asked: str, budgets: list[int]) -> Row:
        started = time.monotonic()
        try:
            plan = self.simulation.planned(
                budgets,
                self.setting.micro_batches,
                optimizer_steps=self.simulation.rmsprop(),
                time_limit=self.time_limit,
            )
        except BudgetError as error:
            took = time.monotonic() - started
            peaks = [error.minimum_bytes]
            capture = self.simulation.capture_seconds
            return Row(asked, self.parameters, budgets, peaks, False, 0.0, 0.0, 0.0, capture, took)
        self.last_model = model_bytes(plan)
        return Row(
            asked,
            self.parameters,
            list(plan.devices.budget_bytes),
            list(plan.peak_bytes),
            True,
            plan.step_seconds,
            plan.bound_seconds,
            again_seconds(plan) / plan.single_seconds,
            self.simulation.capture_seconds,
            time.monotonic() - started,
        )

    def within_published(self, fast: Row) -> Row:
        """A plan whose budgets sum up to the published peak, in proportion to what a fast one holds."""
        asked = "the published peak, shared out"
        allowed = self.setting.published_bytes
        share = allowed / fast.activation_bytes
        pairs = zip(fast.peak_bytes, self.last_model, strict=True)
        row = self.row(asked, [model + int((peak - model) * share) for peak, model in pairs])
        if row.fits:
            return row
        devices = self.setting.devices
        return self.row("the published peak, alike", [(fast.model_bytes + allowed) // devices] * devices)


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 where a plan is over the published peak, 2 for a wrong command.

    Args:
        argv: The arguments; those of the process if None.
    """
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "amoebanet_plans",
        "Plans AmoebaNet-D (L, D) beside the published peaks of torchgpipe and GPipe.",
        time_limit=_TIME_LIMIT,
        journal=None,
        markdown=None,
    )
    names = [setting.name for setting in settings()]
    parser.add_argument("--settings", metavar="A,B", help=f"some of {', '.join(names)}")
    return parser


def _run(options: argparse.Namespace) -> int:
    known = {setting.name: setting for setting in settings()}
    names = chosen(options.settings, known, "setting of AmoebaNet-D", "IRC489")
    limit: float = options.time_limit
    found = run_tasks(
        options,
        "irc-amoebanet-plans-1",
        {"machine": MACHINE.to_json(), "time_limit": limit},
        Row,
        lambda _: ((name, partial(rows_of, known[name], limit)) for name in names),
        lambda found: _page([(known[name], found[name]) for name in names if name in found], limit),
    )
    last = [(known[name], found[name][-1]) for name in names]
    return int(any(not r.fits or r.activation_bytes > s.published_bytes for s, r in last))


_HEADER = [
    "setting",
    "(L, D)",
    "devices",
    "parameters",
    "model, GiB",
    "torchgpipe's peak, GiB",
    "GPipe's peak, GB",
    "budgets",
    "peak, GiB",
    "largest device, GiB",
    "step, s",
    "bound, s",
    "computed again",
    "capture, s",
    "planning, s",
]


def _cells(setting: Setting, row: Row) -> list[str]:
    theirs = "out of memory" if setting.torchgpipe_bytes is None else f"{setting.torchgpipe_bytes / _GIB:.2f}"
    planned = (
        [
            f"{row.activation_bytes / _GIB:.2f}",
            f"{max(row.peak_bytes) / _GIB:.2f}",
            f"{row.step_seconds:.2f}",
            f"{row.bound_seconds:.2f}",
            f"{row.again:.1%}",
        ]
        if row.fits
        else [f"refused: a device needs {row.peak_bytes[0] / _GIB:.2f}", "-", "-", "-", "-"]
    )
    return [
        setting.name,
        f"({setting.layers}, {setting.filters})",
        str(setting.devices),
        f"{row.parameters:,}",
        f"{row.model_bytes / _GIB:.2f}",
        theirs,
        f"{setting.gpipe_bytes / _GB:.2f}",
        row.asked,
        *planned,
        f"{row.capture_seconds:.0f}",
        f"{row.planning_seconds:.0f}",
    ]


_PAGE = """# AmoebaNet-D, planned

```
{command}
```

AmoebaNet-D (L, D) of `benchmarks.models.amoebanet_d`, for a batch of {batch} images of 224 x 224, 1000
classes and RMSprop, as in torchgpipe's benchmark amoebanetd-memory. The baseline takes the batch in one
piece, the others take it in {batch} micro-batches of one image. **Peak** is what is published as peak
activation memory: the sum of the devices' peaks without the model, which is 12 bytes a parameter (parameter,
gradient, state of the optimizer). Theirs is what the allocator had reserved; ours is predicted from
the plan, with the batch,
buffers, workspaces and what is on its way.

Nothing was run: models are captured on tensors without data (torch {torch}), and **times are
estimates** from operations and bytes, for the described machine `{machine}` with links of 10 GB/s. Workspaces
are upper bounds. The schedule is 1F1B; torchgpipe's is GPipe's, with checkpoints. The bound holds for every
partition, whatever the memory. torchgpipe takes the mean where the cell has the largest of 3 x 3, which needs
no positions: ours is the larger network for memory. Each plan had {time_limit:g} s to look for better cuts;
stages are planned to the end. Seconds of capture and planning are wall clock on two cores with other work.

{table}

{remarks}"""


def _page(found: Sequence[tuple[Setting, Sequence[Row]]], time_limit: float) -> str:
    """The page, as Markdown."""
    command = "python -m benchmarks.amoebanet_plans"
    if time_limit != _TIME_LIMIT:
        command += f" --time-limit {time_limit:g}"
    return _PAGE.format(
        command=f"{command} --markdown docs/results/amoebanet_plans.md",
        batch=_BATCH,
        torch=torch.__version__,
        machine=MACHINE.name,
        time_limit=time_limit,
        table=to_markdown(_HEADER, [_cells(setting, row) for setting, rows in found for row in rows]),
        remarks="\n".join(_remarks(found)),
    )


def _remarks(found: Sequence[tuple[Setting, Sequence[Row]]]) -> Iterator[str]:
    for setting, rows in found:
        last = rows[-1]
        budgets = ", ".join(f"{budget / _GIB:.2f}" for budget in last.budget_bytes)
        peaks = ", ".join(f"{peak / _GIB:.2f}" for peak in last.peak_bytes)
        within = "within" if last.activation_bytes <= setting.published_bytes else "over"
        whose = "GPipe's" if setting.torchgpipe_bytes is None else "torchgpipe's"
        if last.fits:
            yield (
                f"- {setting.name}: {within} {whose} peak; devices take {peaks} GiB, of budgets of {budgets} "
                "GiB."
            )
        if setting.micro_batches == 1:
            most = rows[0].peak_bytes[0] / _GIB
            yield (
                f"  Keeping everything takes {most:.2f} GiB with the model, and a device has "
                f"{MACHINE.capacity_bytes / _GIB:.0f}: torchgpipe's benchmark ran out of memory."
            )


if __name__ == "__main__":
    sys.exit(main())
