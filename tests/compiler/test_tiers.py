"""`swap=` and `--swap`: models that train with copies to a scratch file."""

from __future__ import annotations

import copy
import json
import pickle
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_tier import FakeTier, FakeTierConfig
from torch import Tensor, nn

import irc
from irc.backends.torch.offload import Slot, Ticket
from irc.compiler.plugin_tiers import measured_plugin
from irc.compiler.tiers import device_of, measured_tiers, offer, tier_configs, what_moves
from irc.compiler.training import measured_peak_bytes
from irc.ir import Offload, format_bytes
from irc.passes import OfferTiers, PlanMemory
from irc.tools import cli


class Blocks(nn.Module):
    """Convolutions with BatchNorm and dropout, and a skip connection around each."""

    def __init__(self, count: int = 4, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(count)
        )
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.drop(x.mean((2, 3))))


def blocks(count: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A factory for the command line."""
    torch.manual_seed(0)
    return Blocks(count), (torch.randn(4, 3, 24, 24),)


def test_more_than_a_disk_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(irc.UsageError, match=r"IRC425.*900 TiB.* free") as caught:
        offer(f"disk:{tmp_path}:900TiB", "measured")
    assert str(tmp_path) in caught.value.message
    assert offer(f"disk:{tmp_path}:900TiB", "gtx1080").asked, "another machine has another disk"


def fitted(folder: Path, budget: int | str = "55%", **options: Any) -> tuple[Any, nn.Module, Tensor]:
    """A planned module that may recompute nothing, the same model unplanned, and its input."""
    model, (images,) = blocks()
    other = copy.deepcopy(model)
    for block in model.modules():
        irc.keep(block)
    found = irc.optimize(model, (images,), budget, swap=f"disk:{folder}:1GiB", time_limit=3, **options)
    return found, other, images


def trained(model: nn.Module, images: Tensor, steps: int = 3) -> dict[str, Tensor]:
    """Everything that a few steps of training leave."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        found[f"loss {step}"] = loss.detach().clone()
    found |= {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "generator": torch.get_rng_state()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.slow
def test_a_model_that_swaps_trains_as_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRC_SWAP_CHECK", "1")
    found, other, images = fitted(tmp_path)
    (use,) = found.plan.tiers
    assert use.tier == "disk" and use.capacity_bytes == 1 << 30 and use.out_bytes > 0
    assert f"{format_bytes(use.out_bytes)} to disk" in found.plan.summary()
    assert_same(trained(found, images), trained(other, images))
    assert found.irc_traffic["disk"].out_bytes == 3 * use.out_bytes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_measured_peak_is_the_predicted_one(tmp_path: Path) -> None:
    found, _, images = fitted(tmp_path)
    trained(found, images, 1)
    measured_bytes = measured_peak_bytes(found, (images,), found.plan.static_bytes)
    assert found.plan.tiers and found.plan.peak_bytes <= found.plan.budget_bytes
    assert 0.995 * found.plan.peak_bytes <= measured_bytes <= found.plan.peak_bytes


@pytest.mark.slow
def test_copies_other_shapes_and_pickles_swap_too(tmp_path: Path) -> None:
    found, other, images = fitted(tmp_path)
    again = pickle.loads(pickle.dumps(found))
    beside = copy.deepcopy(found)
    expected = trained(other, images)
    for module in (again, beside):
        assert_same(trained(module, images), expected)
        assert module.irc_traffic["disk"].out_bytes
    small = images[:, :, :16, :16].contiguous()
    model = Blocks()
    model.load_state_dict(other.state_dict())
    found.load_state_dict(other.state_dict())
    assert_same(trained(found, small), trained(model, small))
    assert len(found.irc_plans) == 2


def test_passes_offer_what_was_asked_for(tmp_path: Path) -> None:
    step = offer([f"disk:{tmp_path}:1GiB"], "measured")
    made = measured_tiers(step, torch.device("cpu"))
    assert isinstance(made, OfferTiers)
    (tier,) = made.offered()
    assert (tier.name, tier.capacity_bytes) == ("disk", 1 << 30)
    assert min(tier.out_bytes_per_second, tier.in_bytes_per_second) > 1e6
    (place,) = tier_configs(made, torch.device("cpu"))
    assert (place.kind, place.capacity_bytes) == ("disk", 1 << 30)
    assert getattr(place, "folder", "") == str(tmp_path)
    elsewhere = offer("host:64GiB", "gtx1080")
    assert elsewhere.offered()[0].capacity_bytes == 64 << 30
    (place,) = tier_configs(elsewhere, torch.device("cpu"))
    assert (place.name, place.kind) == ("host", "disk")
    (place,) = tier_configs(elsewhere, torch.device("cuda:0"))
    assert place.kind == "host"
    assert device_of(nn.Linear(2, 2), ()) == torch.device("cpu")
    assert device_of(nn.ReLU(), (torch.zeros(1, device="meta"),)) == torch.device("meta")


def test_a_folder_is_not_taken_apart(tmp_path: Path) -> None:
    """`a+host` is the name of a folder, and not folder a and the host besides."""
    folder = tmp_path / "a+host"
    folder.mkdir()
    (tmp_path / "a").mkdir()
    (place,) = tier_configs(offer(f"disk:{folder}:1GiB", "analytic"), torch.device("cpu"))
    assert getattr(place, "folder", "") == str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("released", ["accumulated", "applied"])
def test_gradients_that_are_released_go_with_copies(released: str, tmp_path: Path) -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    options: dict[str, Any] = (
        {"accumulate_gradients": True} if released == "accumulated" else {"optimizer_in_backward": optimizer}
    )
    found, other, images = fitted(tmp_path, "60%", **options)
    assert found.plan.tiers
    if released == "accumulated":
        assert_same(trained(found, images), trained(other, images))
        return
    expected = trained(other, images)
    torch.manual_seed(1)
    for _ in range(3):
        found(images).square().mean().backward()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_host_is_no_tier_for_a_model_on_the_cpu() -> None:
    model, args = blocks(2)
    with pytest.raises(irc.IrcError) as caught:
        irc.optimize(model, args, "55%", swap="host:1GiB", time_limit=1)
    assert "disk" in (caught.value.help or "")


@pytest.mark.slow
def test_the_command_swaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    scratch, folder = tmp_path / "scratch", tmp_path / "fitted"
    scratch.mkdir()
    command = ["optimize", "test_tiers:blocks", "--budget", "55%", "--time-limit", "3", "--costs", "analytic"]
    assert cli.main([*command, "--swap", f"disk:{scratch}:1GiB", "-o", str(folder)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"copies  [0-9.]+ [KM]iB to disk and", out), out
    described = json.loads((folder / "plan.json").read_text())
    (place,) = described["tier_configs"]
    assert (place["kind"], place["name"], place["folder"]) == ("disk", "disk", str(scratch))
    assert place["capacity_bytes"] == 1 << 30
    assert "offload @" in (folder / "program.irc").read_text()
    assert "copies.offload(" in (folder / "model.py").read_text()
    assert cli.main(["run", str(folder), "--steps", "2", "--check", "--trust"]) == 0
    assert "bit" in capsys.readouterr().out
    scratch.rmdir()
    assert cli.main(["run", str(folder), "--steps", "1"]) != 0
    assert str(scratch) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--swap", "tape:1GiB"], "IRC424", "tape"),
        (["--swap", "disk", "--passes", "cost,plan-memory{budget=60%}"], "IRC400", "--swap"),
        (["--swap", "disk:/nowhere/at/all"], "IRC427", "/nowhere/at/all"),
    ],
)
def test_what_names_no_tier_is_refused_before_anything_is_loaded(
    options: list[str], code: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = [] if "--passes" in options else ["--budget", "60%"]
    assert cli.main(["optimize", "no_such_module:factory", *budget, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error[{code}]: ") and text in captured.err and not captured.out


def test_the_passes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--budget", "60%", "--swap", "host:4GiB", "--costs", "gtx1080"]
    assert cli.main(["optimize", "no_such_module:factory", *options, "--print-passes"]) == 0
    out = capsys.readouterr().out
    assert f"offer-tiers{{swap=host:{4 << 30},machine=gtx1080}}" in out
    assert f"{PlanMemory.name}{{budget=60%" in out
    assert Offload.__name__ not in out


# ---------------------------------------------------------------------------- what lives in a tier


def test_what_moves_is_told_from_where_it_goes() -> None:
    assert what_moves("disk") == (["disk"], "none")
    swap = ["disk:/scratch:1GiB", "optimizer, params"]
    assert what_moves(swap) == (["disk:/scratch:1GiB"], "params+optimizer")
    assert what_moves(["params", "host", "params"]) == (["host"], "params")
    named = "params and optimizer shall live in a tier, and swap= names none"
    with pytest.raises(irc.UsageError, match=named) as caught:
        what_moves("params,optimizer")
    assert caught.value.code == "IRC423"


def test_parameters_live_on_the_disk_where_the_budget_asks_for_it(tmp_path: Path) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))
    x = torch.randn(4, 128)
    swap = [f"disk:{tmp_path}:1GiB", "params"]
    with pytest.raises(irc.UsageError, match="nothing of this model can live in tier disk as optimizer"):
        irc.optimize(module, x, "100%", swap=[swap[0], "optimizer"], costs="analytic")
    fitted = irc.optimize(module, x, "85%", swap=swap, costs="analytic", time_limit=5)
    assert fitted.plan.offloaded_bytes > 0
    assert next(fitted.parameters()) is next(module.parameters())


class _Slow(FakeTier):
    """A tier each of whose copies takes a hundredth of a second at least."""

    def begin_out(self, tensor: Tensor, slot: Slot[Any]) -> Ticket:
        time.sleep(0.01)
        return super().begin_out(tensor, slot)

    def begin_in(self, slot: Slot[Any], tensor: Tensor) -> Ticket:
        time.sleep(0.01)
        return super().begin_in(slot, tensor)


@dataclass(frozen=True, slots=True)
class _SlowConfig(FakeTierConfig):
    def open(self) -> _Slow:
        return _Slow(self)


def test_a_tier_of_another_distribution_is_as_fast_as_its_own_copies() -> None:
    found = measured_plugin(_SlowConfig("slow", 1 << 20), torch.device("cpu"))
    assert found.latency_seconds >= 0.01 and found.capacity_bytes == 1 << 20 and not found.is_duplex
    assert 0 < max(found.out_bytes_per_second, found.in_bytes_per_second) <= (1 << 20) / 0.01


def test_a_measured_peak_counts_what_its_own_call_finds_there() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    fitted: Any = irc.optimize(module, torch.ones(8, 16), "1MiB", costs="analytic", dynamic="batch")
    parameters_bytes = sum(parameter.nbytes for parameter in module.parameters())
    for rows in (8, 64):
        x = torch.ones(rows, 16)
        fitted(x).sum().backward()
        found = irc.measured_peak_bytes(fitted, (x,))
        assert found == measured_peak_bytes(fitted, (x,), parameters_bytes + x.nbytes)
        assert found <= fitted.irc_plans[0].plan.peak_bytes
        module(x).sum().backward()
        assert irc.measured_peak_bytes(module, (x,)) == measured_peak_bytes(
            module, (x,), parameters_bytes + x.nbytes
        )
