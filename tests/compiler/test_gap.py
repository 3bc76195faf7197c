"""The gap at which a search stops: every way to a plan takes it, refuses malformed ones, and passes it on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.ir import UsageError
from irc.passes.offload import offload_search
from irc.passes.remat import choose_recomputation

torch.set_num_threads(1)

BATCH = torch.randn(2048, 32)
GAP = 0.25


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers)


def front(gap: Any) -> None:
    irc.pareto(model(), BATCH, budgets=["80%"], gap=gap, costs="analytic", time_limit=0.2)


def graphs(gap: Any) -> None:
    net = model()
    compiled: Any = torch.compile(net, backend=irc.backend("3200KiB", gap=gap, costs="analytic", model=net))
    compiled(BATCH).square().mean().backward()


def stages(gap: Any) -> None:
    irc.pipeline(
        model(), BATCH, "1600KiB", stages=2, micro_batches=2, gap=gap, costs="analytic", time_limit=2
    )


def plain(gap: Any) -> None:
    irc.optimize(model(), BATCH, "75%", gap=gap, costs="analytic", time_limit=0.2)


WAYS = (plain, front, graphs, stages)


def spy(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[float]:
    """The gaps of the searches from here on."""
    seen: list[float] = []
    original = vars(module)[name]

    def search(*args: Any, gap: float, **options: Any) -> Any:
        seen.append(gap)
        return original(*args, gap=gap, **options)

    monkeypatch.setattr(module, name, search)
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_the_gap_reaches_the_search(way: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    by_cuts = spy(monkeypatch, choose_recomputation, "proved_by_cuts")
    by_search = spy(monkeypatch, choose_recomputation, "search")
    torch.compiler.reset()
    way(GAP)
    assert by_cuts and set(by_cuts + by_search) == {GAP}


def test_the_gap_reaches_the_search_for_what_lives_in_a_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = spy(monkeypatch, offload_search, "search_with_copies")
    irc.optimize(
        model(),
        BATCH,
        "75%",
        gap=GAP,
        costs="analytic",
        time_limit=0.5,
        optimizer_in_backward=lambda params: torch.optim.SGD(params, lr=0.1),
        swap=[f"disk:{tmp_path}:1MiB", "params"],
    )
    assert seen and set(seen) == {GAP}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gap", [-0.1, 1.0, "none", float("nan")])
def test_a_malformed_gap_is_refused(way: Callable[[Any], None], gap: Any) -> None:
    with pytest.raises(UsageError) as raised:
        way(gap)
    assert raised.value.code == "IRC403" and "gap" in raised.value.message


def loss(result: Tensor) -> Tensor:
    return result.square().mean()


@pytest.mark.slow
def test_a_front_of_another_gap_is_another_front(tmp_path: Path) -> None:
    options: dict[str, Any] = {"costs": "analytic", "time_limit": 0.2, "loss": loss, "folder": tmp_path}
    irc.pareto(model(), BATCH, budgets=["90%"], **options)
    with pytest.raises(UsageError, match="IRC441"):
        irc.pareto(model(), BATCH, budgets=["90%"], gap=GAP, **options)
