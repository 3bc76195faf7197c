"""The page: what was run and how it is known, the grid beside its predictions, and plans of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...ir import format_bytes
from ..tables import to_markdown
from .own_plan import OwnPlan, RankRun
from .workspace import TERMS, DeviceRow, errors, fitted, held_out

__all__ = ["Page"]

_MIB = 2**20
_COMMAND = "python -m irc.tools.gpt2_grid --markdown docs/gpt2_grid.md"


@dataclass(frozen=True)
class Page:
    """The page of a grid.

    Args:
        devices: Each device of each published row with its replay.
        plans: Our own plans.
        run: One of them on ranks of this machine.
    """

    devices: tuple[DeviceRow, ...]
    plans: tuple[OwnPlan, ...] = ()
    run: RankRun | None = None
    _terms: list[tuple[float, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_terms", [each.terms() for each in self.devices])

    @cached_property
    def published(self) -> list[float]:
        """Bytes of each device."""
        return [each.published_bytes for each in self.devices]

    @cached_property
    def predictions(self) -> dict[str, list[float]]:
        """Bytes of each device by several models, the simplest one first."""
        found = {
            "tensors": [float(each.held.alive_bytes) for each in self.devices],
            "with the allocator": [float(each.held.reserved_bytes) for each in self.devices],
        }
        counts = [each.row.run.micro_batches for each in self.devices]
        devices = [each.row.devices for each in self.devices]
        found["fitted to all"] = [float(np.dot(terms, self.coefficients)) for terms in self._terms]
        if len(set(counts)) > 1:
            found["fitted to other M"] = held_out(self._terms, self.published, counts)
        if len(set(devices)) > 1:
            found["fitted to other K"] = held_out(self._terms, self.published, devices)
        return found

    @cached_property
    def coefficients(self) -> list[float]:
        """Of all rows."""
        return fitted(self._terms, self.published)

    def summary(self) -> str:
        """How far each model is off."""
        header = ["prediction", "mean", "median", "worst", "where"]
        return to_markdown(header, [self._summed(name) for name in self.predictions])

    def _summed(self, name: str) -> list[str]:
        off = errors(self.predictions[name], self.published)
        worst = max(range(len(off)), key=lambda k: abs(off[k]))
        each = self.devices[worst]
        return [
            name,
            f"{float(np.mean(np.abs(off))):.2%}",
            f"{float(np.median(np.abs(off))):.2%}",
            f"{off[worst]:+.1%}",
            f"K = {each.row.devices}, M = {each.row.run.micro_batches}, {_mode(each)}, device {each.device}",
        ]

    def of_plans(self) -> str:
        """The table of our own plans."""
        header = ["schedule", "divided", "budget of each", "peaks, MiB", "largest", "step", "computed again"]
        return to_markdown(header, [_plan_cells(own) for own in self.plans])

    def text(self) -> str:
        """The page, as Markdown."""
        parts = [_INTRODUCTION, self.summary(), _MODELS, self._of_coefficients(), _GRID, self._grid()]
        if self.plans:
            parts += [_PLANS, self.of_plans()]
        if self.run is not None:
            parts += [_RUN, _of_run(self.run)]
        return "\n\n".join(part.strip() for part in parts) + "\n"

    def _of_coefficients(self) -> str:
        cells = [
            [name, f"{value / _MIB:.1f} MiB" if name == "a device" else f"{value:.3f}"]
            for name, value in zip(TERMS, self.coefficients, strict=True)
        ]
        return to_markdown(["term", "coefficient"], cells)

    def _grid(self) -> str:
        names = [name for name in self.predictions if name != "fitted to all"]
        header = [
            "K",
            "M",
            "checkpoint",
            "by",
            "published, MiB",
            *(f"{name}, MiB" for name in names),
            "off by",
        ]
        rows: list[list[str]] = []
        place = 0
        while place < len(self.devices):
            row = self.devices[place].row
            mine = range(place, place + row.devices)
            place += row.devices
            off = errors([self.predictions[names[-1]][k] for k in mine], [self.published[k] for k in mine])
            rows.append(
                [
                    str(row.devices),
                    str(row.run.micro_batches),
                    "on" if row.run.checkpoints else "off",
                    row.run.implementation,
                    _mebibytes([self.published[k] for k in mine]),
                    *(_mebibytes([self.predictions[name][k] for k in mine]) for name in names),
                    ", ".join(f"{value:+.1%}" for value in off),
                ]
            )
        return to_markdown(header, rows)


def _mode(each: DeviceRow) -> str:
    return f"{each.row.run.implementation}, checkpoint {'on' if each.row.run.checkpoints else 'off'}"


def _mebibytes(values: Sequence[float]) -> str:
    return ", ".join(f"{value / _MIB:.0f}" for value in values)


def _plan_cells(own: OwnPlan) -> list[str]:
    budget = "-" if own.budget_bytes is None else format_bytes(own.budget_bytes)
    if own.planned is None:
        least = f"none; one was found for {format_bytes(own.minimum_bytes)}"
        return [own.schedule, own.partition, budget, least, "-", "-", "-"]
    planned = own.planned
    again = sum(_again_seconds(own))
    return [
        own.schedule,
        own.partition,
        budget,
        _mebibytes(planned.peak_bytes),
        f"{max(planned.peak_bytes) / _MIB:.0f}",
        f"{planned.timeline.step_seconds:.2f} s",
        f"{again * planned.schedule.micro_batches / planned.single_seconds:.1%}",
    ]


def _again_seconds(own: OwnPlan) -> list[float]:
    """Seconds that each stage computes again for a micro-batch."""
    assert own.planned is not None
    found: list[float] = []
    for stage in own.planned.stages:
        costs = stage.program.costs
        assert costs is not None
        once = sum(costs.seconds[node] for node in stage.schedule.graph.operations)
        found.append(sum(costs.seconds[node] for node in stage.schedule.computed) - once)
    return found


def _of_run(run: RankRun) -> str:
    rows = [
        [str(rank), f"{predicted / _MIB:.2f}", f"{measured / _MIB:.2f}", f"{predicted / measured - 1:+.2%}"]
        for rank, (predicted, measured) in enumerate(
            zip(run.predicted_bytes, run.measured_bytes, strict=True)
        )
    ]
    table = to_markdown(["rank", "predicted, MiB", "measured, MiB", "off by"], rows)
    losses = ", ".join(f"{loss:.4f}" for loss in run.losses)
    return f"{table}\n\nSchedule `{run.schedule}`, {len(run.losses)} steps, losses {losses}."


_INTRODUCTION = f"""
# A published grid of GPT-2 on 1, 2 and 4 devices

```
{_COMMAND}
```

`tools/gpt2_grid/published.csv` has 84 rows: a GPT-2 of 89,762,304 parameters, batches of 64, K = 1, 2, 4 devices,
M = 1 to 64 micro-batches, checkpointing on and off, by `torchgpipe` and by `self`, the authors' own GPipe. This page
sets what each of the 196 devices had reserved beside what irc predicts.

## What was run

**Established**, from the benchmark that the rows come from (github.com/HalberdOfPineapple/pipeline_parallel_expr, its
logs of January 2024 have the same figures):

- 12 blocks of width 768 with 12 heads, 3,000 tokens, 128 positions, embedding and head not tied, the head without bias:
  12 x 7,087,872 + 3,000 x 768 + 128 x 768 + 1,536 + 3,000 x 768 = 89,762,304. Blocks have their LayerNorms after the sums,
  and dropout of 0.1. `tools/gpt2_grid/model.py` is our own definition; a test counts it.
- The model is a list of 16 modules, divided 16, 8 8, and 5 3 3 5.
- `nn.MultiheadAttention` gets [batch, positions, width] and takes the first dimension for positions: attention is
  between the samples of a micro-batch. So scores shrink as micro-batches do, and M = 1 takes most.
- SGD with momentum 0.9 and weight decay: 12 bytes a parameter. Ten steps. The loss is that of the whole batch, on the
  last device; `zero_grad` comes after forward.
- Figures are what torch's caching allocator had reserved (multiples of 2 MiB), at the end of the run.
- `torchgpipe` checkpoints by `except_last`: at M = 1 its rows with and without are the same. `self` checkpoints all.
- Each micro-batch's copies have a stream of their own, and so a pool of memory of their own.

**Inferred**, from the figures: that of the versions of `self` it is the one that checkpoints all micro-batches (its rows
with one device differ with checkpointing, also at M = 1). The GPUs are not named; workspaces of cuBLAS are taken as two
of 8.1 MiB, torch's default before H100.

## How far predictions are off
"""

_MODELS = """
Errors are of single devices, as parts of what was published; no row is left out.

- **Tensors**: the micro-batch is captured and cut by irc (`captured_micro_batch`, `stage_graphs.cut`), and each stage is
  replayed as these runs go (`tools/gpt2_grid/replay.py`): GPipe's order, what autograd keeps, forward without autograd
  and again, receives, the loss of the whole batch with the scores of the step before, momentum, and what `self` keeps
  beyond a backward. The most that is alive. Nothing is fitted.
- **With the allocator**: the same takes and gives through the rules of torch's CUDA allocator
  (`tools/gpt2_grid/allocator.py`). What is reserved after ten steps. Nothing is fitted.
- **Fitted**: least squares of the relative errors on five terms. To all rows; to the rows of all other M, for the rows of one M; and
  to those of all other K. The last two are the errors on rows that were not fitted.

Where stages keep all, or the order of backward is forced, the allocator's rules explain nearly everything. The last two
terms are for what they do not: with one device and checkpointing, about a third of what all other micro-batches save is there
beside the one that runs. Tokens are whole numbers, through which no gradient goes, so the edges by which torchgpipe orders micro-batches are
lost in the first stage: run on a CPU, torchgpipe 0.0.7 with one device computes all of them again before the first
backward. Why it is a third and not all on these GPUs, is not established; nor why `self`, which drops the result of its `fork`, reserves
up to three micro-batches more where they are large. No other K shows the effect of one device, so rows of K = 1 cannot be
predicted from the others.
"""

_GRID = """
## The grid

Off by: of the last prediction in the row.
"""

_PLANS = """
## Plans of our own for K = 4, M = 32

The published rows with checkpointing hold up to 986 MiB (`torchgpipe`) and 970981376 bytes = 926 MiB (`self`) on a
device. Ours count 12 bytes a parameter, and the loss of each micro-batch in its own backward. Seconds are estimates for a CPU from
operations and bytes (`profile=False`), good for comparing; the published runs were on GPUs.
"""

_RUN = """
## On four ranks of this machine

The plan of the last schedule within the budget, as `irc run` trains it: gloo, CPU, without momentum, which is taken off
the prediction too. Peaks are from allocator events of a step, with what is there between steps.
"""
