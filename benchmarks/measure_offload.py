"""Measures plans that copy to a disk: activations, parameters and optimizer state; memory, time, and weights.

    python -m benchmarks.measure_offload --models resnet50,gpt2 --budgets 60%,min --scratch /scratch
    python -m benchmarks.measure_offload --plans device,disk --models gpt2 --budgets 70%,40%

The plans are `recompute`, which copies nothing, and `swap`, which may copy activations; then `device` and
`disk`, which take the optimizer's steps within backward, with parameters and the optimizer's state on the
device, or where it is best. The original trains beside them by the ordinary loop with AdamW; after the same
number of steps all weights are compared. Each row is measured in a process of its own, which gives freed
memory back to the system at once (see `mallopt(3)`): the allocator's peak is that of its events, the system's
is how far the resident set rises within a step. Exit status 1: a peak of the allocator is over the predicted
one, or weights differ.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from irc.compiler.model_source import training_loss
from irc.compiler.optimize import optimize
from irc.compiler.training import measured_peak_bytes
from irc.ir import BudgetError, format_bytes

from .command import chosen, parser_of, run_command, run_row_alone, run_rows, write_json, write_page
from .harness import Settings, load_named, step_of
from .pages import to_markdown

__all__ = ["HEADER", "PLANS", "Row", "main", "measure_row"]

PLANS = ("recompute", "swap", "device", "disk")
_WARM = 2
"""Steps that are not timed."""

HEADER = (
    "model",
    "budget",
    "plan",
    "parameters and state",
    "predicted peak",
    "measured peak",
    "resident",
    "on the disk",
    "copied out, back",
    "waited (predicted)",
    "overhead (bound)",
    "measured time",
    "weights",
)


@dataclass(frozen=True)
class Row:
    """The memory, the copies and the time of one plan.

    Args:
        model: The model's name.
        budget: As it was asked for.
        plan: One of `PLANS`.
        failure: Why there is no plan, or "".
        budget_bytes: The budget.
        baseline_bytes: Predicted peak of the original.
        predicted_bytes: Predicted peak.
        measured_bytes: The allocator's peak.
        resident_bytes: How far the resident set rises in a step, with what is on the device before it; 0 if
            the system does not tell.
        trained_bytes: Parameters, and the state of their optimizers.
        offloaded_bytes: What lives on the disk between steps.
        out_bytes: Copied out in a step.
        in_bytes: Copied back.
        wait_seconds: How long a step waits for copies, the mean over the timed steps.
        predicted_wait_seconds: The same, predicted.
        overhead: Predicted.
        bound: Proved.
        wall_ratio: Median of measured time over the original's.
        wall_low: Smallest.
        wall_high: Largest.
        is_equal: Whether all losses and weights are the original's, bit for bit.
    """

    model: str
    budget: str
    plan: str
    failure: str = ""
    budget_bytes: int = 0
    baseline_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    resident_bytes: int = 0
    trained_bytes: int = 0
    offloaded_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    wait_seconds: float = 0.0
    predicted_wait_seconds: float = 0.0
    overhead: float = 0.0
    bound: float = 0.0
    wall_ratio: float = 0.0
    wall_low: float = 0.0
    wall_high: float = 0.0
    is_equal: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken; a budget that does not fit breaks none."""
        return not self.failure and (self.measured_bytes > self.predicted_bytes or not self.is_equal)

    def cells(self) -> tuple[str, ...]:
        """The row for a table."""
        about = (self.model, self.budget, self.plan)
        if self.failure:
            return (*about, "", self.failure, *[""] * (len(HEADER) - 5))
        copies = self.out_bytes or self.in_bytes
        return (
            *about,
            format_bytes(self.trained_bytes),
            self._part(self.predicted_bytes),
            self._part(self.measured_bytes),
            self._part(self.resident_bytes) if self.resident_bytes else "?",
            format_bytes(self.offloaded_bytes) if self.offloaded_bytes else "",
            f"{format_bytes(self.out_bytes)}, {format_bytes(self.in_bytes)}" if copies else "",
            f"{self.wait_seconds * 1e3:.3g} ms ({self.predicted_wait_seconds * 1e3:.3g})" if copies else "",
            f"{self.overhead:.2%} ({self.bound:.2%})",
            f"{self.wall_ratio:.3f} ({self.wall_low:.3f} to {self.wall_high:.3f})",
            "equal" if self.is_equal else "DIFFER",
        )

    def _part(self, nbytes: int) -> str:
        return f"{format_bytes(nbytes)} ({nbytes / self.baseline_bytes:.1%})"


def measure_row(model: str, budget: str, plan: str, scratch: str, settings: Settings) -> Row:
    """Plans, trains beside the ordinary loop and measures, in this process.

    Args:
        model: A benchmark model, or what `irc optimize` calls MODEL.
        budget: As of `irc.optimize`, or `min`.
        plan: One of `PLANS`.
        scratch: The folder of the scratch file.
        settings: How to search and measure.

    Raises:
        IrcError: What loading and planning raise.
    """
    loaded = load_named(model)
    original, args = loaded.module, loaded.args
    try:
        module = _fitted(original, args, budget, plan, scratch, settings)
    except BudgetError as error:
        return Row(model, budget, plan, f"needs {format_bytes(error.minimum_bytes)}")
    parameters = [p for p in original.parameters() if p.requires_grad]
    ordinary = _adamw(parameters)
    is_outside = plan in ("recompute", "swap")
    outside = _adamw([p for p in module.parameters() if p.requires_grad]) if is_outside else None
    waits: list[float] = []
    ratios: list[float] = []
    is_equal = True
    for turn in range(_WARM + settings.repeats):
        torch.manual_seed(settings.seed + turn)
        loss, seconds = _trained(original, args, ordinary)
        torch.manual_seed(settings.seed + turn)
        waited = _waited_seconds(module)
        its_loss, its_seconds = _trained(module, args, outside)
        is_equal &= torch.equal(loss, its_loss)
        if turn >= _WARM:
            ratios.append(its_seconds / seconds)
            waits.append(_waited_seconds(module) - waited)
    pairs = zip(original.state_dict().values(), module.state_dict().values(), strict=True)
    is_equal &= all(torch.equal(mine, its) for mine, its in pairs)  # what follows takes more steps
    state = (tensor for p in parameters for tensor in ordinary.state[p].values())
    found = module.plan
    return Row(
        model,
        budget,
        plan,
        budget_bytes=found.budget_bytes,
        baseline_bytes=found.baseline_peak_bytes,
        predicted_bytes=found.peak_bytes,
        measured_bytes=measured_peak_bytes(module, args, found.static_bytes, loss=training_loss),
        resident_bytes=_resident_bytes(module, args, found.static_bytes),
        trained_bytes=sum(t.nbytes for t in (*original.parameters(), *state)),
        offloaded_bytes=found.offloaded_bytes,
        out_bytes=sum(use.out_bytes for use in found.tiers),
        in_bytes=sum(use.in_bytes for use in found.tiers),
        wait_seconds=statistics.mean(waits),
        predicted_wait_seconds=found.exposed_seconds,
        overhead=found.overhead,
        bound=found.lower_bound_overhead,
        wall_ratio=statistics.median(ratios),
        wall_low=min(ratios),
        wall_high=max(ratios),
        is_equal=is_equal,
    )


def _fitted(
    original: nn.Module, args: Sequence[Any], budget: str, plan: str, scratch: str, settings: Settings
) -> Any:
    """A copy of the module, fitted.

    Raises:
        BudgetError: The budget is too small, and is not `min`.
    """
    swap = {"swap": [f"disk:{scratch}"], "disk": [f"disk:{scratch}", "params,optimizer"]}.get(plan)

    def fitted(nbytes: int | str) -> Any:
        return optimize(
            copy.deepcopy(original),
            tuple(args),
            nbytes,
            swap=swap,
            optimizer_in_backward=_adamw if plan in ("device", "disk") else None,
            loss=training_loss,
            time_limit=settings.time_limit,
            costs=settings.costs,
        )

    try:
        return fitted(1 if budget == "min" else budget)
    except BudgetError as error:
        if budget != "min":
            raise
        return fitted(error.minimum_bytes)


def _adamw(parameters: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _trained(
    module: nn.Module, args: Sequence[Any], optimizer: Optimizer | None
) -> tuple[torch.Tensor, float]:
    """The loss of a training step, and how long it took; without an optimizer backward takes its steps."""
    started = time.perf_counter()
    loss = training_loss(module(*args))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach(), time.perf_counter() - started


def _waited_seconds(module: Any) -> float:
    return sum(traffic.waited_seconds for traffic in getattr(module, "irc_traffic", {}).values())


def _resident_bytes(module: nn.Module, args: Sequence[Any], static_bytes: int) -> int:
    """The bytes before a step and how far the resident set rises in it; 0 if the system does not tell."""
    step = step_of(module, args)
    step()
    module.zero_grad(set_to_none=True)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
        before = _status("VmRSS")
        step()
        return _status("VmHWM") - before + static_bytes
    except (OSError, LookupError):
        return 0
    finally:
        module.zero_grad(set_to_none=True)


def _status(name: str) -> int:
    rows = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return int(rows[name].split()[0]) << 10


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    parser = parser_of(
        "measure_offload",
        "Measures plans that copy to a disk.",
        models="resnet50,gpt2",
        budgets="80%,60%,40%,min",
        scratch=tempfile.gettempdir(),
        time_limit=60.0,
        repeats=5,
        threads=1,
        seed=0,
        costs="thorough",
        json=None,
        markdown=None,
        row=None,
    )
    parser.add_argument(
        "--plans",
        default="recompute,swap",
        metavar="A,B",
        help=f"of {', '.join(PLANS)} (recompute,swap)",
    )
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    if options.row is not None:
        settings = Settings(options.time_limit, options.repeats, options.seed, options.costs)
        model, budget, plan = options.row
        print(json.dumps(asdict(measure_row(model, budget, plan, options.scratch, settings))))
        return 0
    plans = chosen(options.plans, PLANS, "plan")

    def rows() -> Iterator[Row]:
        for model in options.models.split(","):
            for budget in options.budgets.split(","):
                for plan in plans:
                    yield Row(**run_row_alone(options, "measure_offload", (model, budget, plan)))

    def page(found: Sequence[Row]) -> str:
        failed = sum(row.has_failed for row in found)
        return (
            f"{to_markdown(HEADER, [row.cells() for row in found])}\n\n"
            f"torch {torch.__version__}, {options.threads} threads, {options.time_limit:g} s for a search, "
            f"{options.repeats} steps in turns with the ordinary loop's after {_WARM} that are not timed, "
            "each row in a process of its own. Peaks are of one step, with what is on the device between "
            "steps; percentages are of the predicted peak of a step with everything on the device and "
            "nothing computed twice. Resident is how far the resident set rose. "
            f"{failed} of {len(found)} rows failed."
        )

    found, text, status = run_rows(rows(), page)
    write_page(options.markdown, text)
    write_json(options.json, found)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
