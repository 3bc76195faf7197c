"""Compares strategies: one capture, one measurement of costs, each strategy at each budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...frontends.torch import Loss, capture
from ...ir import BudgetError, IrcError, UsageError, parse_budget, verify_schedule
from ...passes import PlanMemory, Planner, Program
from ...passes.remat.choice import GAP
from ...passes.remat.strategies.published import PUBLISHED, strategy_named
from ..model_source import training_loss
from ..request import MEASURED, Request
from ..time_steps import has_kernels
from .cells import Cell
from .comparison import Comparison
from .measure import Measurer

__all__ = ["BUDGETS", "DEFAULT", "compare", "compare_program"]

BUDGETS: tuple[int | str, ...] = ("90%", "75%", "60%", "50%", "40%", "min")
"""The budgets unless others are asked for."""

MINIMUM = "min"
"""The smallest budget that the best plan fits into."""

_BEST = "auto"
_OVER = "IRC204"
"""The code of a budget that is below what a strategy's schedules take."""

_NUMBERS = {"<k>": ("8",), "<n>": ("0", "4", "16")}

DEFAULT: tuple[str, ...] = (
    _BEST,
    "eviction",
    *(
        name
        for strategy in PUBLISHED
        for mark in [next((mark for mark in _NUMBERS if mark in strategy.name), "")]
        for name in ([strategy.name.replace(mark, n) for n in _NUMBERS[mark]] if mark else [strategy.name])
    ),
)
"""The strategies unless others are asked for: irc's own, and each published one."""


def compare(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor,
    *,
    budgets: Sequence[int | str] | str = BUDGETS,
    strategies: Sequence[str] | str = DEFAULT,
    example_kwargs: Mapping[str, Any] | None = None,
    time_limit: float = 20.0,
    gap: float = GAP,
    costs: str = MEASURED,
    loss: Loss | None = None,
    measure: bool = False,
) -> Comparison:
    """Plans a model by each strategy at each budget: peak, overhead, distance from the bound, planning time.

    The model is captured and its operations are measured once. Nothing of it changes.

    Args:
        model: As for `irc.optimize`.
        example_args: As for `irc.optimize`.
        budgets: Bytes, `"4GiB"`, `"60%"` of the baseline's peak, or `"min"`: the smallest that the best plan
            fits into. A text has commas between them, here and for strategies.
        strategies: Names as for `irc.optimize(strategy=)`; none that copies to a tier.
        example_kwargs: As for `irc.optimize`.
        time_limit: Seconds for each plan.
        gap: As for `irc.optimize`.
        costs: As for `irc.optimize`.
        loss: As for `irc.optimize`.
        measure: Whether to train a copy of the model some steps by each plan, in turns with the original.
            Without `loss` that is the loss of the command line (`training_loss`), which is planned then.

    Returns:
        The comparison: `.cells`, `.table()`, `.to_json()`, `.to_csv()`, `.draw(path)`.

    Raises:
        UnsupportedError: As for `irc.optimize`.
        UsageError: IRC401 or IRC403 for a budget, a strategy, the time limit or the gap.
    """
    budgets, strategies = _listed(budgets), tuple(map(str, _listed(strategies)))
    check(budgets, strategies, time_limit, gap)
    request = Request.of("100%", costs=costs)
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    if measure and loss is None:
        loss = training_loss
    captured = capture(model, args, example_kwargs, loss=loss, with_eager=True, measure=request.cost.measure)
    program = request.costed(captured)
    measurer = None
    if measure and loss is not None:
        measurer = Measurer(model, captured, args, example_kwargs, loss)
    name = type(model).__name__
    return compare_program(
        program, name, budgets, strategies, time_limit=time_limit, gap=gap, measurer=measurer
    )


def _listed(given: Sequence[int | str] | str) -> tuple[int | str, ...]:
    """The names or amounts of a sequence, or of a text with commas between."""
    return tuple(text.strip() for text in given.split(",")) if isinstance(given, str) else tuple(given)


_KERNELS = (
    "LSTM layers are compared as the kernels that eager runs; irc.optimize fits smaller budgets by their "
    "time steps"
)


def check(budgets: Sequence[int | str], strategies: Sequence[str], time_limit: float, gap: float) -> None:
    """Refuses malformed options.

    Raises:
        UsageError: IRC401 for a budget, IRC403 for a strategy, the time limit or the gap.
    """
    for budget in budgets:
        if budget != MINIMUM:
            parse_budget(budget)
    if not strategies or not budgets:
        raise UsageError(
            "IRC403", "there is nothing to compare", help="name one budget and one strategy at least"
        )
    for strategy in strategies:
        chooser = PlanMemory("100%", strategy, time_limit, gap=gap)
        chooser.check()
        chooser.check_tiers(has_tiers=False)


def compare_program(
    program: Program,
    model: str,
    budgets: Sequence[int | str],
    strategies: Sequence[str],
    *,
    time_limit: float,
    gap: float = GAP,
    measurer: Measurer | None = None,
    on_cell: Callable[[Cell], None] | None = None,
) -> Comparison:
    """Compares strategies on a program with costs.

    Args:
        program: A graph and its costs.
        model: The model's name.
        budgets: As for `compare`.
        strategies: As for `compare`.
        time_limit: Seconds for each plan.
        gap: As for `compare`.
        measurer: Measures each plan; None if nothing runs.
        on_cell: Told of each plan or refusal.
    """
    check(budgets, strategies, time_limit, gap)
    planner = Planner(program)
    searches = {name: Planner(program) for name in {_BEST, *strategies} if strategy_named(name) is None}
    deadline = time.thread_time() + time_limit
    minimum_bytes = planner.minimum_bytes(deadline, is_thorough=MINIMUM in budgets)
    asked = {
        minimum_bytes if budget == MINIMUM else parse_budget(budget, planner.baseline_bytes)
        for budget in budgets
    }
    cells: list[Cell] = []
    for budget_bytes in sorted(asked, reverse=True):
        best = _cell(searches[_BEST], PlanMemory(budget_bytes, _BEST, time_limit, gap=gap), measurer)
        for strategy in strategies:
            apart = searches.get(strategy, planner)  # a search goes by what its planner has found
            chooser = PlanMemory(budget_bytes, strategy, time_limit, gap=gap)
            cell = best if strategy == _BEST else _cell(apart, chooser, measurer)
            cells.append(cell.above(best.bound))
            if on_cell is not None:
                on_cell(cells[-1])
    return Comparison(
        model=model,
        baseline_bytes=planner.baseline_bytes,
        static_bytes=planner.problem.graph.static_bytes,
        floor_bytes=planner.problem.floor_bytes,
        minimum_bytes=minimum_bytes,
        step_seconds=planner.problem.step_seconds,
        costs="" if program.costs is None else program.costs.source,
        remark=_KERNELS if has_kernels(program.graph) else "",
        cells=tuple(cells),
    )


def _cell(planner: Planner, chooser: PlanMemory, measurer: Measurer | None) -> Cell:
    """The plan of one strategy within one budget, or why there is none."""
    named = strategy_named(chooser.strategy)
    assert isinstance(chooser.budget, int)
    about = chooser.strategy, "this project" if named is None else named[0].source, chooser.budget
    started = time.thread_time()
    try:
        planned = chooser.choose(planner)
    except IrcError as error:
        seconds = time.thread_time() - started
        smallest_bytes = (
            error.minimum_bytes if isinstance(error, BudgetError) and error.code == _OVER else None
        )
        refused = Cell(*about, seconds, code=error.code, refusal=error.message)
        return replace(refused, smallest_bytes=smallest_bytes)
    seconds = time.thread_time() - started
    schedule, plan, costs = planned.schedule, planned.plan, planned.costs
    assert schedule is not None and plan is not None and costs is not None
    verify_schedule(
        schedule, costs.workspace_bytes, budget_bytes=plan.budget_bytes, peak_bytes=plan.peak_bytes
    )
    cell = Cell(*about, seconds, plan.peak_bytes, plan.overhead, plan.lower_bound_overhead)
    return cell if measurer is None else replace(cell, measured=measurer.measure(planned))
