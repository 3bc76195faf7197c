"""Plans that were recorded are made again, instruction for instruction.

Costs are analytic, and optimizer steps take what their bytes say, so that a plan depends on the code alone.
If a change means to change plans, record them anew with `IRC_RECORD=1 python -m pytest tests/replay`, and
say in the commit why. `IRC_REPLAY_DIR=DIR` keeps the printed programs there, for a look at what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

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

TIMES = {"planning_seconds", "seconds_to_plan"}


def _made(case: str, folder: Path) -> dict[str, object]:
    """A plan in numbers, and the programs that it is printed as."""
    scratch = folder / "scratch"
    scratch.mkdir()
    model, *options = CASES[case].format(scratch=scratch).split()
    if "--costs" not in options and "--passes" not in options:
        options += ["--costs", "analytic"]
    target = folder / "out"
    factory = f"{HERE / 'models.py'}:{model}"
    assert main(["optimize", factory, *options, "-q", "-o", str(target)]) == 0
    programs = sorted(path for path in target.rglob("*.irc"))
    texts = [path.read_text() for path in programs]
    assert all(text.startswith("irc 1\n") for text in texts)  # the plans were recorded before files said so
    bodies = (text.removeprefix("irc 1\n") for text in texts)
    text = "".join(f"{path.name}\n{body}" for path, body in zip(programs, bodies, strict=True))
    assert programs and text
    keep = os.environ.get("IRC_REPLAY_DIR")
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
        (Path(keep) / f"{case}.irc").write_text(text)
        for path in target.glob("*.json"):
            shutil.copy(path, Path(keep) / f"{case}.{path.name}")
    text = text.replace(str(scratch), "SCRATCH")
    return {"lines": text.count("\n"), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _analytic_step(factory: object, type: TensorType) -> tuple[float, int]:
    return 1e-5 + type.nbytes * 1e-9, 2 * type.nbytes if str(factory).startswith("adamw") else 0


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_plan_is_made_again(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_costs, "_timed", _analytic_step)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)  # no search ends for want of time on a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = _made(case, tmp_path)
    finally:
        torch.set_num_threads(threads)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("IRC_RECORD"):
        RECORDED.write_text(json.dumps(recorded | {case: made}, indent=1, sort_keys=True) + "\n")
        return
    since = TRACED_OTHERWISE_SINCE.get(CASES[case].split()[0])
    if since is not None and torch.__version__ >= since:
        pytest.skip(f"the plan was made; torch {since} traces this model as other operations than torch 2.13")
    assert made == recorded[case]


def test_every_case_is_recorded() -> None:
    assert set(json.loads(RECORDED.read_text())) == set(CASES)
