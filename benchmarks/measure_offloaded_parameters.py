"""Measures training with parameters and optimizer state on a disk: memory, time, the weights that come out.

    python -m benchmarks.measure_offloaded_parameters --models gpt2,vgg16 --budgets 70%,min --scratch /scratch

For each model and budget two plans are measured, each in a process of its own: one that has parameters and
the state of AdamW on the device, and one that may have them on the disk. Both take the optimizer's steps
within backward. Beside them the original trains by the ordinary loop, with one AdamW for all parameters;
after the same number of steps all weights are compared. Memory is measured as by `measure_swap`. Exit status
1: a peak of the allocator is over the predicted one, or weights differ.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from irc.compiler.model_source import training_loss
from irc.compiler.optimize import optimize
from irc.compiler.training import measured_peak_bytes
from irc.ir import BudgetError, format_bytes

from .harness import load_named
from .offload_rows import OffloadRow, measure_offloading, offload_parser, plan_fields, resident_bytes

__all__ = ["HEADER", "ParametersRow", "main", "measure_row"]

HEADER = (
    "model",
    "budget",
    "state on",
    "parameters and state",
    "predicted peak",
    "measured peak",
    "resident",
    "on the disk",
    "copied out, back",
    "overhead (bound)",
    "measured time",
    "weights",
)


_REMARK = (
    "Peaks are of one step, with what is on the device between steps; percentages are of the predicted "
    "peak of a step with everything on the device and an optimizer in backward."
)


@dataclass(frozen=True)
class ParametersRow(OffloadRow):
    """One plan that has parameters and optimizer state on the `device`, or may have them on the `disk`.

    Args:
        trained_bytes: Parameters, and the state of their optimizers.
        offloaded_bytes: What lives on the disk between steps.
    """

    trained_bytes: int = 0
    offloaded_bytes: int = 0

    def cells(self) -> tuple[str, ...]:
        """The row for a table."""
        if self.failure:
            return (self.model, self.budget, self.plan, "", self.failure, *[""] * (len(HEADER) - 5))
        offloaded = format_bytes(self.offloaded_bytes) if self.offloaded_bytes else ""
        about = (self.model, self.budget, self.plan, format_bytes(self.trained_bytes), *self.peaks())
        return (*about, offloaded, self.copies(), *self.times(), "equal" if self.is_equal else "DIFFER")


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def measure_row(
    model: str, budget: str, plan: str, scratch: str, *, time_limit: float, repeats: int, costs: str
) -> ParametersRow:
    """Plans, trains and measures, in this process.

    Args:
        model: A benchmark model, or what `irc optimize` calls MODEL.
        budget: As of `irc.optimize`, or `min`: the smallest that a schedule was found for.
        plan: `device` or `disk`.
        scratch: The folder of the scratch file.
        time_limit: Seconds for the search.
        repeats: Steps that are timed, after two that are not.
        costs: As of `irc.optimize`.

    Raises:
        IrcError: What loading and planning raise.
    """
    loaded = load_named(model)
    original, args = loaded.module, loaded.args
    ordinary = _adamw([p for p in original.parameters() if p.requires_grad])
    swap = [f"disk:{scratch}", "params,optimizer"] if plan == "disk" else None

    def fitted(nbytes: int | str) -> Any:
        return optimize(
            copy.deepcopy(original),
            args,
            nbytes,
            swap=swap,
            optimizer_in_backward=_adamw,
            loss=training_loss,
            time_limit=time_limit,
            costs=costs,
        )

    try:
        module = fitted(1 if budget == "min" else budget)
    except BudgetError as error:
        if budget != "min":
            return ParametersRow(model, budget, plan, f"needs {format_bytes(error.minimum_bytes)}")
        module = fitted(error.minimum_bytes)
    ratios, is_equal = _trained(original, ordinary, module, args, repeats)
    found = module.plan
    trained = [p for p in original.parameters() if p.requires_grad]
    return ParametersRow(
        model,
        budget,
        plan,
        trained_bytes=sum(p.nbytes for p in original.parameters()) + _state_bytes(ordinary, trained),
        **plan_fields(found),
        measured_bytes=measured_peak_bytes(module, args, found.static_bytes, loss=training_loss),
        resident_bytes=resident_bytes(module, args, found.static_bytes),
        offloaded_bytes=found.offloaded_bytes,
        wall_ratio=statistics.median(ratios),
        wall_low=min(ratios),
        wall_high=max(ratios),
        is_equal=is_equal,
    )


def _state_bytes(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    held = (tensor for p in parameters for tensor in optimizer.state[p].values())
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))


_WARM = 2


def _trained(
    original: nn.Module, ordinary: Optimizer, module: nn.Module, args: Sequence[Any], repeats: int
) -> tuple[list[float], bool]:
    """Ratios of the times of steps in turns, and whether losses and weights stayed equal."""
    ratios: list[float] = []
    is_equal = True
    for turn in range(_WARM + repeats):
        seconds: list[float] = []
        losses: list[torch.Tensor] = []
        for trained, optimizer in ((original, ordinary), (module, None)):
            torch.manual_seed(turn)
            started = time.perf_counter()
            loss = training_loss(trained(*args))
            loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - started)
            losses.append(loss.detach())
        is_equal &= torch.equal(*losses)
        if turn >= _WARM:
            ratios.append(seconds[1] / seconds[0])
    pairs = zip(original.state_dict().values(), module.state_dict().values(), strict=True)
    return ratios, is_equal and all(torch.equal(mine, its) for mine, its in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""

    def measure(model: str, budget: str, plan: str, options: argparse.Namespace) -> ParametersRow:
        return measure_row(
            model,
            budget,
            plan,
            options.scratch,
            time_limit=options.time_limit,
            repeats=options.repeats,
            costs=options.costs,
        )

    parser = offload_parser(
        "measure_offloaded_parameters",
        "Measures training with parameters and optimizer state on a disk.",
        "gpt2",
        "70%,40%,min",
    )
    return measure_offloading(parser, ("device", "disk"), ParametersRow, HEADER, measure, _REMARK, argv)


if __name__ == "__main__":
    raise SystemExit(main())
