"""Measures plans and PyTorch's own methods: the peak of a step, and its time beside the original's."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch import bind_program, compile_program
from ...frontends.torch import Captured
from ...ir import Instruction, UsageError, first_line
from ...passes import Program
from ..training import compare, measured_peak_bytes
from .cells import Measured
from .torch_methods import FAMILIES, NotApplicableError, compiler, methods

__all__ = ["MOST_OVERHEAD", "Measurer"]

MOST_OVERHEAD = 4.0
"""Plans that are predicted to add more than so many steps' time are not run."""

SETTINGS = (0.8, 0.5, 0.2)
"""The values of PyTorch's `activation_memory_budget`."""

_STEPS = 6
"""The steps of which the median counts; one more before them warms up."""


class Measurer:
    """Runs plans of one captured call, and PyTorch's own methods.

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
        self._copy.load_state_dict(self._start)
        fitted = bind_program(self._copy, compiled, self._captured.signature, plan)
        self._known[schedule.instructions] = found = self._beside_original(fitted, plan.static_bytes)
        return found

    def methods(self) -> Iterator[tuple[str, float, Measured | str]]:
        """Trains some steps by each of PyTorch's own methods beside the original.

        Yields:
            Its name, seconds of the processor until its first step is over, its measurements or a refusal.
        """
        static_bytes = self._captured.graph.static_bytes
        with warnings.catch_warnings(), compiler():
            warnings.simplefilter("ignore")
            for method in methods(self._copy, self._args, FAMILIES[:-1], SETTINGS, self._kwargs):
                module = copy.deepcopy(self._original)
                module.load_state_dict(self._start)
                started = time.thread_time()
                try:
                    method.apply(module)
                    with torch.random.fork_rng():
                        self._loss(module(*self._args, **self._kwargs)).backward()
                    seconds = time.thread_time() - started
                    module.load_state_dict(self._start)
                    yield method.name, seconds, self._beside_original(module, static_bytes)
                except NotApplicableError as error:
                    yield method.name, 0.0, str(error)
                except Exception as error:
                    yield method.name, time.thread_time() - started, first_line(error)

    def _beside_original(self, fitted: nn.Module, static_bytes: int) -> Measured:
        """Measures a module with the weights of the start."""
        self._original.load_state_dict(self._start)
        with torch.random.fork_rng():
            steps = compare(
                self._original, fitted, self._args, _STEPS + 1, keywords=self._kwargs, loss=self._loss
            )
            peak_bytes = measured_peak_bytes(
                fitted, self._args, static_bytes, keywords=self._kwargs, loss=self._loss
            )
        pairs = zip(steps.fitted[1:], steps.original[1:], strict=True)
        ratios = [ours.seconds / theirs.seconds for ours, theirs in pairs]
        is_equal = all(numbers.agrees for numbers in steps.numbers)
        return Measured(peak_bytes, statistics.median(ratios) - 1, is_equal)
