"""Below the smallest budget of LSTM kernels every way into the compiler plans their time steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support import pipeline_models
from support.planned_pipelines import source_of
from torch import Tensor, nn

import irc
from irc.compiler.pareto.points import Point, merge
from irc.compiler.pareto.sweep import Sweep, trace_front
from irc.compiler.pipeline.artifact import write_pipeline
from irc.compiler.pipeline.micro_batches import micro_batches_of
from irc.compiler.pipeline.run import run_pipeline
from irc.compiler.time_steps import has_kernels
from irc.frontends.torch import capture
from irc.ir import BudgetError, Plan
from irc.passes import Cost, Program
from irc.passes.costs.allocations import peak_bytes

LIMIT = 0.5


def _by_kernels(module: nn.Module, *args: Tensor) -> Plan:
    """The plan of the kernels, which everything fits into."""
    return irc.optimize(copy.deepcopy(module), args, "100%", costs="analytic", time_limit=LIMIT).irc_plan


def _measured_bytes(module: nn.Module, step: Callable[[], object], *args: Tensor) -> int:
    module.zero_grad()
    return peak_bytes(step) + sum(tensor.nbytes for tensor in (*module.parameters(), *args))


def _assert_close_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert its.grad is not None
        torch.testing.assert_close(mine.grad, its.grad)


# ---------------------------------------------------------------------- fronts


@pytest.mark.slow
def test_a_front_goes_on_below_the_kernels() -> None:
    model, args = pipeline_models.tagger()
    kernels = _by_kernels(model, *args)
    front = irc.pareto(model, args, points=3, costs="analytic", time_limit=LIMIT)
    survey = front.survey
    assert survey.baseline_bytes == kernels.baseline_peak_bytes
    assert survey.step_seconds == kernels.step_seconds
    assert survey.kernels_minimum_bytes == kernels.minimum_budget_bytes > survey.minimum_bytes
    assert survey.floor_bytes <= survey.minimum_bytes == front.points[-1].budget_bytes
    assert [p.time_steps for p in front.points] == [
        p.budget_bytes < survey.kernels_minimum_bytes for p in front.points
    ]
    for larger, smaller in pairwise(front.points):
        assert larger.overhead <= smaller.overhead and larger.peak_bytes >= smaller.peak_bytes
    assert all(p.bound <= p.overhead for p in front.points)
    assert "LSTM layers are planned as their time steps" in front.table()
    lowest = front.points[-1]
    assert lowest.seconds == pytest.approx(survey.step_seconds * (1 + lowest.overhead))
    twin = copy.deepcopy(model)
    fitted = irc.optimize(model, args, lowest.found_at_bytes, costs="analytic", time_limit=LIMIT)
    assert fitted.irc_plan.peak_bytes <= lowest.budget_bytes
    assert any("LSTM" in str(rounding) for rounding in fitted.irc_plan.roundings)
    twin(*args).backward()
    assert _measured_bytes(fitted, lambda: fitted(*args).backward(), *args) <= lowest.peak_bytes
    _assert_close_gradients(fitted, twin)


def test_time_steps_are_captured_only_for_budgets_below_the_kernels() -> None:
    def never() -> Program:
        raise AssertionError("nothing asks for the time steps")

    model, args = pipeline_models.tagger()
    captured = capture(model, args)
    assert has_kernels(captured.graph)
    program = Cost(profile="cpu").run(Program(captured.graph))
    least = trace_front(program, "tagger", Sweep(budgets=("100%",)), time_steps=never).survey.minimum_bytes
    front = trace_front(program, "tagger", Sweep(budgets=(least, "100%")), time_steps=never)
    assert front.survey.kernels_minimum_bytes == 0
    with pytest.raises(AssertionError, match="asks"):
        trace_front(program, "tagger", Sweep(budgets=(least - 1, "100%")), time_steps=never)


def test_a_front_of_sequences_that_are_too_long_for_time_steps_says_so() -> None:
    module, x = nn.LSTM(2, 3), torch.randn(1 << 16, 1, 2)
    front = irc.pareto(module, (x,), budgets=(1 << 20, "100%"), costs="analytic", time_limit=LIMIT)
    (refusal,) = front.refusals
    assert refusal.code == "IRC204" and "65536 time steps takes" in refusal.reason
    assert front.survey.kernels_minimum_bytes == 0 and not front.points[0].time_steps
    with pytest.raises(BudgetError, match="65536 time steps takes") as refused:
        irc.pareto(module, (x,), budgets=(1 << 20,), costs="analytic", time_limit=LIMIT)
    assert refused.value.minimum_bytes == front.survey.minimum_bytes


def _point(budget: int, peak: int, overhead: float, bound: float, *, time_steps: bool) -> Point:
    return Point(
        budget, peak, 1 + overhead, overhead, bound, False, "ilp", budget, 0.1, time_steps=time_steps
    )


def test_time_steps_show_where_no_kernels_are_as_fast_and_have_bounds_of_their_own() -> None:
    kernels = _point(100, 70, 1.0, 0.9, time_steps=False)
    points, _ = merge([kernels, _point(80, 60, 5.0, 2.0, time_steps=True)])
    assert [(p.found_at_bytes, p.bound) for p in points] == [(100, 0.9), (100, 0.9)]
    points, _ = merge([kernels, _point(60, 50, 1.5, 0.5, time_steps=True)])
    assert [(p.found_at_bytes, p.bound, p.time_steps) for p in points] == [
        (100, 0.9, False),
        (60, 0.5, True),
    ]


# ---------------------------------------------------------------------- torch.compile


@pytest.mark.slow
@torch._dynamo.config.patch(allow_rnn=True)  # pyright: ignore
def test_a_graph_of_dynamo_is_planned_as_time_steps_below_the_kernels() -> None:
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    model, args = pipeline_models.tagger()
    twin, kernels = copy.deepcopy(model), _by_kernels(model, *args)
    budget_bytes = kernels.minimum_budget_bytes * 3 // 4
    backend = irc.backend(budget_bytes, costs="analytic", time_limit=LIMIT, model=model)
    run = torch.compile(model, backend=backend)
    twin(*args).backward()
    for _ in range(2):
        assert _measured_bytes(model, lambda: run(*args).backward(), *args) <= budget_bytes
        _assert_close_gradients(model, twin)
    (plan,) = backend.plans
    assert backend.peak_bytes <= budget_bytes < backend.baseline_bytes
    assert plan.overhead > 0.5, "time steps take longer than the kernels, which they are compared with"
    model.zero_grad()
    small = torch.compile(copy.deepcopy(model), backend=irc.backend(20_000, costs="analytic", time_limit=1))
    with pytest.raises(BudgetError) as refused:
        small(*args)
    assert refused.value.code == "IRC540" and refused.value.minimum_bytes < kernels.minimum_budget_bytes


# ---------------------------------------------------------------------- pipelines


def _smallest_pipeline(stages: int, without: pytest.MonkeyPatch) -> tuple[int, float]:
    """The smallest budget that stages of kernels ask for, and the time of their step where all fits."""
    model, args = pipeline_models.tagger()
    options = {"stages": stages, "micro_batches": 2, "costs": "analytic", "time_limit": LIMIT}
    with without.context() as patch:
        patch.setattr("irc.compiler.pipeline.plan.kernels_or_time_steps", lambda graph, kernels, _: kernels())
        with pytest.raises(BudgetError) as refused:
            irc.pipeline(model, args, 10_000, **options)  # pyright: ignore[reportArgumentType]
        plan = irc.pipeline(model, args, "1GiB", **options).plan  # pyright: ignore[reportArgumentType]
    return refused.value.minimum_bytes, plan.single_seconds


@pytest.mark.slow
def test_stages_are_planned_as_time_steps_below_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, single_seconds = _smallest_pipeline(2, monkeypatch)
    model, args = pipeline_models.tagger()
    pipe = irc.pipeline(
        model, args, least * 4 // 5, stages=2, micro_batches=2, costs="analytic", time_limit=10
    )
    assert max(pipe.plan.peak_bytes) <= least * 4 // 5
    assert not any(has_kernels(schedule.graph) for schedule in pipe.stages.schedules)
    assert pipe.plan.single_seconds == single_seconds
    assert pipe.plan.bound_seconds <= pipe.plan.step_seconds
    write_pipeline(tmp_path / "pipe", pipe, source_of("tagger"), args)
    report = run_pipeline(tmp_path / "pipe", 2, with_original=True)
    assert report.failures == []


@pytest.mark.slow
def test_a_pipeline_trains_by_time_steps_below_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    least, _ = _smallest_pipeline(1, monkeypatch)
    model, args = pipeline_models.tagger()
    twin = copy.deepcopy(model)
    pipe = irc.pipeline(
        model, args, least * 4 // 5, stages=1, micro_batches=2, costs="analytic", time_limit=LIMIT
    )
    trainer = pipe.start()
    measured = _measured_bytes(model, lambda: trainer.step(*args), *args)
    assert measured <= pipe.plan.peak_bytes[0] <= least * 4 // 5
    for part in micro_batches_of(args, 2):
        (twin(*part) / 2).backward()
    _assert_close_gradients(model, twin)


def test_a_model_without_kernels_is_refused_as_before() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(BudgetError, match="needs at least"):
        irc.pipeline(model, (x,), 10, stages=1, micro_batches=1, costs="analytic")
    with pytest.raises(BudgetError) as refused:
        irc.pareto(model, (x,), budgets=(10,), costs="analytic")
    assert refused.value.code == "IRC443"


# ---------------------------------------------------------------------- estimates, tiles


def test_an_estimate_below_the_kernels_is_of_their_time_steps() -> None:
    model, args = pipeline_models.tagger()
    whole = irc.estimate(model, args, machine="cpu")
    assert whole.plan is not None and not whole.plan.roundings
    less = irc.estimate(model, args, machine="cpu", budget=whole.minimum_bytes - 1)
    assert less.plan is not None and less.plan.peak_bytes < whole.minimum_bytes
    assert any("LSTM" in str(rounding) for rounding in less.plan.roundings)


def test_time_steps_run_in_tiles_where_sums_may_be_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tagger(nn.Module):
        """Its kernels alone take more than a head in tiles."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(8, 32), nn.Linear(32, 256)

        def forward(self, x: Tensor, tags: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.layer(x)[0]).flatten(0, 1), tags.flatten())

    monkeypatch.setattr("irc.compiler.tiles._LEAST_BYTES", 1 << 12)
    module, args = Tagger(), (torch.randn(6, 16, 8), torch.randint(256, (6, 16)))
    with pytest.raises(BudgetError) as refused:
        irc.optimize(copy.deepcopy(module), args, 1, costs="analytic")
    original, least = copy.deepcopy(module), refused.value.minimum_bytes
    fitted = irc.optimize(module, args, least * 9 // 10, costs="analytic", exact="sums", time_limit=5)
    assert fitted.plan.peak_bytes <= least * 9 // 10 and fitted.plan.reordered
    assert any("LSTM" in str(rounding) for rounding in fitted.plan.roundings)
    for each in (original, fitted):
        each(*args).backward()
    _assert_close_gradients(fitted, original)
