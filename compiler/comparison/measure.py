"""Measures plans of a comparison: the peak of a step, and its time beside the original's."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch import bind_program, compile_program
from ...frontends.torch import Captured
from ...ir import UsageError, first_line
from ...passes import Program
from ..training import compare, measured_peak_bytes
from .cells import Measured

__all__ = ["Measurer"]

_STEPS = 6
"""The steps of which the median counts; one more before them warms up."""


class Measurer:
    """Runs plans of one captured call.

    Args:
        model: The original; a copy of it runs.
        captured: Its captured call.
        args: The arguments of the call.
        kwargs: Its keyword arguments.
        loss: The loss of its result.

    Raises:
        UsageError: IRC403 for a model without data, or one that cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        loss: Callable[[Any], Tensor],
    ) -> None:
        tensors = (*model.parameters(), *model.buffers())
        if any(type(tensor.data) is not Tensor or tensor.is_meta for tensor in tensors):
            raise UsageError(
                "IRC403", "a model without data cannot be measured", help="leave out measure (--measure)"
            )
        try:
            self._original, self._copy = copy.deepcopy(model), copy.deepcopy(model)
            self._args, self._kwargs = copy.deepcopy((tuple(args), dict(kwargs or {})))
        except Exception as error:
            raise UsageError(
                "IRC403",
                f"the model or its arguments cannot be copied to be measured: {first_line(error)}",
                help="leave out measure (--measure)",
            ) from error
        self._captured, self._start = captured, copy.deepcopy(model.state_dict())
        self._loss = loss

    def measure(self, program: Program) -> Measured:
        """Trains some steps by a plan beside the original.

        The generators' states are as before.
        """
        plan, schedule = program.plan, program.schedule
        assert plan is not None and schedule is not None
        for module in (self._original, self._copy):
            module.load_state_dict(self._start)
        compiled = compile_program(schedule, self._captured.constants)
        fitted = bind_program(self._copy, compiled, self._captured.signature, plan)
        with torch.random.fork_rng():
            steps = compare(
                self._original, fitted, self._args, _STEPS + 1, keywords=self._kwargs, loss=self._loss
            )
            peak_bytes = measured_peak_bytes(
                fitted, self._args, plan.static_bytes, keywords=self._kwargs, loss=self._loss
            )
        pairs = zip(steps.fitted[1:], steps.original[1:], strict=True)
        ratios = [ours.seconds / theirs.seconds for ours, theirs in pairs]
        return Measured(peak_bytes, statistics.median(ratios) - 1)
