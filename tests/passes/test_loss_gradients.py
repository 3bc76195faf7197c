"""Gradients of loss heads that forward computes: the original's numbers, and no logits made twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.language import LOSSES, WORDS, Language, batch, gradients
from torch import Tensor, nn

from irc.compiler.optimize import optimize_module
from irc.compiler.request import Request
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import capture
from irc.ir import Graph, Region, Trait, verify_graph
from irc.passes import LossGradientsInForward, PassManager, Program, TileRows, parse_passes

IN_FORWARD = sorted(
    loss
    for loss, options in LOSSES.items()
    if options.get("reduction") != "none" and not options.keys() & {"label_smoothing", "square", "weighted"}
)
"""Losses whose gradient of the logits is that of one cross entropy."""


IN_TILES = "loss-gradients-in-forward,tile-rows"


def fit(
    module: nn.Module, args: tuple[Tensor, ...], *, tiles: int = 3, budget: str = "100%", released: str = ""
) -> Any:
    rewrites = f"{IN_TILES}{{tiles={tiles}}}{released}"
    passes = parse_passes(f"{rewrites},cost{{profile=cpu}},plan-memory{{budget={budget}}}")
    return optimize_module(copy.deepcopy(module), args, Request.of_passes(passes)).module


def in_64_bits(loss: str) -> tuple[Language, tuple[Tensor, Tensor]]:
    module, args = Language(**LOSSES[loss]).double(), batch()
    module.upcast = False
    if loss == "padding":
        args[1].clamp_min_(0)
    return module, args


def graph_of(loss: str, *, tiles: int = 0, dtype: torch.dtype = torch.float32) -> Graph:
    steps = [LossGradientsInForward(), *([TileRows(tiles)] if tiles else [])]
    module = Language(**LOSSES[loss]).to(dtype)
    graph = PassManager(steps).run(Program(capture(module, batch()).graph)).graph
    verify_graph(graph)
    return graph


def hold(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-10, atol=1e-12, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("tiles", [3])
def test_a_step_has_the_numbers_of_the_original(loss: str, tiles: int) -> None:
    module, args = in_64_bits(loss)
    fitted = fit(module, args, tiles=tiles)
    (expected, wanted), (found, given) = gradients(module, *args), gradients(fitted, *args)
    hold({"loss": expected, **wanted}, {"loss": found, **given})
    summed = "embedding.weight" if loss == "tied" else "head.weight"
    assert summed in {each.name for each in fitted.plan.reordered}
    assert measured_peak_bytes(fitted, args, fitted.plan.static_bytes) <= fitted.plan.peak_bytes


@given(st.floats(-1e3, 1e3), st.integers(2, 9), st.sampled_from(IN_FORWARD))
@examples(5)
def test_gradients_are_multiplied_by_that_of_the_loss(scale: float, tiles: int, loss: str) -> None:
    module, args = in_64_bits(loss)
    fitted = fit(module, args, tiles=tiles)
    found: list[dict[str, Tensor]] = []
    for each in (module, fitted):
        each.zero_grad()
        (scale * each(*args)).backward()
        found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    hold(*found)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_forward_computes_the_gradients_of_one_mean_or_sum(loss: str) -> None:
    graph = graph_of(loss)
    products = [n for n in graph.nodes if n.op in ("aten.mm.default", "aten.nll_loss_backward.default")]
    moved = [n for n in products if n.region is Region.FORWARD and n.values[0].type.shape[-1] != 1]
    assert any(n.op == "aten.nll_loss_backward.default" for n in moved) == (loss in IN_FORWARD)
    scaled = [n for n in graph.nodes if n.op == "aten.mul_.Tensor"]
    assert len(scaled) == (0 if loss not in IN_FORWARD else 1 if "no bias" in loss or loss == "tied" else 2)


def test_each_tile_of_logits_is_made_once_whatever_the_budget() -> None:
    module, args = Language(), batch()
    passes = parse_passes(f"{IN_TILES}{{tiles=8}},cost{{profile=cpu}},plan-memory{{budget=24%}}")
    schedule = PassManager(passes).run(Program(capture(module, args).graph)).schedule
    assert schedule is not None
    rows = args[0].numel() // 8
    logits = [
        n
        for n in schedule.computed
        if n.op == "aten.addmm.default" and n.values[0].type.shape == (rows, WORDS)
    ]
    assert len(logits) == len(set(logits)) == 8


def test_a_retained_graph_is_scaled_anew_by_each_backward() -> None:
    module, args = Language().double(), batch()
    fitted = fit(module, args)
    found: list[dict[str, Tensor]] = []
    for each in (module, fitted):
        each.zero_grad()
        loss = each(*args)
        for scale in (2.0, 3.0):
            (scale * loss).backward(retain_graph=scale == 2.0)
        found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    hold(*found)


@pytest.mark.parametrize("loss", ["bias", "sum", "weighted", "weighted, shifted"])
def test_rows_that_do_not_count_or_weigh_nothing_have_the_gradients_of_the_original(loss: str) -> None:
    module, (words, labels) = Language(**LOSSES[loss]).double(), batch()
    fitted = fit(module, (words, labels))
    for classes in (labels.fill_(-100), labels.fill_(3)):
        (_, wanted), (_, found) = (gradients(each, words, classes) for each in (module, fitted))
        hold(wanted, found)


def test_gradients_are_released_once_they_are_scaled() -> None:
    module, args = Language(bias=False), batch()
    fitted = fit(module, args, released=",release-gradients")
    (_, wanted), (_, found) = gradients(module, *args), gradients(fitted, *args)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_gradients_in_sixteen_bits_that_need_a_scale_stay_in_backward() -> None:
    graph = graph_of("upcast", dtype=torch.float16)
    assert not any(n.op == "aten.mul_.Tensor" for n in graph.nodes)
    assert any(n.op == "aten.mul_.Tensor" for n in graph_of("upcast", dtype=torch.bfloat16).nodes)


def test_sums_in_tiles_are_made_once_and_written_in_order() -> None:
    graph = graph_of("bias", tiles=4)
    writes = [n for n in graph.nodes if Trait.EFFECT in n.traits]
    assert {n.region for n in writes} == {Region.FORWARD, Region.BACKWARD}
    for write in writes:
        maker = graph.producers[write.operands[0].storage]
        assert maker.traits & {Trait.PINNED} or maker.region is Region.BACKWARD
    assert WORDS * 4 * 4 * 32 not in {s.nbytes for s in graph.storages}


def test_gradients_that_are_there_already_count_beside_those_of_forward() -> None:
    module, args = Language(bias=False), batch()
    fitted = fit(module, args, tiles=8)
    plan = fitted.plan
    measured_bytes = measured_peak_bytes(fitted, args, plan.static_bytes, with_gradients=True)
    assert plan.peak_bytes < measured_bytes <= plan.peak_with_gradients_bytes
