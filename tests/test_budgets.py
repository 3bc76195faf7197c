"""Thirty budgets of real models: what is measured, what was promised, and how they go together."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import models
from irc.backends.torch import bind_program, compile_program
from irc.compiler.model_source import training_loss
from irc.compiler.request import cost_passes
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import capture
from irc.ir import BudgetError, Plan
from irc.passes import PassManager, PlanMemory, Planner, Program
from irc.passes.remat.choice import GAP

BUDGETS = 30
Model = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]

MODELS: dict[str, Model] = {
    "convolutions": lambda: models.resnet50(batch=2, size=32, classes=10),
    "skips": lambda: models.unet(batch=1, size=32, base=4),
    "attention": lambda: models.gpt2(batch=2, sequence=16, depth=2, width=32, heads=2),
}


def planned(planner: Planner, budget_bytes: int, time_limit: float) -> tuple[Program, Plan]:
    program = PlanMemory(budget_bytes, time_limit=time_limit).choose(planner)
    assert program.plan is not None
    return program, program.plan


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_over_thirty_budgets_nothing_is_above_its_promise_and_more_memory_is_never_worse(name: str) -> None:
    module, args = MODELS[name]()
    captured = capture(module, args, loss=training_loss)
    planner = Planner(PassManager(cost_passes("measured")).run(Program(captured.graph)))
    low, high = planner.minimum_bytes(is_thorough=True), planner.baseline_bytes
    before: Plan | None = None
    for index in range(BUDGETS):
        budget = low + (high - low) * index // (BUDGETS - 1)
        program, plan = planned(planner, budget, time_limit=0.5)
        assert program.schedule is not None
        fitted: Any = bind_program(
            module, compile_program(program.schedule, captured.constants), captured.signature, plan
        )
        if index % 3 == 0:
            fitted(*args).backward()
            measured = measured_peak_bytes(fitted, args, plan.static_bytes)
            assert plan.peak_bytes * 0.995 <= measured <= plan.peak_bytes <= budget
        if before is not None:
            assert plan.overhead <= before.overhead * (1 + 1e-9)
            # a plan of less memory and less time was missed by no more than the search may stop at
            gap = (before.overhead - plan.overhead) / (1 + plan.overhead)
            assert plan.peak_bytes >= before.peak_bytes or gap <= GAP
        before = plan
    assert before is not None and before.overhead == 0
    with pytest.raises(BudgetError):
        planned(planner, planner.problem.floor_bytes - 1, time_limit=1.5)


@pytest.mark.slow
def test_the_same_question_has_the_same_answer_on_a_graph_that_is_not_small() -> None:
    torch.manual_seed(0)
    module, args = MODELS["convolutions"]()
    orders: list[list[str]] = []
    for _ in range(2):
        graph = capture(module, args, loss=training_loss).graph
        planner = Planner(PassManager(cost_passes("analytic")).run(Program(graph)))
        low, high = planner.problem.floor_bytes, planner.problem.keep_all.peak_bytes
        program, plan = planned(planner, (low + 2 * high) // 3, time_limit=300)
        assert program.schedule is not None and plan.overhead > 0
        orders.append([node.name for node in program.schedule.computed])
    assert orders[0] == orders[1]


@pytest.mark.slow
def test_plans_made_by_themselves_are_monotone_too() -> None:
    """Nothing is carried from one budget to the next; each must stand without the others' schedules."""
    module, args = MODELS["skips"]()
    graph = capture(module, args, loss=training_loss).graph
    program = PassManager(cost_passes("analytic")).run(Program(graph))
    planner = Planner(program)
    high, low = planner.baseline_bytes, planner.minimum_bytes(is_thorough=True)
    plans = [
        planned(Planner(program), high - (high - low) * index // 7, time_limit=20)[1] for index in range(6)
    ]
    for more, less in itertools.pairwise(plans):
        assert less.overhead >= more.overhead - 1e-3 and less.peak_bytes <= more.budget_bytes
        assert less.lower_bound_overhead <= less.overhead
        assert more.lower_bound_overhead <= less.overhead, "a bound holds for every smaller budget"
