"""Measures plans and PyTorch's own methods: the peak of a step, and its time beside the original's."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch import bind_program, compile_program
from ...frontends.torch import Captured
from ...ir import Instruction, UsageError, first_line
from ...passes import Program
from ..training import check_measurable, compare, measured_peak_bytes
from .cells import Measured
from .torch_methods import Method, NotApplicableError, compiler, methods

__all__ = ["MOST_OVERHEAD", "Measurer"]

MOST_OVERHEAD = 4.0
"""Plans that are predicted to add more than so many steps' time are not run."""

_FAMILIES = ("sequential", "blocks", "selective", "budget")
_SETTINGS = (0.8, 0.5, 0.2)
"""The values of PyTorch's `activation_memory_budget`."""

_STEPS = 6
"""The steps of which the median counts; one more before them warms up."""


class Measurer:
    """Runs plans of one captured call, and PyTorch's own methods.

    Args:
        model: The original; copies of it run.
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
        check_measurable(model)
        try:
            self._pristine = copy.deepcopy(model)
            self._args, self._kwargs = copy.deepcopy((tuple(args), dict(kwargs or {})))
        except Exception as error:
            raise UsageError(
                "IRC403",
                f"the model or its arguments cannot be copied to be measured: {first_line(error)}",
                help="leave out measure (--measure)",
            ) from error
        self._captured, self._loss = captured, loss
        self._known: dict[tuple[Instruction, ...], Measured] = {}

    def measure(self, program: Program) -> Measured:
        """Trains some steps by a plan beside the original; the same schedule is measured once.

        The generators' states are as before.
        """
        plan, schedule = program.plan, program.schedule
        assert plan is not None and schedule is not None
        known = self._known.get(schedule.instructions)
        if known is not None:
            return known
        compiled = compile_program(schedule, self._captured.constants)
        fitted = bind_program(self._copied(), compiled, self._captured.signature, plan)
        self._known[schedule.instructions] = found = self._beside_original(fitted, plan.static_bytes)
        return found

    def methods(self) -> Iterator[tuple[str, Measured | str]]:
        """Trains some steps by each of PyTorch's own methods beside the original.

        Yields:
            Its name, and its measurements or a refusal.
        """
        with warnings.catch_warnings(), compiler():
            warnings.simplefilter("ignore")
            for method in methods(self._copied(), self._args, _FAMILIES, _SETTINGS, self._kwargs):
                yield method.name, self._measured_method(method)

    def _measured_method(self, method: Method) -> Measured | str:
        module = self._copied()
        try:
            method.apply(module)
            return self._beside_original(module, self._captured.graph.static_bytes)
        except NotApplicableError as error:
            return str(error)
        except Exception as error:  # the compiler's, or the model's under a method that it does not allow
            return first_line(error)

    def _copied(self) -> nn.Module:
        """A copy that nothing has run on."""
        return copy.deepcopy(self._pristine)

    def _beside_original(self, fitted: nn.Module, static_bytes: int) -> Measured:
        """Measures a module that nothing has run on."""
        original = self._copied()
        with torch.random.fork_rng():
            steps = compare(original, fitted, self._args, _STEPS + 1, keywords=self._kwargs, loss=self._loss)
            peak_bytes = measured_peak_bytes(
                fitted, self._args, static_bytes, keywords=self._kwargs, loss=self._loss
            )
        pairs = zip(steps.fitted[1:], steps.original[1:], strict=True)
        ratios = [ours.seconds / theirs.seconds for ours, theirs in pairs]
        agrees = all(numbers.agrees for numbers in steps.numbers)
        return Measured(peak_bytes, statistics.median(ratios) - 1, agrees)
