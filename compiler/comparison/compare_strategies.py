"""Compares strategies: one capture, one measurement of costs, each strategy at each budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ...frontends.torch import Loss, capture
from ...ir import BudgetError, IrcError, UsageError, format_bytes, parse_budget, verify_schedule
from ...passes import PlanMemory, Planner
from ...passes.remat.choice import GAP
from ...passes.strategy_registry import load_strategies, strategy_named
from ..model_source import training_loss
from ..request import MEASURED, Request
from ..time_steps import has_kernels
from .cells import Cell, Measured
from .comparison import Comparison
from .measure import MOST_OVERHEAD, Measurer

__all__ = ["BUDGETS", "DEFAULT", "Compared", "compare", "compare_call"]

BUDGETS: tuple[int | str, ...] = ("90%", "75%", "60%", "50%", "40%", "min")
"""The budgets unless others are asked for."""

MINIMUM = "min"
"""The smallest budget that the best plan fits into."""

_BEST = "auto"
_OVER = "IRC204"
"""The code of a budget that is below what a strategy's schedules take."""

DEFAULT: tuple[str, ...] = (
    _BEST,
    "eviction",
    *(name for strategy in load_strategies(copies=False) for name in strategy.examples),
)
"""The strategies unless others are asked for: irc's own, and each published one."""

_KERNELS = (
    "LSTM layers are compared as the kernels that eager runs; irc.optimize fits smaller budgets by their "
    "time steps"
)


@dataclass(frozen=True)
class Compared:
    """The options of a comparison.

    Args:
        budgets: As for `compare`.
        strategies: As for `compare`.
        time_limit: Seconds for each plan.
        gap: As for `compare`.
        measure: As for `compare`.
    """

    budgets: tuple[int | str, ...] = BUDGETS
    strategies: tuple[str, ...] = DEFAULT
    time_limit: float = 20.0
    gap: float = GAP
    measure: bool = False

    @staticmethod
    def of(
        budgets: Sequence[int | str] | str,
        strategies: Sequence[str] | str,
        time_limit: float,
        gap: float,
        measure: bool,
    ) -> Compared:
        """The options as a user gives them, a text with commas for a sequence; refuses malformed ones.

        Raises:
            UsageError: IRC401 for a budget, IRC403 for a strategy, the time limit or the gap.
        """
        found = Compared(_listed(budgets), tuple(map(str, _listed(strategies))), time_limit, gap, measure)
        if not found.strategies or not found.budgets:
            raise UsageError(
                "IRC403", "there is nothing to compare", help="name one budget and one strategy at least"
            )
        for budget in found.budgets:
            if budget != MINIMUM:
                parse_budget(budget)
        for strategy in found.strategies:
            chooser = found.chooser("100%", strategy)
            chooser.check()
            chooser.check_tiers(has_tiers=False)
        return found

    def chooser(self, budget: int | str, strategy: str) -> PlanMemory:
        """The pass that plans by a strategy within a budget."""
        return PlanMemory(budget, strategy, self.time_limit, gap=self.gap)

    def budget_bytes(self, planner: Planner) -> list[int]:
        """The budgets in bytes, the largest first.

        Raises:
            UsageError: IRC401 for one of no bytes.
        """
        deadline = time.thread_time() + self.time_limit
        minimum_bytes = planner.minimum_bytes(deadline, is_thorough=MINIMUM in self.budgets)
        whole = planner.baseline_bytes
        asked = {minimum_bytes if b == MINIMUM else parse_budget(b, whole) for b in self.budgets}
        return sorted(map(parse_budget, asked), reverse=True)


def _listed(given: Sequence[int | str] | str) -> tuple[int | str, ...]:
    return tuple(text.strip() for text in given.split(",")) if isinstance(given, str) else tuple(given)


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
        measure: Whether to train a copy of the model some steps by each plan, in turns with the original, and
            by PyTorch's own methods: checkpoints of chains and of blocks, selective ones, and
            `activation_memory_budget`. Plans that add more than four steps' time are not run. Afterwards
            torch's compiler has forgotten what it had compiled before.
            If `loss` is left out, it is that of the command line then (`training_loss`).

    Returns:
        The comparison: `.cells`, `.table()`, `.to_json()`, `.to_csv()`, `.draw(path)`.

    Raises:
        UnsupportedError: As for `irc.optimize`.
        UsageError: IRC401 or IRC403 for a budget, a strategy, the time limit or the gap.
    """
    options = Compared.of(budgets, strategies, time_limit, gap, measure)
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    if measure and loss is None:
        loss = training_loss
    request = Request.of("100%", costs=costs)
    return compare_call(model, args, example_kwargs, loss, request, type(model).__name__, options)


def compare_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss: Loss | None,
    request: Request,
    name: str,
    options: Compared,
    on_cell: Callable[[Cell], None] = lambda _: None,
) -> Comparison:
    """Captures a call of a model, and plans it by each strategy at each budget.

    Args:
        model: As for `compare`.
        args: The arguments.
        kwargs: The keyword arguments.
        loss: As for `compare`; there is one if plans are measured.
        request: Where costs come from.
        name: The model's name.
        options: What is compared.
        on_cell: Told of each plan or refusal.

    Raises:
        IrcError: As for `compare`.
    """
    captured = capture(model, args, kwargs, loss=loss, with_eager=True, measure=request.cost.measure)
    program = request.costed(captured)
    planner = Planner(program)
    searches = {n: Planner(program) for n in {_BEST, *options.strategies} if strategy_named(n) is None}
    budgets = options.budget_bytes(searches[_BEST])
    measurer = None
    if options.measure:
        assert loss is not None
        measurer = Measurer(model, captured, args, kwargs, loss)
    cells: list[Cell] = []
    own = [] if measurer is None else list(measurer.methods())
    for budget_bytes in budgets:
        shown = measurer if _BEST in options.strategies else None
        best = _cell(searches[_BEST], options.chooser(budget_bytes, _BEST), shown)
        for strategy in options.strategies:
            apart = searches.get(strategy, planner)  # a search goes by what its planner has found
            chooser = options.chooser(budget_bytes, strategy)
            cell = best if strategy == _BEST else _cell(apart, chooser, measurer)
            cells.append(cell.above(best.bound))
            on_cell(cells[-1])
        for method in own:
            cells.append(_measured_cell(budget_bytes, *method).above(best.bound))
            on_cell(cells[-1])
    return Comparison(
        model=name,
        baseline_bytes=planner.baseline_bytes,
        static_bytes=planner.problem.graph.static_bytes,
        floor_bytes=planner.problem.floor_bytes,
        minimum_bytes=searches[_BEST].minimum_bytes(),
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
    if measurer is None or plan.overhead > MOST_OVERHEAD:
        return cell
    return replace(cell, measured=measurer.measure(planned))


def _measured_cell(budget_bytes: int, name: str, outcome: Measured | str) -> Cell:
    """One of PyTorch's own methods beside one budget, which it knows nothing of."""
    cell = Cell(name, "PyTorch", budget_bytes, plan_seconds=None)
    if isinstance(outcome, str):
        return replace(cell, code="IRC403", refusal=outcome)
    if outcome.peak_bytes > budget_bytes:
        refusal = f"a step takes {format_bytes(outcome.peak_bytes)}"
        return replace(cell, code=_OVER, refusal=refusal, smallest_bytes=outcome.peak_bytes)
    return replace(cell, measured=outcome)
