"""What a model needs, before anything is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from irc.compiler.model_source import load, training_loss
from irc.compiler.request import cost_passes
from irc.compiler.source import Source
from irc.frontends.torch import capture
from irc.ir import liveness
from irc.passes import PassManager, PlanMemory, Program
from irc.tools.model_report import inspect_program


def program(models: Path, name: str) -> Program:
    loaded = load(Source(f"{models}:{name}"))
    captured = capture(loaded.module, loaded.args, loss=training_loss)
    return PassManager(cost_passes("analytic")).run(Program(captured.graph))


@pytest.mark.parametrize("name", ["mlp", pytest.param("noisy", marks=pytest.mark.slow), "tied"])
def test_inspection_agrees_with_the_plan(models: Path, name: str) -> None:
    costed = program(models, name)
    found = inspect_program(costed, 5)
    budget = found.minimum_budget_bytes
    planned = PassManager([PlanMemory(budget, time_limit=0.5)]).run(costed)
    assert planned.plan is not None and planned.plan.peak_bytes <= budget
    assert planned.plan.minimum_budget_bytes == budget
    assert planned.plan.baseline_peak_bytes == found.baseline_peak_bytes
    assert planned.plan.floor_bytes == found.floor_bytes <= budget
    assert costed.costs is not None
    assert liveness(costed.baseline, costed.costs.workspace_bytes).peak_bytes == found.baseline_peak_bytes


@pytest.mark.slow
def test_roles_and_sizes(models: Path) -> None:
    found = inspect_program(program(models, "noisy"), 100)
    assert found.roles["parameter"] == (10, 4 * (16 * 16 + 16) * 4 + 2 * 16 * 4)
    assert found.roles["input"] == (1, 32 * 16 * 4)
    assert found.roles["buffer"][0] == 4, "mean, variance, count of batches, and the scale"
    sizes = [row.nbytes for row in found.largest]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 32 * 16 * 4
    assert any("module layers.0" in row.location for row in found.largest)


def test_a_tied_weight_is_counted_once(models: Path) -> None:
    _, nbytes = inspect_program(program(models, "tied"), 0).roles["parameter"]
    assert nbytes == (20 * 8 + 3 * (8 * 8 + 8)) * 4


def test_the_table(models: Path) -> None:
    found = inspect_program(program(models, "tied"), 2)
    text = found.table()
    assert (
        f"({found.baseline_peak_bytes:,} bytes)" in text and f"({found.minimum_budget_bytes:,} bytes" in text
    )
    assert text.count("float32[") == 2 and "%" in text
    assert "largest" not in replace(found, largest=()).table()
