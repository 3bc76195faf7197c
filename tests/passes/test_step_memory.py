"""Timelines of memory: all bytes of a step have a name, in original and plan."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.exhaustive import at_random, problem_of
from support.language import Language, batch
from support.random_copies import TIERS, with_random_copies
from support.strategies import Sample, graphs

import irc
from irc.ir import Kind, MemoryTimeline, Plan, StepMemory, UsageError, liveness, memory_timeline


@given(graphs(), st.integers(0, 1 << 20))
def test_the_bytes_of_every_step_are_those_of_liveness(sample: Sample, seed: int) -> None:
    schedule = at_random(problem_of(sample), Random(seed)).schedule
    schedule = with_random_copies(schedule, seed)
    counted = liveness(schedule, sample.workspace_bytes)
    found = memory_timeline(schedule, sample.workspace_bytes, sample.seconds, TIERS)
    assert found.peak_bytes == counted.peak_bytes
    assert set(found.during_bytes) <= set(counted.during_bytes)
    assert found.peak_bytes == sum(found.by_kind(found.peak_step).values())
    graph = schedule.graph
    loss = next(index for index, step in enumerate(found.steps) if step.phase == "loss")
    if graph.forwards_in_flight == 1:
        others = [step.other_bytes for step in found.steps]
        assert set(others[:loss]) <= {0} and others[loss] == graph.loss_bytes
        assert set(others[loss + 1 :]) <= {graph.loss_held_bytes}
    assert MemoryTimeline.from_json(json.loads(json.dumps(found.to_json()))) == found


MORE: list[dict[str, Any]] = [
    {},
    {"swap": "disk:1GiB"},
    {"accumulate_gradients": True},
    {"forwards_in_flight": 2},
    {"exact": "sums"},
    {"optimizer_in_backward": lambda p: torch.optim.AdamW(p)},
]


@pytest.mark.parametrize("options", MORE, ids=lambda options: next(iter(options), "plain"))
def test_both_peaks_are_those_of_the_plan(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irc.compiler.tiles._LEAST_BYTES", 1 << 14)
    module, args = Language(bias=False), batch()
    keep = irc.optimize(copy.deepcopy(module), args, "100%", costs="analytic", **options)
    least = keep.plan.minimum_budget_bytes
    budget = int(least + 0.2 * (keep.plan.peak_bytes - least))
    plan = irc.optimize(copy.deepcopy(module), args, budget, costs="analytic", **options).plan
    memory = plan.timeline()
    assert memory.planned.peak_bytes == plan.peak_bytes
    if not options.keys() & {"accumulate_gradients", "optimizer_in_backward"}:
        assert memory.original.peak_bytes == plan.baseline_peak_bytes
    kinds = memory.planned.by_kind(memory.planned.peak_step)
    assert kinds[Kind.PARAMETERS] == sum(p.nbytes for p in module.parameters())
    assert plan.step_seconds is not None
    took = plan.step_seconds * (1 + plan.overhead)
    assert memory.planned.step_seconds == pytest.approx(took, rel=1e-6)
    assert memory.original.step_seconds == pytest.approx(plan.step_seconds, rel=1e-6)
    saved = [r for r in memory.original.residents if r.kind == Kind.SAVED]
    assert any(memory.original.steps[r.maker].module for r in saved)


def test_a_plan_keeps_its_timeline_in_a_pickle_but_not_in_json() -> None:
    fitted = irc.optimize(Language(), batch(), "100%", costs="analytic")
    assert pickle.loads(pickle.dumps(fitted)).plan.timeline() == fitted.plan.timeline()
    again = Plan.from_json(json.loads(json.dumps(fitted.plan.to_json())))
    assert again == fitted.plan
    with pytest.raises(UsageError) as caught:
        again.timeline()
    assert caught.value.code == "IRC595"


@pytest.mark.parametrize(
    ("column", "value"), [(2, -5), (2, "many"), (3, 10_000), (0, 7), (5, None), (2, True), (2, 1 << 70)]
)
def test_a_row_that_is_none_is_refused(column: int, value: object) -> None:
    memory = irc.optimize(Language(), batch(), "100%", costs="analytic").plan.timeline()
    data = memory.to_json()
    data["planned"]["residents"][3][column] = value
    with pytest.raises((ValueError, TypeError)):
        StepMemory.from_json(data)


def test_a_longer_row_is_refused() -> None:
    timeline = MemoryTimeline((), ())
    data = replace(timeline, steps=()).to_json()
    data["copies"] = [["x"]]
    with pytest.raises(ValueError, match="a row of TierCopy"):
        MemoryTimeline.from_json(data)
