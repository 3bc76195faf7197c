"""Steps in which nothing is planned: they run as eager does, and what they take is measured."""

# The engine's callbacks have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from ...backends.torch import AliveTensors
from ...ir import BudgetError, format_bytes
from .outside_meter import OutsideMeter, Stretch

__all__ = ["UnplannedSteps"]

_LOG = logging.getLogger(__name__)


class UnplannedSteps:
    """Measures a step without a planned graph, from the call of what is compiled to the end of its backward.

    What the loop does after backward is left out: no graph waits there.

    Args:
        budget_bytes: Of a step.
        meter: Measures, and takes the result.
        alive: The tensors that are known.

    Attributes:
        has_any: Whether there was such a step.
    """

    def __init__(self, budget_bytes: int, meter: OutsideMeter, alive: AliveTensors) -> None:
        self._budget_bytes, self._meter, self._alive = budget_bytes, meter, alive
        self._device = ""
        self._is_begun = self._is_measured = self._has_backward = self.has_any = False

    def note(self, parameter: Tensor, name: str) -> bool:
        """Takes down the first gradient of a backward in such a step; returns whether to ask again.

        Raises:
            BudgetError: IRC540 if such a step was measured, and takes more than the budget.
        """
        if not self.has_any:
            _LOG.warning(
                "no graph is planned of the step from which the gradient of parameter %s comes: it runs as "
                "eager does, and the next step measures what it takes; to plan parts of it, compile these in "
                "place of it, as in model.layers[k] = torch.compile(model.layers[k], backend=backend); "
                "TORCH_LOGS=graph_breaks names what Dynamo left to Python",
                name,
            )
        self.has_any = self._has_backward = True
        self._device = str(parameter.device)
        is_over = self._is_measured and self._meter.outside.between_bytes > self._budget_bytes
        if is_over:
            raise self._over(self._meter.outside.between_bytes)
        if self._is_begun:
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._meter.mark(Stretch.WAITING)
            )
        return not self._is_measured

    def expect_change(self) -> None:
        """Takes down that Dynamo compiles something: what was measured may change."""
        self._is_measured = False

    def drop(self) -> None:
        """Gives up what is being measured: a graph of the step is planned."""
        if self._is_begun:
            self._meter.stop()
        self._is_begun = self._has_backward = False

    def begin_call(self, arguments: Iterable[Tensor]) -> None:
        """Begins a step where what is compiled is called after a backward, and ends the one before it."""
        if not self._has_backward or self._is_measured:
            return
        self._has_backward = False
        if self._is_begun and self._meter.is_recording:
            self._is_begun, self._is_measured = False, self._meter.end_first_stretch()
            if self._is_measured:
                nbytes = format_bytes(self._meter.outside.between_bytes)
                _LOG.info("a step in which no graph is planned takes %s, as measured", nbytes)
            return
        self._meter.stop()
        gc.collect()  # results of earlier steps may wait in cycles of references
        self._alive.note(arguments)
        self._meter.begin(self._device, self._alive.alive_bytes())
        self._meter.mark(Stretch.WAITING)
        self._is_begun = True

    def _over(self, step_bytes: int) -> BudgetError:
        return BudgetError(
            "IRC540",
            f"a step in which no graph is planned takes {format_bytes(step_bytes)} ({step_bytes} bytes), as "
            f"measured, over the budget of {format_bytes(self._budget_bytes)} ({self._budget_bytes} bytes)",
            minimum_bytes=step_bytes,
            help=f"raise the budget to {step_bytes} bytes, or compile parts of the model that Dynamo makes "
            "graphs of, as in model.layers[k] = torch.compile(model.layers[k], backend=backend)",
        )
