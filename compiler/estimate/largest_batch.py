"""The largest batch, or the longest sequence, whose training step fits: by planning, not by running out."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...frontends.torch import Loss
from ...ir import BudgetError, Graph, Plan, TimeLimitError, UsageError, format_bytes, parse_budget
from ...passes.costs.optimizer_costs import OptimizerFactory
from ...torch_support.pytree import flatten
from ..case import Case
from ..frozen_heap import frozen_heap
from ..model_source import training_loss
from ..optimize import optimize_module
from ..request import MEASURED, Request
from ..training import check_measurable, measured_peak_bytes
from .estimate import items_of, without_large_steps

__all__ = ["AXES", "LargestBatch", "Step", "Trial", "max_batch", "next_size", "search_largest"]

AXES = {"batch": 0, "sequence": 1}
"""The axes along which a step grows, with the dimension of its tensors."""

_MOST = 1 << 20
"""The largest size that is tried."""

_NOT_TAKEN = ("IRC349", "IRC586")
"""The codes of errors for sizes that a model does not take: its forward raises, or it has fewer positions."""

_STEPS = 5
"""The steps whose median is the measured time."""

Step = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module with the arguments of a step."""


@dataclass(frozen=True)
class Trial:
    """A size that was planned.

    Args:
        size: The size.
        minimum_bytes: The smallest budget that is known for it, or what one operation takes that is over
            the budget by itself; 0 if the model does not take this size.
        overhead: The time that the plan adds; None if none fits.
        items_per_second: The tokens or samples that it trains on in a second; 0 if none fits, or if nothing
            runs twice and no operation was timed.
    """

    size: int
    minimum_bytes: int
    overhead: float | None
    items_per_second: float


@dataclass(frozen=True)
class LargestBatch:
    """The largest step that fits.

    Args:
        size: The size of the axis; 0 if not even 1 fits.
        axis: One of `AXES`.
        budget_bytes: The budget.
        plan: The plan of that step; None if none fits.
        unit: `tokens` or `samples`.
        items_per_second: How many the step trains on in a second.
        trials: The sizes that were planned, in order.
        measured_peak_bytes: The measured peak of a step of that size, if it was measured.
        measured_per_second: The tokens or samples a second that were measured with it.
    """

    size: int
    axis: str
    budget_bytes: int
    plan: Plan | None
    unit: str
    items_per_second: float
    trials: tuple[Trial, ...]
    measured_peak_bytes: int | None = None
    measured_per_second: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the measured peak, if there is one, is within the prediction."""
        measured = self.measured_peak_bytes
        return measured is None or (self.plan is not None and measured <= self.plan.peak_bytes)

    @property
    def is_most_tried(self) -> bool:
        """Whether larger sizes may fit: the search goes no further."""
        return self.size >= _MOST

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-ready data."""
        plan = self.plan
        return {
            "format": "irc-max-batch-2",
            "axis": self.axis,
            "size": self.size,
            "is_most_tried": self.is_most_tried,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": None if plan is None else plan.peak_bytes,
            "overhead": None if plan is None else plan.overhead,
            "lower_bound_overhead": None if plan is None else plan.lower_bound_overhead,
            "unit": self.unit,
            "items_per_second": self.items_per_second or None,
            "costs": None if plan is None else plan.costs,
            "trials": [
                {
                    "size": trial.size,
                    "at_least_bytes": trial.minimum_bytes or None,
                    "overhead": trial.overhead,
                    "items_per_second": trial.items_per_second or None,
                }
                for trial in self.trials
            ],
            "measured_peak_bytes": self.measured_peak_bytes,
            "measured_items_per_second": self.measured_per_second,
        }

    def summary(self) -> str:
        """The result for a person."""
        size = f"at least {self.size}, the most that is tried" if self.is_most_tried else str(self.size)
        lines = [f"{'largest ' + self.axis:>16}  {size}, within {format_bytes(self.budget_bytes)}"]
        plan = self.plan
        if plan is not None:
            lines.append(
                f"{'plan':>16}  {format_bytes(plan.peak_bytes)} at its peak, {plan.overhead:.2%} more time "
                f"(no schedule adds less than {plan.lower_bound_overhead:.2%})"
            )
            if self.items_per_second:  # else no operation was timed: the plan computes nothing again
                speed = f"{self.items_per_second:,.4g} {self.unit} a second (costs {plan.costs})"
                lines.append(f"{'speed':>16}  {speed}")
        if self.measured_peak_bytes is not None and self.measured_per_second is not None:
            verdict = "within the prediction" if self.holds else "OVER THE PREDICTION"
            nbytes = self.measured_peak_bytes
            lines.append(
                f"{'measured':>16}  {format_bytes(nbytes)} ({nbytes:,} bytes), {verdict}; "
                f"{self.measured_per_second:,.4g} {self.unit} a second"
            )
        lines.append(
            f"{'tried':>16}  {self.axis:>10} {'needs at least':>15} {'more time':>10} {'a second':>10}"
        )
        for trial in self.trials:
            more = "none fits" if trial.overhead is None else f"{trial.overhead:.2%}"
            needed = format_bytes(trial.minimum_bytes)
            if not trial.minimum_bytes:
                needed, more = "", "the model does not take it"
            speed = f"{trial.items_per_second:,.4g}" if trial.items_per_second else ""
            lines.append(f"{'':>16}  {trial.size:>10} {needed:>15} {more:>10} {speed:>10}".rstrip())
        return "\n".join(lines)


def max_batch(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor,
    budget: int | str,
    *,
    axis: str = "batch",
    example_kwargs: Mapping[str, Any] | None = None,
    costs: str = MEASURED,
    optimizer_in_backward: OptimizerFactory | None = None,
    accumulate_gradients: bool = False,
    loss: Loss | None = None,
    exact: bool | str = True,
    time_limit: float = 60.0,
    measure: bool = False,
) -> LargestBatch:
    """Finds the largest batch, or the longest sequence, that trains within a budget.

    Each size that is tried is captured and planned; none is run, but for `measure`.

    Args:
        model: An `nn.Module` in train() mode.
        example_args: Arguments of one training step. Their tensors that have the first one's size in the
            dimension of the axis grow with it; the others stay.
        budget: Bytes, `"4GiB"` or `"4GB"`.
        axis: `batch` is the first dimension, `sequence` the second one.
        example_kwargs: Keyword arguments of one training step, which grow alike.
        costs: As of `irc.optimize`.
        optimizer_in_backward: As of `irc.optimize`.
        accumulate_gradients: As of `irc.optimize`.
        loss: As of `irc.optimize`.
        exact: As of `irc.optimize`.
        time_limit: Seconds of the processor for the search of each schedule.
        measure: Whether to train some steps of the largest size that fits, and measure them.

    Raises:
        UnsupportedError: The model uses what irc does not support.
        UsageError: IRC585 for an axis that the arguments do not have; IRC401 for a budget in per cent; IRC403
            to measure a model without data; others for malformed arguments.
    """
    if measure:
        check_measurable(model)
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    leaves, tree = flatten((args, dict(example_kwargs or {})))
    base = _base_size(leaves, axis) if axis in AXES else 0
    if not base:
        raise UsageError(
            "IRC585",
            f"the example arguments have no axis {axis!r}",
            help="give axis='batch', the first dimension of tensors, or 'sequence', their second one",
        )
    request = Request.of(
        budget,
        costs=costs,
        optimizer=optimizer_in_backward,
        accumulate_gradients=accumulate_gradients,
        loss=loss,
        exact=exact,
        time_limit=time_limit,
    )

    def step(size: int, resized: Callable[..., Any] = _resized) -> Step:
        _check_inputs(leaves, AXES[axis], base, size, budget)
        args, kwargs = pytree.tree_unflatten([resized(leaf, AXES[axis], base, size) for leaf in leaves], tree)
        return model, args, kwargs

    return search_largest(
        step,
        request,
        axis=axis,
        measure=measure,
        start=base,
        filled=lambda size: step(size, _filled),
    )


def search_largest(
    step: Callable[[int], Step],
    request: Request,
    *,
    axis: str,
    measure: bool = False,
    start: int = 1,
    filled: Callable[[int], Step] | None = None,
) -> LargestBatch:
    """Finds the largest size of a step that fits the request's budget.

    Bytes grow nearly linearly with the size: the next size that is tried is where a line through two sizes
    meets the budget, between the largest that fits and the smallest that does not.

    Args:
        step: Makes the step of a size.
        request: What is asked of its plan; its budget is in bytes.
        axis: The name of what grows.
        measure: Whether to run the largest step.
        start: The first size that is tried; the model takes it.
        filled: Makes the step that is measured, with weights and numbers; None for `step`.

    Raises:
        UsageError: IRC401 for a budget in per cent.
    """
    if isinstance(request.budget, str) and request.budget.endswith("%"):
        raise UsageError(
            "IRC401", f"a budget of {request.budget} grows with the {axis}", help="give bytes, as 8GiB"
        )
    budget_bytes = parse_budget(request.budget)
    cost = replace(request.cost, most_bytes=budget_bytes)  # what is larger is not run, only modelled
    request = replace(request, cost=cost, plan=replace(request.plan, budget=budget_bytes))
    trials: dict[int, Trial] = {}
    plan: Plan | None = None
    fits, low, high, size = 0, 0, max(_MOST, start) + 1, start
    while high - low > 1:
        trials[size], found = _planned(step, size, request, may_refuse=size != start)
        if found is not None:
            fits, low, plan = size, size, found
        elif trials[size].minimum_bytes or fits:
            high = size
        else:
            low = size  # too small for the model, as one row is for BatchNorm
        size = next_size(trials, budget_bytes, low, high)
    parts = step(fits or start)
    found = LargestBatch(
        size=fits,
        axis=axis,
        budget_bytes=budget_bytes,
        plan=plan,
        unit=items_of(parts[1], parts[2])[1],
        items_per_second=trials[fits].items_per_second if fits else 0.0,
        trials=tuple(trials[size] for size in sorted(trials)),
    )
    return _measured(found, (filled or step)(fits), request) if measure and fits else found


def _planned(
    step: Callable[[int], Step], size: int, request: Request, *, may_refuse: bool
) -> tuple[Trial, Plan | None]:
    """Plans a step of a size; there is no plan if it does not fit.

    Args:
        step: Makes the step of a size.
        size: The size.
        request: What is asked of the plan.
        may_refuse: Whether the model's own error means that it does not take this size.
    """
    assert isinstance(request.budget, int)
    try:
        module, args, kwargs = step(size)
        with frozen_heap():
            case = Case.of(module, args, kwargs, request)
            least_bytes = _least_bytes(case.captured.graph) if request.cost.measure else 0
            if least_bytes > request.budget:
                return Trial(size, least_bytes, None, 0.0), None  # nothing of it runs, to be measured
            plan = replace(case, request=without_large_steps(request, case.captured)).plan().program.plan
    except BudgetError as error:
        return Trial(size, error.minimum_bytes, None, 0.0), None
    except TimeLimitError:
        return Trial(size, request.budget + 1, None, 0.0), None
    except UsageError as error:
        if not may_refuse or error.code not in _NOT_TAKEN:
            raise
        return Trial(size, 0, None, 0.0), None
    assert plan is not None
    seconds = (plan.step_seconds or 0.0) * (1 + plan.overhead)
    items = items_of(args, kwargs)[0]
    return Trial(size, plan.minimum_budget_bytes, plan.overhead, items / seconds if seconds else 0.0), plan


def _least_bytes(graph: Graph) -> int:
    """What every schedule holds while the operation runs that reads and makes most."""
    static = graph.static_storages
    touched = ({*graph.reads(node), *graph.allocates(node)} - static for node in graph.operations)
    return graph.static_bytes + max((sum(s.nbytes for s in storages) for storages in touched), default=0)


def next_size(trials: Mapping[int, Trial], budget_bytes: int, fits: int, fails: int) -> int:
    """The size to try next, between one that fits and one that does not.

    The line goes through the two that are nearest to the border on both sides, or nearest on one side. Once
    both sides are known, every other size halves what is open.
    """
    trials = {size: trial for size, trial in trials.items() if trial.minimum_bytes}
    low, high = trials.get(fits), trials.get(fails)
    halves = fails <= _MOST and (high is None or len(trials) % 2)
    others = sorted((t for t in trials.values() if t not in (low, high)), key=lambda t: t.minimum_bytes)
    a, b = low or (others[0] if others else None), high or (others[-1] if others else None)
    guess = float(2 * fits if fits else fails // 2)
    if halves:
        guess = (fits + fails) / 2
    elif a is not None and b is not None and (b.minimum_bytes - a.minimum_bytes) * (b.size - a.size) > 0:
        slope = (b.minimum_bytes - a.minimum_bytes) / (b.size - a.size)
        guess = a.size + (budget_bytes - a.minimum_bytes) / slope
    return min(max(math.floor(guess), fits + 1), fails - 1)


def _measured(found: LargestBatch, step: Step, request: Request) -> LargestBatch:
    """The result with the measured peak and speed of some steps; the model's numbers are as before."""
    module, args, kwargs = step
    fitted = optimize_module(copy.deepcopy(module), args, request, kwargs).module
    plan = cast(Any, fitted).plan
    loss = request.loss or training_loss
    with torch.random.fork_rng():
        peak_bytes = measured_peak_bytes(fitted, args, plan.static_bytes, keywords=kwargs, loss=loss)
        seconds: list[float] = []
        for _ in range(_STEPS):
            started = time.perf_counter()
            loss(fitted(*args, **kwargs)).backward()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            fitted.zero_grad(set_to_none=True)
    per_second = items_of(args, kwargs)[0] / statistics.median(seconds)
    return replace(found, plan=plan, measured_peak_bytes=peak_bytes, measured_per_second=per_second)


# ---------------------------------------------------------------------- arguments of another size


def _base_size(leaves: Sequence[Any], axis: str) -> int:
    """The size of the axis in the example: of the first tensor that has the dimension; 0 if none has."""
    dimension = AXES[axis]
    sizes = (leaf.shape[dimension] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > dimension)
    return next(sizes, 0)


def _check_inputs(leaves: Sequence[Any], dimension: int, base: int, size: int, budget: int | str) -> None:
    """Refuses a size whose inputs alone are over the budget, before they are made.

    Raises:
        BudgetError: IRC204.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    grow = (t for t in tensors if t.dim() > dimension and t.shape[dimension] == base)
    nbytes = sum(t.numel() // base * size * t.element_size() for t in grow)
    budget_bytes = parse_budget(budget)
    if nbytes > budget_bytes:
        raise BudgetError(
            "IRC204",
            f"inputs of {size} take {format_bytes(nbytes)}, over the budget of {format_bytes(budget_bytes)}",
            minimum_bytes=nbytes,
            help="give a larger budget, or example arguments of a smaller size",
        )


def _resized(leaf: Any, dimension: int, base: int, size: int) -> Any:
    """A tensor of another size, of which nothing is read; what does not have the axis stays as it is."""
    if not isinstance(leaf, Tensor) or leaf.dim() <= dimension or leaf.shape[dimension] != base:
        return leaf
    shape = (*leaf.shape[:dimension], size, *leaf.shape[dimension + 1 :])
    with nullcontext() if not isinstance(leaf, FakeTensor) else leaf.fake_mode, torch.no_grad():
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)


def _filled(leaf: Any, dimension: int, base: int, size: int) -> Any:
    """A copy of a tensor, or one of another size with its rows repeated, to be run on."""
    if not isinstance(leaf, Tensor):
        return leaf
    with torch.no_grad():
        copied = leaf.detach().clone()
        if leaf.dim() > dimension and leaf.shape[dimension] == base:
            copied = copied.index_select(dimension, torch.arange(size, device=leaf.device) % base)
        return copied.requires_grad_(leaf.requires_grad)
