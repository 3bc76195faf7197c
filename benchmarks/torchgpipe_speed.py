"""Simulates the pipelines of torchgpipe's tables of speed, ResNet-101 and U-Net, beside what it measured."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from irc.compiler.pipeline.request import CHECKPOINT_MODES
from irc.ir import BudgetError
from irc.passes.pipeline import PlannedPipeline

from .command import chosen, parser_of, run_command, run_tasks
from .models.images import resnet101
from .models.registry import Example
from .models.stacked_unet import stacked_unet
from .pages import to_markdown
from .torchgpipe.programs import MACHINE, Simulation, again_seconds

__all__ = ["NETWORKS", "Experiment", "Row", "experiments", "main", "row_of"]

_TIME_LIMIT = 20.0
_SCHEDULES = ("gpipe", "1f1b", "zb-h1")
"""With one stage for each device; which of them is fastest depends on links and memory."""

NETWORKS: Mapping[str, Callable[[int], Example]] = {
    "resnet101": lambda batch: resnet101(batch=batch),
    "unet": lambda batch: stacked_unet(batch=batch),
}
"""Each makes the network with a micro-batch of some size."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A row of a published table.

    Args:
        network: One of `NETWORKS`.
        name: As torchgpipe calls it.
        batch: Of a step.
        micro_batches: In how many parts it goes through.
        samples_per_second: What was measured.
    """

    network: str
    name: str
    batch: int
    micro_batches: int
    samples_per_second: float

    @property
    def key(self) -> str:
        """Names the row."""
        return f"{self.network} {self.name}"

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return 1 if self.name == "baseline" else int(self.name.removeprefix("pipeline-"))

    @property
    def size(self) -> int:
        """Samples in a micro-batch."""
        return round(self.batch / self.micro_batches)


def experiments() -> tuple[Experiment, ...]:
    """The published tables, each with its baseline first."""
    with open(Path(__file__).parent / "torchgpipe" / "speed.csv", newline="") as file:
        return tuple(
            Experiment(
                row["network"],
                row["experiment"],
                int(row["batch"]),
                int(row["micro_batches"]),
                float(row["samples_per_second"]),
            )
            for row in csv.DictReader(file)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What is predicted of an experiment; the baseline has no pipeline, and is the same in all columns.

    Args:
        theirs: Samples a second under GPipe, with checkpoints of all micro-batches but the last.
        ours: Samples a second of the fastest plan within the memory, computing again what that asks for.
        bound: No plan has more samples a second, whatever its cuts.
        schedule: The plan's.
        their_bytes: The largest peak of a device under GPipe.
        our_bytes: That of the plan.
        our_again: What is computed again there, as a part of the time of a step's operations.
    """

    theirs: float
    ours: float
    bound: float
    schedule: str
    their_bytes: int
    our_bytes: int
    our_again: float


def row_of(experiment: Experiment, make: Callable[[int], Example], time_limit: float) -> Row:
    """Plans an experiment, as torchgpipe runs it and as irc would.

    Args:
        experiment: Whose batches and devices count.
        make: Makes its network with a micro-batch of some size.
        time_limit: Seconds for each plan.

    Raises:
        BudgetError: IRC486 where no pipeline fits on the devices.
    """
    simulation = Simulation.of(partial(make, experiment.size))
    count = experiment.micro_batches
    samples = experiment.size * count
    if experiment.name == "baseline":
        program = simulation.program
        assert program.costs is not None
        speed = samples / program.costs.step_seconds(program.graph)
        return Row(speed, speed, speed, "", 0, 0, 0.0)
    free = [1 << 50] * experiment.devices
    mode = CHECKPOINT_MODES["except_last"]
    theirs = simulation.planned(free, count, schedule="gpipe", checkpoint=mode, time_limit=time_limit)
    plans = _plans(simulation, experiment, time_limit)
    schedule, ours = min(plans.items(), key=lambda pair: pair[1].step_seconds)
    return Row(
        samples / theirs.step_seconds,
        samples / ours.step_seconds,
        samples / min(plan.bound_seconds for plan in plans.values()),
        schedule,
        max(theirs.peak_bytes),
        max(ours.peak_bytes),
        again_seconds(ours) / ours.single_seconds,
    )


def _plans(simulation: Simulation, experiment: Experiment, time_limit: float) -> dict[str, PlannedPipeline]:
    """The plan under each schedule within whose order the model fits on the devices.

    Raises:
        BudgetError: IRC486 where there is none.
    """
    capacity = [MACHINE.capacity_bytes] * experiment.devices
    found: dict[str, PlannedPipeline] = {}
    refusal: BudgetError | None = None
    for name in _SCHEDULES if experiment.devices > 1 else ("1f1b",):
        try:
            found[name] = simulation.planned(
                capacity, experiment.micro_batches, schedule=name, time_limit=time_limit
            )
        except BudgetError as error:
            refusal = error
    if not found:
        assert refusal is not None
        raise refusal
    return found


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 2 for a wrong command.

    Args:
        argv: The arguments; those of the process if None.
    """
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "torchgpipe_speed",
        "Simulates torchgpipe's benchmarks of speed beside what was measured.",
        time_limit=_TIME_LIMIT,
        journal=None,
        markdown=None,
    )
    parser.add_argument("--networks", metavar="A,B", help=f"some of {', '.join(NETWORKS)}")
    return parser


def _run(options: argparse.Namespace) -> int:
    names = chosen(options.networks, NETWORKS, "network of torchgpipe's tables of speed", "IRC489")
    limit: float = options.time_limit
    run_tasks(
        options,
        "irc-torchgpipe-speed-2",
        {"machine": MACHINE.to_json(), "time_limit": limit},
        Row,
        lambda _: (
            (each.key, partial(_rows, each, limit)) for each in experiments() if each.network in names
        ),
        lambda found: _page(found, limit),
    )
    return 0


def _rows(experiment: Experiment, time_limit: float) -> list[Row]:
    return [row_of(experiment, NETWORKS[experiment.network], time_limit)]


_HEADER = [
    "experiment",
    "devices",
    "batch",
    "micro-batches",
    "measured, 1/s",
    "measured",
    "GPipe, simulated",
    "planned",
    "bound",
    "schedule",
    "computed again",
    "GPipe, largest device, GiB",
    "planned, largest device, GiB",
]


def _cells(experiment: Experiment, row: Row, first: Experiment, baseline: Row) -> list[str]:
    def times(speed: float) -> str:
        return f"{speed / baseline.theirs:.3f}"

    is_pipeline = experiment is not first
    return [
        experiment.name,
        str(experiment.devices),
        str(experiment.batch),
        str(experiment.micro_batches),
        f"{experiment.samples_per_second:.3f}",
        f"{experiment.samples_per_second / first.samples_per_second:.3f}",
        times(row.theirs),
        times(row.ours),
        times(row.bound),
        row.schedule,
        f"{row.our_again:.1%}" if is_pipeline else "",
        f"{row.their_bytes / 2**30:.1f}" if is_pipeline else "",
        f"{row.our_bytes / 2**30:.1f}" if is_pipeline else "",
    ]


_PAGE = """# torchgpipe's speed-ups, simulated

```
{command}
```

torchgpipe 0.0.5 measured how many samples a second eight Tesla P40 train, with batches and numbers of
micro-batches that were tuned for each row (its benchmarks resnet101-speed and unet-speed, U-Net (5, 64)).
Here the same networks, in irc's own definitions, are captured at these micro-batches (torch {torch}), cut
by irc and simulated. All columns from **measured** on are speed-ups over the baseline, one device that
computes nothing twice: the measured ones over the measured baseline, the others over the predicted one.

- *GPipe, simulated*: GPipe's order; each stage keeps what it receives, and computes all of itself again for
  each micro-batch but the last, which is torchgpipe's default. Memory has no limit here.
- *planned*: irc's fastest plan under {schedules} within {capacity} GiB on each device, the batch included;
  SGD keeps no state. No partition is faster than the *bound* under any of them.

Costs are estimates from operations and bytes, for the described machine `{machine}` with links of 10 GB/s.
Each plan had {time_limit:g} s to look for better cuts. The optimizer's step is in no predicted time.

{tables}

**Where they are off.** {remarks}"""

_REMARKS = """The cuts are irc's, between any two operations; torchgpipe's were found by hand and by its
balancer, in a list of layers. So on eight devices the simulation is faster than what was measured: by 21% for
ResNet-101 and by 39% for U-Net, the most of all rows. An estimate knows no kernel, real GPUs use small
micro-batches less well, theirs share PCIe where here each link is alone, and one Python process drives all of
them. U-Net's skips are relayed from stage to stage, where torchgpipe copies a skip straight to where it is
read: they keep U-Net's plans far below the bound, which knows no links, and make GPipe, which has most
micro-batches on their way, the fastest schedule on eight devices. The planned rows are faster than GPipe's as
they compute little or nothing twice: they say what the memory allows, and were not run."""


def _page(rows: Mapping[str, Sequence[Row]], time_limit: float) -> str:
    """The page, as Markdown."""
    tables: list[str] = []
    for network in NETWORKS:
        found = [
            (each, rows[each.key][0])
            for each in experiments()
            if each.network == network and each.key in rows
        ]
        if found:
            first, baseline = found[0]
            cells = [_cells(experiment, row, first, baseline) for experiment, row in found]
            tables.append(f"## {network}\n\n{to_markdown(_HEADER, cells)}")
    command = "python -m benchmarks.torchgpipe_speed"
    if time_limit != _TIME_LIMIT:
        command += f" --time-limit {time_limit:g}"
    return _PAGE.format(
        command=f"{command} --markdown docs/results/torchgpipe_speed.md",
        torch=torch.__version__,
        schedules=", ".join(_SCHEDULES),
        capacity=MACHINE.capacity_bytes >> 30,
        machine=MACHINE.name,
        time_limit=time_limit,
        tables="\n\n".join(tables),
        remarks=_REMARKS,
    )


if __name__ == "__main__":
    sys.exit(main())
