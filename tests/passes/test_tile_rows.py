"""Loss heads in tiles of rows: the same losses, sums within rounding, and no more than a tile of logits."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import examples
from support.language import LOSSES, WIDTH, WORDS, Language, batch, gradients
from torch import Tensor, nn
from torch.nn import functional

import irc
from irc.compiler.optimize import optimize_module
from irc.compiler.request import Request
from irc.compiler.tiles import tiles_of
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import capture
from irc.ir import BudgetError, Reordered, Trait, UsageError, print_graph, reordered, verify_graph
from irc.ir.pipeline.plan import PipelinePlan
from irc.passes import PassManager, Program, TileRows, parse_passes, row_regions
from irc.tools.cli import main


def hold_to_class(fitted: Any, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Checks that what the plan does not name has the same bits, and the rest the same numbers."""
    named = {each.name for each in fitted.plan.reordered}
    tied = {name for name, _ in fitted.named_parameters(remove_duplicate=False)}
    assert expected.keys() == found.keys() and named <= expected.keys() | tied | {"input 0"}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
        assert name in named or torch.equal(found[name], tensor), name


def in_tiles(module: nn.Module, args: tuple[Tensor, ...], tiles: int) -> Program:
    return PassManager([TileRows(tiles)]).run(Program(capture(module, args).graph))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_in_tiles_trains_as_the_whole_one(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irc.compiler.tiles._LEAST_BYTES", 1 << 14)
    module, args = Language(**LOSSES[loss]), batch()
    if loss == "padding":
        args[1].clamp_min_(0)
    baseline = irc.optimize(copy.deepcopy(module), args, "100%", costs="analytic").plan.baseline_peak_bytes
    fitted = irc.optimize(copy.deepcopy(module), args, baseline * 6 // 10, costs="analytic", exact="sums")
    (expected, wanted), (found, given) = gradients(module, *args), gradients(fitted, *args)
    hold_to_class(fitted, {"output 0": expected, **wanted}, {"output 0": found, **given})
    summed = "embedding.weight" if loss == "tied" else "head.weight"
    assert summed in {each.name for each in fitted.plan.reordered if each.terms or "weighted" in loss}
    assert measured_peak_bytes(fitted, args, fitted.plan.static_bytes) <= fitted.plan.peak_bytes


@pytest.mark.parametrize("tiles", [2, 3, 7, 500])
def test_losses_have_the_same_bits(tiles: int) -> None:
    """Each row's loss is made by the same kernels, and all are summed in the same order."""
    module, args = Language(), batch()
    program = f"tile-rows{{tiles={tiles}}},cost{{profile=cpu}},plan-memory{{budget=100%}}"
    fitted = optimize_module(copy.deepcopy(module), args, Request.of_passes(parse_passes(program))).module
    (expected, wanted), (found, given) = gradients(module, *args), gradients(fitted, *args)
    hold_to_class(fitted, {"output 0": expected, **wanted}, {"output 0": found, **given})


@given(st.integers(1, 5), st.integers(1, 9), st.integers(2, 12), st.sampled_from(sorted(LOSSES)))
@examples(8)
def test_tiles_hold_all_rows_once(rows: int, length: int, tiles: int, loss: str) -> None:
    module, args = Language(**LOSSES[loss]), batch(rows, length)
    whole = capture(module, args).graph
    program = in_tiles(module, args, tiles)
    verify_graph(program.graph)
    if rows * length < 2:
        assert len(program.graph.nodes) == len(whole.nodes)
        return
    (head,) = row_regions(whole)
    logits = [n.values[0].type.shape for n in program.graph.nodes if n.op == "aten._log_softmax.default"]
    assert head.rows == rows * length == sum(shape[0] for shape in logits)
    length = -(-head.rows // min(tiles, head.rows))
    assert len(logits) <= tiles and max(shape[0] for shape in logits) == length
    largest = max(s.nbytes for s in program.graph.storages) // 4
    assert largest <= max(WORDS * WIDTH, WORDS * length)
    sums = [n for n in program.graph.nodes if Trait.EFFECT in n.traits]
    assert all(node.operands[0].storage is node.values[0].storage for node in sums)


class Perceptrons(nn.Module):
    """Two wide layers, one after the other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 4 * WIDTH, bias=False)
        if kind == "adapters":
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            hidden = self.up(x)
            if self.kind == "gated":
                hidden = functional.silu(self.gate(x)) * hidden
            elif self.kind == "adapters":
                hidden = functional.silu(hidden + 2 * self.high(self.low(x)))
            elif self.kind == "dropout":
                hidden = functional.dropout(functional.relu(hidden), 0.1)
            else:
                hidden = functional.gelu(hidden, approximate="tanh" if self.kind == "tanh" else "none")
            x = x + self.down(hidden)
        return x.square().mean()


@pytest.mark.parametrize("kind", ["gated", "gelu", "tanh", "adapters", "dropout"])
@pytest.mark.parametrize("tiles", [2, 5])
def test_wide_layers_in_tiles_train_as_whole_ones(kind: str, tiles: int) -> None:
    module, args = Perceptrons(kind), (torch.randn(3, 67, WIDTH, requires_grad=True),)
    program = f"replay-draws,tile-rows{{tiles={tiles}}},cost{{profile=cpu}},plan-memory{{budget=100%}}"
    request = Request.of_passes(parse_passes(program))
    fitted: Any = optimize_module(copy.deepcopy(module), args, request).module
    with torch.random.fork_rng():
        expected, wanted = gradients(module, *args)
    found, given = gradients(fitted, *args)
    hold_to_class(fitted, {"output 0": expected, **wanted}, {"output 0": found, **given})
    assert ("up.weight" in {each.name for each in fitted.plan.reordered}) == (kind != "adapters")
    assert measured_peak_bytes(fitted, args, fitted.plan.static_bytes) <= fitted.plan.peak_bytes


def test_wide_layers_are_tiled_with_the_head_once_they_are_wider_than_a_tile_of_it() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = Perceptrons("gelu"), nn.Linear(WIDTH, 8 * 4 * WIDTH)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            hidden = x + self.trunk.down(functional.gelu(self.trunk.up(x)))
            return functional.cross_entropy(self.head(hidden), labels)

    module, args = Both(), (torch.randn(64, WIDTH), torch.randint(0, 8, (64,)))
    assert [(r.rows, r.wide_bytes) for r in row_regions(capture(module, args).graph)] == [
        (64, 64 * 8 * 4 * WIDTH * 4),
        (64, 64 * 4 * WIDTH * 4),
    ]
    for tiles, most in ((8, 64), (16, 32), (32, 16)):
        program = in_tiles(module, args, tiles)
        verify_graph(program.graph)
        wide = [n.values[0].type.shape[0] for n in program.graph.nodes if n.op == "aten.gelu.default"]
        assert max(wide) == most and sum(wide) == 64


class Attention(nn.Module):
    """Attention by products of matrices, with masks of many shapes."""

    def __init__(self, mask: str, *, drop: float = 0.0) -> None:
        super().__init__()
        self.mask, self.drop = mask, drop
        self.split, self.join = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, 3, 8).transpose(1, 2) for part in self.split(x).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) / 8**0.5
        if self.mask == "one":
            scores = scores + added[:1, None]
        elif self.mask == "each":
            scores = scores + added[:, None]
        elif self.mask == "last":
            scores = scores + added[:, None, :1]
        elif self.mask == "square":
            scores = scores.masked_fill(added[0] > 1, -1e9)
        weights = functional.dropout(scores.softmax(-1), self.drop)
        return self.join((weights @ value).transpose(1, 2).reshape(x.shape)).square().mean()


@pytest.mark.parametrize("mask", ["none", "one", "each", "last", "square"])
@pytest.mark.parametrize("tiles", [2, 4])
def test_heads_of_attention_in_tiles_keep_all_bits(mask: str, tiles: int) -> None:
    module = Attention(mask, drop=0.1)
    args = torch.randn(4, 40, 24, requires_grad=True), torch.randn(4, 40, 40)
    program = (
        f"replay-draws,tile-rows{{tiles={tiles},exact=true}},cost{{profile=cpu}},plan-memory{{budget=100%}}"
    )
    request = Request.of_passes(parse_passes(program))
    captured = Program(capture(module, args).graph)
    (region,) = row_regions(PassManager(parse_passes("replay-draws")).run(captured).graph)
    shared = mask in ("each", "last")
    assert (region.rows, region.group, region.sums) == (12, 3 if shared else 12, [])
    fitted: Any = optimize_module(copy.deepcopy(module), args, request).module
    with torch.random.fork_rng():
        expected, wanted = gradients(module, *args)
    found, given = gradients(fitted, *args)
    assert torch.equal(found, expected) and fitted.plan.reordered == ()
    assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    assert measured_peak_bytes(fitted, args, fitted.plan.static_bytes) <= fitted.plan.peak_bytes


@pytest.mark.parametrize(("tiles", "number"), [(4, 1), (8, 16), (16, 16), (32, 32), (48, 48)])
def test_masks_of_many_images_do_not_make_many_more_tiles(tiles: int, number: int) -> None:
    """A tile has heads of one image alone: with 16 of these, 4 tiles cannot be had, and nothing is tiled."""
    args = torch.randn(16, 20, 24), torch.randn(16, 20, 20)
    program = in_tiles(Attention("each"), args, tiles)
    assert sum(node.op == "aten._softmax.default" for node in program.graph.nodes) == number


def test_attention_fits_where_its_scores_do_not() -> None:
    module, args = Attention("each"), (torch.randn(8, 512, 24), torch.randn(8, 512, 512))
    fitted = irc.optimize(copy.deepcopy(module), args, "60%", costs="analytic")
    assert fitted.plan.overhead < 0.05 and fitted.plan.reordered == ()
    (expected, wanted), (found, given) = gradients(module, *args), gradients(fitted, *args)
    assert torch.equal(found, expected) and all(torch.equal(given[name], wanted[name]) for name in wanted)
    with pytest.raises(BudgetError, match="IRC204"):
        irc.optimize(module, args, "60%", costs="a100")


def test_another_batch_takes_over_the_schedule_of_tiles() -> None:
    module, args = Attention("one"), (torch.randn(8, 512, 24), torch.randn(8, 512, 512))
    fitted: Any = irc.optimize(module, args, "60%", costs="analytic", dynamic="batch")
    assert fitted(args[0][:6], args[1][:6]).requires_grad
    smaller, _ = fitted.irc_plans
    assert smaller.plan.overhead < 0.05
    assert smaller.plan.strategy == f"{fitted.plan.strategy}, carried over"


class Whole(nn.Module):
    """A head whose logits are needed as a whole, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(x)
        if self.way == "mixed":
            logits = logits - logits.mean(0, keepdim=True)
        if self.way == "sorted":
            logits = logits.sort(0).values
        loss = functional.cross_entropy(logits, labels)
        return (loss, logits) if self.way == "output" else loss


@pytest.mark.parametrize("way", ["mixed", "sorted", "output"])
def test_heads_that_need_all_rows_stay_whole(way: str) -> None:
    args = torch.randn(8, WIDTH), torch.randint(0, WORDS, (8,))
    graph = capture(Whole(way), args, loss=lambda out: out[0] if way == "output" else out).graph
    assert not row_regions(graph)
    assert PassManager([TileRows(2)]).run(Program(graph)).graph is graph


class Named(nn.Module):
    """A loss whose classes are the last of three dimensions, named by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = torch.log_softmax(self.head(x), dim=2)
        return functional.nll_loss(scores.flatten(0, 1), labels.flatten())


class Scores(nn.Module):
    """Scores of rows by a table that is made in the step, with as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(x @ self.table(x).T, labels)


class Recurrent(nn.Module):
    """A head above many steps, one after the other."""

    def __init__(self, *, steps: int = 0, words: int = WORDS, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.steps = steps
        self.head = nn.Linear(WIDTH, words, dtype=dtype)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = x.tanh()
        return functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("tiles", [2, 5])
def test_a_dimension_is_named_from_either_end(tiles: int) -> None:
    module, args = Named(), (torch.randn(2, 5, WIDTH), torch.randint(0, WORDS, (2, 5)))
    program = f"tile-rows{{tiles={tiles}}},cost{{profile=cpu}},plan-memory{{budget=100%}}"
    assert row_regions(capture(module, args).graph)
    fitted = optimize_module(copy.deepcopy(module), args, Request.of_passes(parse_passes(program))).module
    (expected, wanted), (found, given) = gradients(module, *args), gradients(fitted, *args)
    hold_to_class(fitted, {"output 0": expected, **wanted}, {"output 0": found, **given})


@pytest.mark.parametrize("rows", [WIDTH, WIDTH + 1])
def test_a_sum_over_tiles_is_read_by_none_of_them(rows: int) -> None:
    args = torch.randn(rows, WIDTH), torch.randint(0, rows, (rows,))
    program = in_tiles(Scores(), args, 4)
    verify_graph(program.graph)


def test_a_head_above_a_long_trunk_is_tiled() -> None:
    args = torch.randn(8, WIDTH), torch.randint(0, WORDS, (8,))
    graph = capture(Recurrent(steps=500), args).graph
    assert len(row_regions(graph)) == 1 and len(graph.nodes) > sys.getrecursionlimit() / 2


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 16), (torch.float32, 32)])
def test_sums_in_16_bits_are_of_few_tiles(
    dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irc.compiler.tiles._LEAST_BYTES", 1)
    args = torch.randn(32, WIDTH, dtype=dtype), torch.randint(0, WORDS, (32,))
    assert max(tiles_of(capture(Recurrent(dtype=dtype), args).graph, Request.of("60%", exact="sums"))) == most


def test_heads_are_whole_unless_sums_may_differ() -> None:
    module, args = Language(), batch()
    plan = irc.optimize(module, args, "100%", costs="analytic").plan
    assert not plan.reordered
    args = batch(rows=16, length=128)
    for exact in (True, "sums"):
        with pytest.raises(BudgetError) as refused:
            irc.optimize(module, args, plan.static_bytes + 1, costs="analytic", exact=exact)
        assert ('exact="sums"' in str(refused.value.help)) == (exact is True)
    with pytest.raises(UsageError, match=r"IRC406.*exact is 'all'"):
        irc.optimize(module, args, "100%", exact="all")
    with pytest.raises(UsageError, match=r"IRC413.*1 tiles divide nothing"):
        TileRows(1).run(Program(capture(module, args).graph))


@pytest.mark.slow
@given(st.integers(2, 40), st.integers(2, 9), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@examples(12)
def test_a_sum_over_tiles_is_off_by_its_bound_at_most(rows: int, tiles: int, dtype: torch.dtype) -> None:
    module = Recurrent(words=50, dtype=dtype)
    args = torch.randn(rows, WIDTH, dtype=dtype), torch.randint(0, 50, (rows,))
    program = f"tile-rows{{tiles={tiles}}},cost{{profile=cpu}},plan-memory{{budget=100%}}"
    fitted: Any = optimize_module(
        copy.deepcopy(module), args, Request.of_passes(parse_passes(program))
    ).module
    (_, wanted), (_, given) = gradients(module, *args), gradients(fitted, *args)
    (bound,) = {each.bound for each in fitted.plan.reordered if each.name == "head.weight"} or {0.0}
    if bound is None:
        return  # products of so few rows add in another order, and so the terms are not the same
    terms = module.head(args[0]).softmax(-1) - functional.one_hot(args[1], 50)
    magnitudes = (terms.double().abs() / rows).T @ args[0].double().abs()
    off = (given["head.weight"].double() - wanted["head.weight"].double()).abs()
    assert bool((off <= bound * magnitudes).all())


class Frozen(nn.Module):
    """Words of a frozen table and head, with a layer between that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language().requires_grad_(False)
        self.language.layer.requires_grad_(True)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return self.language(words, labels)


def test_a_frozen_head_is_tiled_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irc.compiler.tiles._LEAST_BYTES", 1 << 14)
    module, args = Frozen(), batch()
    baseline = irc.optimize(copy.deepcopy(module), args, "100%", costs="analytic").plan.baseline_peak_bytes
    fitted = irc.optimize(copy.deepcopy(module), args, baseline * 6 // 10, costs="analytic")
    assert not fitted.plan.reordered and not fitted.plan.roundings
    (expected, wanted), (found, given) = gradients(module, *args), gradients(fitted, *args)
    assert torch.equal(found, expected) and len(given) == 2
    assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    with pytest.raises(BudgetError, match="IRC204"):  # on a described machine no kernels are compared
        irc.optimize(copy.deepcopy(module), args, baseline * 6 // 10, costs="a100")


def test_kernels_that_add_in_another_order_on_fewer_rows_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results, and all that is computed from these, are named, and nothing is tiled unasked."""
    args = batch()
    graph = capture(Frozen(), args).graph
    monkeypatch.setattr("irc.passes.rewrites.compare_rows._compared", {})
    monkeypatch.setattr("irc.torch_support.bits.same_bits", lambda a, b: a.dim() != 2 or a.shape[1] != WORDS)
    program = PassManager([TileRows(2)]).run(Program(graph))
    assert {each.name for each in reordered(program.graph)} == {
        "output 0",
        "language.layer.weight",
        "language.layer.bias",
    }
    assert all(each.bound is None for each in reordered(program.graph))
    assert PassManager([TileRows(2, exact=True)]).run(Program(graph)).graph is graph


class Odd(nn.Module):
    """A step of attention, a wide layer and a head, whose rows need not begin where lines of a cache do."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.split, self.join = nn.Linear(width, 72, dtype=dtype), nn.Linear(24, width, dtype=dtype)
        self.up, self.down = (
            nn.Linear(width, 3 * width, dtype=dtype),
            nn.Linear(3 * width, width, dtype=dtype),
        )
        self.head = nn.Linear(width, 4 * width + 1, dtype=dtype)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.split(x).chunk(3, -1)
        )
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        x = x + self.join((weights @ value).transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(x)))
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.slow
@given(
    st.sampled_from([7, 16, 33, 40]),
    st.sampled_from([5, 17, 32, 41]),
    st.integers(1, 3),
    st.integers(2, 9),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@examples(16)
@example(16, 41, 3, 2, True, False, torch.float32)
@example(33, 41, 3, 9, True, True, torch.float32)
@example(7, 5, 3, 3, False, False, torch.float32)
def test_tiles_of_any_size_keep_the_bits_of_what_is_not_named(
    width: int, length: int, batch: int, tiles: int, exact: bool, frozen: bool, dtype: torch.dtype
) -> None:
    """Products add in another order where rows begin elsewhere in a line of the cache."""
    module = Odd(width, dtype).requires_grad_(not frozen)
    module.split.requires_grad_(True)
    args = torch.randn(batch, length, width, dtype=dtype), torch.randint(0, width, (batch, length))
    tile = f"tile-rows{{tiles={tiles},exact={str(exact).lower()}}}"
    request = Request.of_passes(parse_passes(f"{tile},cost{{profile=cpu}},plan-memory{{budget=100%}}"))
    fitted: Any = optimize_module(copy.deepcopy(module), args, request).module
    (expected, wanted), (found, given) = gradients(module, *args), gradients(fitted, *args)
    named = {each.name for each in fitted.plan.reordered}
    assert not (exact and named) and given.keys() == wanted.keys()
    off = {name for name, tensor in wanted.items() if not torch.equal(given[name], tensor)}
    assert off <= named and (torch.equal(found, expected) or "output 0" in named)


def test_what_is_too_large_to_run_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(Frozen(), batch()).graph
    monkeypatch.setattr("irc.passes.rewrites.compare_rows._compared", {})
    for most_bytes, count in ((1000, 0), (1 << 30, 1)):
        tile = TileRows(2, exact=True, most_bytes=most_bytes)
        found = PassManager([tile]).run(Program(graph)).graph
        assert (found is not graph) == count


def test_a_head_in_tiles_reads_as_text() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 2))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(functional.linear(x, self.weight), labels)

    args = torch.randn(3, 2, requires_grad=True), torch.randint(0, 5, (3,))
    text = print_graph(in_tiles(Small(), args, 2).graph)
    lines = [line.partition(" -> ")[0].strip() for line in text.splitlines() if "aten." in line]
    assert [line for line in lines if "mm" in line or "cat" in line] == GOLDEN.strip().splitlines()


GOLDEN = """
mm_tile0 = aten.mm.default(%primals_2_tile0, %t)
_log_softmax_tile0 = aten._log_softmax.default(%mm_tile0, -1, false)
mm_tile1 = aten.mm.default(%primals_2_tile1, %t)
_log_softmax_tile1 = aten._log_softmax.default(%mm_tile1, -1, false)
nll_loss_forward_rows = aten.cat.default((%nll_loss_forward.0_tile0, %nll_loss_forward.0_tile1), 0)
mm_1_tile1 = aten.mm.default(%t_1_tile1, %primals_2_tile1)
mm_2_tile1 = aten.mm.default(%_log_softmax_backward_data_tile1, %t_3)
mm_1_tile0 = aten.addmm_.default(%mm_1_tile1, %t_1_tile0, %primals_2_tile0)
mm_2_tile0 = aten.mm.default(%_log_softmax_backward_data_tile0, %t_3)
mm_2 = aten.cat.default((%mm_2_tile0, %mm_2_tile1), 0)
t_2 = aten.t.default(%mm_1)
"""


def test_a_written_plan_with_tiles_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models.py").write_text(FACTORY)
    folder = tmp_path / "plan"
    command = ["optimize", f"{tmp_path}/models.py:language", "--budget", "60%", "--costs", "analytic"]
    assert main([*command, "--exact", "sums", "-o", str(folder)]) == 0
    assert "head.weight, a sum of 256 terms in another order, by at most 3.1e-05" in capsys.readouterr().out
    assert main(["run", str(folder), "--check", "--trust"]) == 0
    assert main([*command, "--exact", "sums", "--passes", "plan-memory{budget=60%}"]) == 2


@pytest.mark.parametrize("frozen", [False, True])
def test_the_last_stage_of_a_pipeline_is_tiled(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irc.compiler.tiles._LEAST_BYTES", 1 << 14)
    module, args = Language(bias=False), batch(rows=4, length=128)
    args[1].clamp_min_(0)  # as many rows count in each micro-batch
    module.head.requires_grad_(not frozen)
    original = copy.deepcopy(module)
    options: dict[str, Any] = {"stages": 2, "micro_batches": 2, "costs": "analytic", "time_limit": 20}
    costs = "a100" if frozen else "analytic"  # on a described machine no kernels are compared
    with pytest.raises(BudgetError) as refused:
        irc.pipeline(module, args, 1 << 20, **dict[str, Any](options, costs=costs))
    budget = refused.value.minimum_bytes * 3 // 4
    planned = irc.pipeline(module, args, budget, **options, exact=True if frozen else "sums")
    assert {each.name for each in planned.plan.reordered} == (set() if frozen else {"head.weight"})
    assert all(each.terms == 512 for each in planned.plan.reordered)
    assert ("head.weight, a sum of 512 terms" in planned.plan.summary()) != frozen
    assert PipelinePlan.from_json(json.loads(json.dumps(planned.plan.to_json()))) == planned.plan
    losses = planned.start().step(*args)
    expected = [original(*(part.chunk(2)[i] for part in args)) for i in range(2)]
    for loss in expected:
        (loss / 2).backward()
    assert [float(loss) for loss in losses] == [float(loss.detach()) for loss in expected]
    for (name, parameter), wanted in zip(module.named_parameters(), original.parameters(), strict=True):
        if name == "head.weight" and not frozen:
            assert parameter.grad is not None and wanted.grad is not None
            torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-5, atol=1e-6)
        elif wanted.grad is not None:
            assert parameter.grad is not None and torch.equal(parameter.grad, wanted.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_an_onnx_file_is_tiled(
    reduction: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, words = 256, 8000
    helper, weight = onnx.helper, torch.randn(WIDTH, words).numpy() * 0.1
    graph = helper.make_graph(
        [
            helper.make_node("Tanh", ["x"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "weight"], ["scores"]),
            helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "words"], ["loss"], reduction=reduction),
        ],
        "head",
        [
            helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, WIDTH]),
            helper.make_tensor_value_info("words", onnx.TensorProto.INT64, [rows]),
        ],
        [helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, [])],
        [onnx.numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "head.onnx")
    folder = str(tmp_path / "plan")
    command = ["optimize", str(tmp_path / "head.onnx"), "--costs", "analytic", "-o", folder]
    assert main([*command, "--budget", "60%"]) == 3
    assert main([*command, "--budget", "60%", "--exact", "sums"]) == 0
    assert f"weight, a sum of {rows} terms in another order" in capsys.readouterr().out
    assert main(["run", folder, "--check"]) == 0
    assert "equal up to rounding" in capsys.readouterr().out


def test_the_check_holds_each_tensor_to_its_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.py").write_text(FACTORY)
    folder = tmp_path / "plan"
    command = ["optimize", f"{tmp_path}/models.py:language", "--budget", "60%", "--costs", "analytic"]
    assert main([*command, "--exact", "sums", "-o", str(folder)]) == 0
    plan = json.loads((folder / "plan.json").read_text())
    near: list[Any] = [{**each, "bound": 1e-12} for each in plan["reordered"]]
    check = ["run", str(folder), "--check", "--trust"]
    for claimed in (near, []):
        (folder / "plan.json").write_text(json.dumps({**plan, "reordered": claimed}))
        capsys.readouterr()
        assert main(check) == 1
        assert "error[IRC129]: sums in another order reach head.weight, head.bias" in capsys.readouterr().err
    sums = tuple(Reordered(**each) for each in near)
    monkeypatch.setattr("irc.compiler.artifact.reordered", lambda graph: ())
    assert main(check) == 1
    assert "keeps the bits of the original, and those of head.weight" in capsys.readouterr().err
    (folder / "plan.json").write_text(json.dumps({**plan, "reordered": near}))
    monkeypatch.setattr("irc.compiler.artifact.reordered", lambda graph: sums)
    assert main(check) == 1
    assert "of its largest element, and its sum by 1e-12 of its terms at most" in capsys.readouterr().err


FACTORY = """
import torch
from torch import nn
from torch.nn import functional


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20000, 16)
        self.head = nn.Linear(16, 20000)

    def forward(self, words, labels):
        return functional.cross_entropy(self.head(self.embedding(words)), labels)


def language():
    torch.manual_seed(0)
    return Language(), (torch.randint(0, 20000, (256,)), torch.randint(0, 20000, (256,)))
"""
