"""Writes into buffers run in place in the graph that is planned: eager's bits, within eager's memory."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.solutions import verify
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import irc
from irc.compiler.operation_allowlist import check_operations
from irc.frontends.torch import capture
from irc.ir import Region, Trait, VerificationError, overwritten, verify_graph, verify_schedule, with_frees
from irc.passes import CheckpointProblem, Cost, Program, WriteInPlace
from irc.passes.strategy_registry import Asked, load_strategies

ROWS, COLUMNS = 64, 48


class _Writes:
    """A program of writes into views of buffers, drawn by its seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, data: Tensor, weight: Tensor, half: int) -> Tensor:
        drawn = random.Random(2 * self.seed + half)
        buffers = [drawn.choice((torch.zeros_like, torch.tanh, lambda t: t * 2))(data) for _ in range(2)]
        total = torch.zeros(ROWS)
        for _ in range(drawn.randrange(3, 10)):
            buffer = drawn.choice(buffers)
            part = self.part(drawn, buffer)
            rows, columns = part.shape
            match drawn.randrange(8):
                case 0:
                    part.mul_(1.5)
                case 1:
                    part.sub_(part.mean()).clamp_(-2, 2)
                case 2:
                    part.copy_(data[:rows, :columns])
                case 3:
                    part.addmm_(data[:rows], weight[:, :columns], beta=0.5)
                case 4:
                    total = total + buffer.sum(1)
                case 5:
                    part[:] = 0.3
                case 6 if part.stride(1) == 1:
                    torch.mm(data[:rows], weight[:, :columns], out=part)
                case _:
                    buffer[buffer > 0.5] = 0.1
        return torch.stack([total, *(buffer.sum(1) for buffer in buffers)]).sum(0)

    def part(self, drawn: random.Random, buffer: Tensor) -> Tensor:
        row, column = drawn.randrange(1, ROWS), drawn.randrange(1, COLUMNS)
        parts = (
            buffer[row:],
            buffer[:, :column],
            buffer,
            buffer[row][None],
            buffer[::2, 1:],
            buffer.t()[1:].t(),
        )
        return drawn.choice(parts)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor, writes: _Writes) -> Tensor:
        ctx.save_for_backward(data, weight)
        ctx.writes = writes
        return writes(data, weight, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        data, weight = ctx.saved_tensors
        of_data, of_weight = torch.zeros_like(data), torch.zeros_like(weight)
        of_data.add_((gradients[0] * ctx.writes(data, weight, 1))[:, None]).mul_(0.1)
        of_weight[1:].add_(0.1)
        of_weight.addmm_(data.t(), of_data)
        return of_data, of_weight, None


class _Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(COLUMNS, COLUMNS)
        self.weight = nn.Parameter(torch.randn(COLUMNS, COLUMNS) / 10)
        self.writes = _Writes(seed)

    def forward(self, data: Tensor) -> Tensor:
        return _Head.apply(torch.tanh(self.layer(data)), self.weight, self.writes).sum()


def _step(model: nn.Module, data: Tensor) -> tuple[int, list[Tensor]]:
    """The most bytes that a step takes beside what is there, and its gradients."""
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(data).backward()
    events: Any = profiler.profiler
    alive = most = 0
    for event in events.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most, [p.grad for p in model.parameters() if p.grad is not None]


_LOSS_BYTES = 64
"""The loss and its gradient, and single numbers that a trace has as tensors."""


@pytest.mark.parametrize("seed", range(4))
def test_random_writes_have_eagers_bits_within_eagers_memory(seed: int) -> None:
    model, data = _Model(seed), torch.randn(ROWS, COLUMNS)
    eager_bytes, expected = _step(model, data)
    static_bytes = data.nbytes + sum(p.nbytes for p in model.parameters())
    model.zero_grad()
    for budget in ("100%", "60%", 1):
        try:
            fitted = irc.optimize(model, (data,), budget)
        except irc.BudgetError as error:
            assert budget != "100%"
            fitted = irc.optimize(model, (data,), error.minimum_bytes)
        assert fitted.plan.peak_bytes <= static_bytes + eager_bytes + _LOSS_BYTES
        taken, gradients = _step(fitted, data)
        assert static_bytes + taken <= fitted.plan.peak_bytes
        assert all(map(torch.equal, gradients, expected))


def _program(model: nn.Module, data: Tensor) -> Program:
    return Cost(profile="cpu").run(WriteInPlace().run(Program(capture(model, (data,)).graph)))


def test_what_writes_runs_as_the_model_wrote_it_and_only_once_rewritten() -> None:
    program = _program(_Model(1), torch.randn(ROWS, COLUMNS))
    written = [node for node in program.graph.nodes if Trait.OVERWRITES in node.traits]
    assert len(written) > 3 and all(len(overwritten(node)) == 1 for node in written)
    assert not any("scatter" in node.op for node in program.graph.nodes)
    verify_graph(program.graph)
    assert WriteInPlace().run(program) is program


class _Chunked(nn.Module):
    """Two products in one buffer, whose sum backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLUMNS, COLUMNS))

    def forward(self, data: Tensor) -> Tensor:
        hidden = torch.tanh(data @ self.weight)
        buffer = torch.zeros(ROWS, 2 * COLUMNS)
        buffer[:, :COLUMNS] = hidden * 2
        buffer[:, COLUMNS:] = hidden * 3
        return buffer.exp().sum()


def test_what_is_overwritten_is_made_again_before_it_is_read() -> None:
    program = _program(_Chunked(), torch.randn(ROWS, COLUMNS))
    assert program.costs is not None
    problem = CheckpointProblem(program.graph, program.costs)
    writes = [n for n in problem.forward if Trait.OVERWRITES in n.traits]
    last = writes[-1]
    order = (*problem.forward[: problem.index[last] + 1], last, *problem.forward[problem.index[last] + 1 :])
    bad = with_frees(program.graph, order, problem.backward)
    with pytest.raises(VerificationError) as caught:
        verify_schedule(bad, program.costs.workspace_bytes)
    assert caught.value.code == "IRC120" and "has overwritten" in caught.value.message
    solution = problem.simulate_order(order, problem.backward)
    assert sum(node is last for node in solution.order) == 2
    assert len(solution.order) > len(order) + len(problem.backward)
    verify_schedule(solution.schedule, program.costs.workspace_bytes, peak_bytes=solution.peak_bytes)


@pytest.mark.parametrize("percent", [70, 100])
def test_every_method_has_valid_schedules_of_what_writes(percent: int) -> None:
    program = _program(_Chunked(), torch.randn(ROWS, COLUMNS))
    assert program.costs is not None
    workspaces = {
        node: -sum(v.storage.nbytes for v in overwritten(node)) for node in program.graph.operations
    }
    problem = CheckpointProblem(program.graph, replace(program.costs, workspace_bytes=workspaces))
    for strategy in load_strategies(copies=False):
        asked = Asked(problem.keep_all.peak_bytes * percent // 100, 2, deadline=time.thread_time() + 0.2)
        try:
            solutions = list(strategy.find(problem, asked))
        except irc.UsageError as error:
            assert strategy.name in error.message
            continue
        for solution in solutions:
            verify(problem, solution)


class _Drawn(nn.Module):
    """Numbers that are computed in place from a draw, which is then overwritten itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.FeatureAlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.dropout(self.first(x))))


def test_what_is_made_of_a_draw_that_is_gone_is_not_made_again() -> None:
    torch.manual_seed(0)
    original, x = _Drawn(), torch.randn(2, 6, 8)
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=1)
    for module in (original, fitted):
        torch.manual_seed(1)
        module(x).square().mean().backward()
    gradients = [[parameter.grad for parameter in module.parameters()] for module in (original, fitted)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


def test_a_graph_that_reads_what_is_gone_or_hides_a_write_is_refused() -> None:
    graph = _program(_Chunked(), torch.randn(ROWS, COLUMNS)).graph
    write = next(node for node in graph.nodes if Trait.OVERWRITES in node.traits)
    hidden = replace(write, traits=write.traits - {Trait.OVERWRITES})
    with pytest.raises(VerificationError) as caught:
        check_operations(replace(graph, nodes=tuple(hidden if n is write else n for n in graph.nodes)))
    assert caught.value.code == "IRC132" and "does not say so" in caught.value.message
    base = next(
        v for n in graph.operations for v in n.values if v.storage is next(iter(overwritten(write))).storage
    )
    late = next(node for node in graph.operations if node.region is Region.BACKWARD and base.type.shape)
    read = replace(late, name="late", arguments=(base,), keywords=(), results=(), op="aten.sum.default")
    nodes = tuple(graph.nodes)
    place = nodes.index(late)
    with pytest.raises(VerificationError) as caught:
        verify_graph(replace(graph, nodes=(*nodes[:place], read, *nodes[place:])))
    assert caught.value.code == "IRC145" and "has overwritten" in caught.value.message


def test_a_retained_graph_keeps_what_backward_overwrites() -> None:
    model, data = _Model(3), torch.randn(ROWS, COLUMNS)
    model(data).backward()
    expected = [2 * p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    fitted = irc.optimize(model, (data,), "100%", costs="analytic")
    loss = fitted(data)
    loss.backward(retain_graph=True)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, gradients, expected)) and len(gradients) == len(expected)


WORDS, TILE, WIDTH = 96, 32, 32


class _TilesOfRows(torch.autograd.Function):
    """A cross-entropy over tiles of rows; forward writes the gradients, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        losses = torch.zeros(len(hidden))
        for start in range(0, len(hidden), TILE):
            rows = slice(start, start + TILE)
            tile, right = hidden[rows] @ weight.t(), labels[rows, None]
            total = torch.logsumexp(tile, 1, keepdim=True)
            losses[rows] = (total - tile.gather(1, right))[:, 0]
            tile.sub_(total).exp_().sub_((right == torch.arange(WORDS)).float()).mul_(1 / len(hidden))
            of_hidden[rows] = tile @ weight
            of_weight.addmm_(tile.t(), hidden[rows])
        ctx.save_for_backward(of_hidden, of_weight)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradients[0], of_weight * gradients[0], None


class _TilesOfWords(torch.autograd.Function):
    """A cross-entropy over tiles of the vocabulary, all in one buffer, which backward makes again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        tile, total = torch.empty(len(hidden), TILE), torch.zeros(len(hidden))
        right = torch.zeros(len(hidden))
        for start in range(0, WORDS, TILE):
            torch.mm(hidden, weight[start : start + TILE].t(), out=tile)
            total.add_(tile.exp().sum(1))
            right.add_((tile * (labels[:, None] == torch.arange(start, start + TILE))).sum(1))
        ctx.save_for_backward(hidden, weight, labels, total)
        return (total.log() - right).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, labels, total = ctx.saved_tensors
        tile = torch.empty(len(hidden), TILE)
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, WORDS, TILE):
            words = slice(start, start + TILE)
            torch.mm(hidden, weight[words].t(), out=tile)
            tile.exp_().div_(total[:, None])
            tile.sub_((labels[:, None] == torch.arange(start, start + TILE)).float())
            tile.mul_(gradients[0] / len(hidden))
            of_hidden.addmm_(tile, weight[words])
            of_weight[words].addmm_(tile.t(), hidden)
        return of_hidden, of_weight, None


def _rows_of_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    losses = torch.zeros(len(hidden))
    for start in range(0, len(hidden), TILE):
        rows = slice(start, start + TILE)
        losses[rows] = nn.functional.cross_entropy(hidden[rows] @ weight.t(), labels[rows], reduction="none")
    return losses.mean()


def _head_of_trl(tile: int, *outputs: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        kernels: Any = pytest.importorskip("trl.kernels")
        per_token = kernels.ChunkedLogProbFunction.apply(
            hidden, weight, None, labels, 0.9, tile, None, 1.0, ("log_probs", *outputs)
        )
        return -per_token[0].mean()

    return head


HEADS = {
    "tiles of rows": (_TilesOfRows.apply, 0.6),
    "tiles of words": (_TilesOfWords.apply, 0.6),
    "rows of losses": (_rows_of_losses, 0.6),
    "TRL's, for SFT": (_head_of_trl(16 * WORDS, "entropy", "is_top1"), 0.9),
    "TRL's, for DPO": (_head_of_trl(TILE, "entropy", "mean_logits", "is_top1"), 0.6),
}
"""Losses, each with the share of eager's memory that a plan makes do with. A buffer that is wider than the
vocabulary, as TRL's own is for a small one, stays whole."""


class _Words(nn.Module):
    """A small GPT-2 with a loss in chunks."""

    def __init__(self, head: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        transformers: Any = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=32,
            n_embd=WIDTH,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        self.model, self.head = transformers.GPT2LMHeadModel(config), head

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.model.transformer(words).last_hidden_state[:, :-1].reshape(-1, WIDTH)
        return self.head(hidden, self.model.lm_head.weight, words[:, 1:].reshape(-1))


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", HEADS)
def test_a_loss_in_chunks_has_eagers_bits_within_eagers_memory(name: str) -> None:
    head, least = HEADS[name]
    model, words = _Words(head), torch.randint(WORDS, (4, 32))
    model.zero_grad()
    expected, eager_bytes = _measured(model, words)
    for share in (1, least):
        fitted = irc.optimize(model, (words,), f"{share:.0%}", time_limit=1)
        gradients, step_bytes = _measured(fitted, words)
        assert step_bytes <= fitted.plan.peak_bytes <= share * eager_bytes and not fitted.plan.roundings
        assert all(map(torch.equal, gradients, expected)) and len(gradients) == len(expected)


def _measured(model: nn.Module, words: Tensor) -> tuple[list[Tensor], int]:
    """The gradients of a step, with dropout drawn from one seed, and its measured peak."""
    model.zero_grad()
    torch.manual_seed(1)
    _, peak_bytes = irc.measured_step(model, lambda: model(words).backward(), words)
    return [p.grad for p in model.parameters() if p.grad is not None], peak_bytes
