"""Plans that keep all: no operation is timed, and the plan says so; a smaller budget has times measured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.compiler.training import measured_peak_bytes
from irc.ir import Plan
from irc.passes.costs import profiling as profile

torch.set_num_threads(1)

BATCH = torch.randn(16, 3, 16, 16)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The devices on which operations are timed from here on; nothing was measured before."""
    monkeypatch.setenv("IRC_CACHE_DIR", str(tmp_path))
    seen: list[str] = []
    original: Any = vars(profile)["run_seconds"]

    def run_seconds(run: Callable[[], Any], device: str) -> float:
        seen.append(device)
        return original(run, device)

    monkeypatch.setattr(profile, "run_seconds", run_seconds)
    return seen


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)]
    blocks = (nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers)))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks)


def peak(fitted: nn.Module, plan: Plan) -> int:
    def loss(result: Tensor) -> Tensor:
        return result.square().mean()

    measured_peak_bytes(fitted, (BATCH,), plan.static_bytes, loss=loss)  # kernels choose their workspaces
    return measured_peak_bytes(fitted, (BATCH,), plan.static_bytes, loss=loss)


def test_where_all_is_kept_nothing_is_timed_and_predicted_equals_measured(timed: list[str]) -> None:
    fitted = irc.optimize(model(), BATCH, "100%", loss=lambda y: y.square().mean())
    assert not timed
    plan = fitted.plan
    assert plan.step_seconds is None and plan.overhead == plan.lower_bound_overhead == 0.0
    assert plan.proven_optimal and peak(fitted, plan) == plan.peak_bytes <= plan.budget_bytes
    assert "no time matters" in plan.summary()
    assert not any("takes" in d.reason or d.seconds for d in plan.decisions)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_with_times_differs_in_nothing_else(timed: list[str]) -> None:
    untimed = irc.optimize(model(), BATCH, "100%").plan
    assert untimed.minimum_budget_bytes < untimed.peak_bytes and not timed
    less = irc.optimize(model(), BATCH, untimed.minimum_budget_bytes, time_limit=0.5).plan
    assert timed and less.step_seconds is not None and less.step_seconds > 0 and less.overhead > 0
    assert less.peak_bytes <= untimed.minimum_budget_bytes
    timed.clear()
    known = irc.optimize(model(), BATCH, "100%").plan
    assert not timed and known.step_seconds == less.step_seconds, "known times are taken"
    assert "no time matters" not in known.summary()
    for name in ("budget_bytes", "peak_bytes", "baseline_peak_bytes", "floor_bytes", "overhead", "strategy"):
        assert getattr(known, name) == getattr(untimed, name), name


def test_annotations_that_cost_time_have_it_measured(timed: list[str]) -> None:
    module = model()
    irc.recompute(module[1])
    plan = irc.optimize(module, BATCH, "200%").plan
    assert timed and plan.step_seconds is not None and plan.overhead > 0


def test_a_call_of_another_size_is_timed_only_if_it_needs_it(timed: list[str]) -> None:
    fitted: Any = irc.optimize(model(), BATCH, "100%", plans=3, time_limit=0.5)
    fitted(BATCH[:4])
    assert len(fitted.irc_plans) == 2 and not timed
    fitted(torch.cat([BATCH, BATCH[:4]]))
    assert len(fitted.irc_plans) == 3 and timed
