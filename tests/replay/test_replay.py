"""Plans are no worse than the recorded ones: overhead, peak, bound and smallest budget.

Costs are analytic, and optimizer steps take what their bytes say, so that a plan depends on the code alone.
A plan may be another one. `IRC_RECORD=1 python -m pytest tests/replay` records them; the commit says
why, if it is worse. `IRC_REPLAY_DIR=DIR` keeps plans and printed programs, to compare them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from irc.ir import TensorType
from irc.passes.costs import optimizer_costs
from irc.tools.cli import main

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"

CASES: dict[str, str] = {
    "mlp-100": "mlp --budget 100%",
    "mlp-60": "mlp --budget 60%",
    "mlp-low": "mlp --budget 320KB",
    "mlp-eviction": "mlp --budget 60% --strategy eviction",
    "mlp-sqrt": "mlp --budget 70% --strategy sqrt-n",
    "mlp-every": "mlp --budget 90% --strategy every-3",
    "mlp-min-cut": "mlp --budget 80% --strategy min-cut",
    "mlp-in-flight": "mlp --budget 75% --forwards-in-flight 2",
    "mlp-keep": "mlp --budget 80% --keep 3 --recompute 5",
    "mlp-swap": "mlp --budget 330000 --swap disk:{scratch}:1GiB --costs gtx1080",
    "unet-lms": "unet --budget 1800000 --swap disk:{scratch}:1GiB --strategy lms --costs gtx1080",
    "frozen": "frozen --budget 310000",
    "heavy-adamw": "heavy --budget 100% --optimizer adamw:lr=1e-3",
    "heavy-params": "heavy --budget 70% --optimizer adamw:lr=1e-3 --swap disk:{scratch}:1GiB"
    " --swap params,optimizer",
    "resnet-100": "resnet --budget 100%",
    "resnet-70": "resnet --budget 70%",
    "resnet-low": "resnet --budget 530000",
    "resnet-swap": "resnet --budget 660000 --swap host:1GiB --costs gtx1080",
    "resnet-block": "resnet --budget 80% --strategy per-block",
    "unet-70": "unet --budget 70%",
    "unet-none": "unet --budget 90% --strategy keep-none",
    "unet-sgd": "unet --budget 75% --optimizer sgd:lr=0.1",
    "language-80": "language --budget 80%",
    "language-70": "language --budget 70% --strategy eviction",
    "dropping-80": "dropping --budget 80%",
    "recurrent": "recurrent --budget 97000 --strategy eviction",
    "passes": "mlp --passes split-convolutions,cost{{profile=v100}},plan-memory{{budget=60%}}",
    "tiles": "vocabulary --passes tile-rows{{tiles=4}},cost{{profile=cpu}},plan-memory{{budget=40%}}",
    "front-mlp": "pareto mlp --budgets 90%,75%,60%",
    "front-unet": "pareto unet --points 6",
    "front-swap": "pareto resnet --budgets 90%,70% --swap host:1GiB --costs gtx1080",
    "pipe-1f1b": "language --budget 4MiB --stages 2 --micro-batches 4",
    "pipe-gpipe": "mlp --budget 4MiB --stages 3 --micro-batches 4 --schedule gpipe --checkpoint always",
    "pipe-zbv": "unet --budget 4MiB --stages 2 --micro-batches 4 --schedule zbv",
    "pipe-interleaved": "language --budget 4MiB --stages 2 --micro-batches 4 --schedule interleaved",
    "pipe-adamw": "mlp --device 4MiB --device 2MiB@0.5 --micro-batches 2 --optimizer adamw:lr=1e-3",
}

TRACED_OTHERWISE_SINCE = {"language": "2.14", "dropping": "2.15"}
"""Models that a torch, from this version on, traces as other operations than 2.13, which made the record.

Since 2.14 a dropout with nothing to drop makes no copy; since 2.15 the result of a linear layer of three axes
is an `_unsafe_view`, and was a `view`.
"""

Row = dict[str, float]


def _planned(case: str, folder: Path) -> dict[str, Row]:
    """The plans of a case in numbers: one, or one for each budget of a front."""
    scratch, target = folder / "scratch", folder / "out"
    scratch.mkdir()
    words = CASES[case].format(scratch=scratch).split()
    command, model, *options = words if words[0] == "pareto" else ("optimize", *words)
    if "--costs" not in options and "--passes" not in options:
        options += ["--costs", "analytic"]
    factory = f"{HERE / 'models.py'}:{model}"
    assert main([command, factory, *options, "-q", "-o", str(target)]) == 0
    if directory := os.environ.get("IRC_REPLAY_DIR"):
        shutil.copytree(target, Path(directory) / case, dirs_exist_ok=True)
    (file,) = (target / name for name in _ROWS if (target / name).exists())
    return _ROWS[file.name](json.loads(file.read_text()))


def _plan(plan: Any) -> dict[str, Row]:
    return {
        "plan": {
            "peak_bytes": plan["peak_bytes"],
            "overhead": plan["overhead"],
            "bound": plan["lower_bound_overhead"],
            "minimum_bytes": plan["minimum_budget_bytes"],
        }
    }


def _front(front: Any) -> dict[str, Row]:
    row = {"minimum_bytes": front["minimum_bytes"], "peak_bytes": 0, "overhead": 0.0, "bound": 0.0}
    points = {
        str(point["budget_bytes"]): {key: point[key] for key in ("peak_bytes", "overhead", "bound")}
        for point in front["points"]
    }
    return {"front": row} | points


def _pipeline(plan: Any) -> dict[str, Row]:
    """The times of a step stand for overheads."""
    row = {"overhead": plan["step_seconds"], "bound": plan["bound_seconds"]}
    return {"plan": row | {"peak_bytes": max(plan["peak_bytes"])}}


_ROWS = {"plan.json": _plan, "front.json": _front, "pipeline.json": _pipeline}


def _worse(row: Row, recorded: Row) -> list[str]:
    """Names what is worse in a plan than in the recorded one; a peak is, if the plan is not faster for it."""

    def is_above(name: str, sign: int = 1) -> bool:
        difference = sign * (row.get(name, 0) - recorded.get(name, 0))
        return difference > _ROUNDING * abs(recorded.get(name, 0))

    worse = [name for name in ("overhead", "minimum_bytes") if is_above(name)]
    worse += ["bound"] * is_above("bound", -1)
    return worse + ["peak_bytes"] * (is_above("peak_bytes") and not is_above("overhead", -1))


_ROUNDING = 1e-6
"""As a fraction: sums of seconds in another order."""


def _analytic_step(factory: object, type: TensorType) -> tuple[float, int]:
    return 1e-5 + type.nbytes * 1e-9, 2 * type.nbytes if str(factory).startswith("adamw") else 0


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_plan_is_made_again(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_costs, "_timed", _analytic_step)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)  # no search ends for want of time on a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = _planned(case, tmp_path)
    finally:
        torch.set_num_threads(threads)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("IRC_RECORD"):
        RECORDED.write_text(json.dumps(recorded | {case: rows}, indent=1, sort_keys=True) + "\n")
        return
    since = TRACED_OTHERWISE_SINCE.get(CASES[case].split()[0])
    if since is not None and torch.__version__ >= since:
        pytest.skip(f"the plan was made; torch {since} traces this model as other operations than torch 2.13")
    assert rows.keys() == recorded[case].keys()
    worse = {name: _worse(row, recorded[case][name]) for name, row in rows.items()}
    assert not any(worse.values()), f"{worse}: {rows}, and {recorded[case]} was recorded"


def test_every_case_is_recorded() -> None:
    assert set(json.loads(RECORDED.read_text())) == set(CASES)


def test_what_is_worse_is_told() -> None:
    row = {"peak_bytes": 100, "overhead": 0.1, "bound": 0.05, "minimum_bytes": 80}
    assert _worse(row, row) == []
    assert _worse(row | {"overhead": 0.2}, row) == ["overhead"]
    assert _worse(row | {"bound": 0.04}, row) == ["bound"]
    assert _worse(row | {"minimum_bytes": 90}, row) == ["minimum_bytes"]
    assert _worse(row | {"peak_bytes": 110}, row) == ["peak_bytes"]
    assert _worse(row | {"peak_bytes": 110, "overhead": 0.05, "bound": 0.05}, row) == []
