"""What a step of a pipeline takes and gives: batches, results, the program's own loss."""

from __future__ import annotations

import copy
import gc
from typing import Any, cast

import pytest
import torch
from support import pipeline_models
from support.planned_pipelines import planned
from torch.multiprocessing.reductions import StorageWeakRef

import irc
from irc.compiler.pipeline.api import pipeline
from irc.compiler.pipeline.micro_batches import micro_batches_of
from irc.ir import InputRole

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


def test_a_program_trains_by_its_own_loss() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    class WithTarget(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"found": self.inner(x)}

    pipe = pipeline(
        WithTarget(model),
        (x, y),
        "1MiB",
        stages=2,
        micro_batches=2,
        loss=lambda result, x, y: (result["found"] - y).square().mean(),
        costs="analytic",
    )
    trainer = pipe.start()
    losses = trainer.step(x, y)
    expected = (twin(x) - y).square().mean()
    expected.backward()
    assert sum(losses) / 2 == pytest.approx(expected.item(), rel=1e-6)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(mine.grad, its.grad)
    assert trainer.state_dict().keys() == {f"inner.{name}" for name in model.state_dict()}
    assert {id(p) for p in trainer.parameters()} == {id(p) for p in model.parameters()}


class _Returns(torch.nn.Module):
    """Returns what it was given, beside what it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("seen", torch.full((4,), 2.0))
        self.kind = kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        if self.kind == "parameter":
            return h, cast("torch.nn.Linear", self.layers[0]).weight
        if self.kind == "written":
            return h, y.mul_(2)
        if self.kind == "normed":
            with torch.no_grad():
                cast("torch.nn.Linear", self.layers[0]).weight.clamp_(-1, 1)
        seen = self.get_buffer("seen")
        if self.kind == "counter":
            seen.add_(1)
            return h, seen
        first = cast("torch.nn.Linear", self.layers[0])
        return h, y, y[:, 1:], seen, first.weight.detach()


def test_results_may_be_arguments_and_buffers() -> None:
    torch.manual_seed(0)
    model = _Returns("arguments")
    twin, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 4)

    def loss(result: Any, *_: torch.Tensor) -> torch.Tensor:
        h, whole, part, seen, weight = result
        return ((h - whole) * seen * weight.sum()).square().mean() + (h[:, 1:] * part).mean()

    pipe = pipeline(model, (x, y), "64MiB", stages=2, micro_batches=4, loss=loss, costs="analytic")
    losses = pipe.start().step(x, y)
    parts = [loss(twin(a, b)) for a, b in zip(x.split(2), y.split(2), strict=True)]
    (torch.stack(parts).sum() / 4).backward()
    assert losses == pytest.approx([part.item() for part in parts], rel=1e-6)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("parameter", "returns parameter layers.0.weight, and the pipeline takes no gradient"),
        ("written", "writes into input 1"),
        ("normed", "writes into parameter layers.0.weight"),
        ("counter", "returns buffer seen, which its forward writes"),
    ],
)
def test_results_that_one_stage_cannot_hand_out_are_refused(kind: str, said: str) -> None:
    x = torch.randn(8, 4)
    with pytest.raises(irc.UnsupportedError, match=f"IRC489.*{said}"):
        pipeline(_Returns(kind), (x, x.clone()), "64MiB", stages=2, micro_batches=4, costs="analytic")


def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(irc.UsageError, match=r"IRC487.*a batch of 10 does not divide into 4"):
        micro_batches_of((torch.zeros(10, 2),), 4)
    trainer = planned("skips", 2, "1f1b", 4).start()
    with pytest.raises(irc.UsageError, match=r"IRC487.*is float32\[2, 3, 8, 8\] on cpu"):
        trainer.step(torch.zeros(8, 3, 8, 8))
    assert all(parameter.grad is None for parameter in trainer.parameters())


class _Called(torch.nn.Module):
    """Takes what a call may get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, named: dict[str, torch.Tensor], twice: bool) -> torch.Tensor:
        h = named["x"]
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean() * (2 if twice else 1)


def test_calls_unlike_the_planned_one_are_refused() -> None:
    model, x = _Called(), torch.randn(8, 4)
    pipe = pipeline(model, ({"x": x}, True), "64MiB", stages=2, micro_batches=2, costs="analytic")
    trainer = pipe.start()

    def refused(code: str, said: str, *args: Any) -> None:
        with pytest.raises(irc.UsageError, match=rf"{code}.*{said}"):
            trainer.step(*args)

    refused("IRC490", "an argument is False; it was True at planning", {"x": x}, False)
    refused("IRC490", "nest otherwise", {"x": x, "y": x}, True)
    refused("IRC487", r"is float64\[4, 4\] on cpu; .* for float32\[4, 4\] on cpu", {"x": x.double()}, True)
    refused("IRC487", r"with strides \[1, 8\]", {"x": torch.randn(4, 8).T}, True)
    with torch.no_grad():
        refused("IRC490", "without gradients", {"x": x}, True)
    with torch.autocast("cpu", torch.bfloat16):
        refused("IRC490", "autocast", {"x": x}, True)
    model.layers[1].eval()
    refused("IRC490", r"module layers.1 is no longer in train\(\)", {"x": x}, True)
    model.train()
    model.layers[1].bias.requires_grad_(False)
    refused("IRC490", "requires_grad of parameter layers.1.bias", {"x": x}, True)
    model.layers[1].bias.requires_grad_(True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(trainer.step({"x": x}, True)) == 2


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a_batch_counts_once(micro_batches: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    batch = torch.randn(64, 4096, 4)
    pipe = pipeline(model, (batch,), "1GiB", stages=2, micro_batches=micro_batches, costs="analytic")
    graph = pipe.stages.schedules[0].graph
    (held,) = [entry.value.storage for entry in graph.inputs if entry.role is InputRole.INPUT]
    assert held.nbytes * micro_batches == batch.nbytes


def test_a_batch_is_let_go_when_its_step_ends() -> None:
    trainer = planned("skips", 2, "1f1b", 4).start()
    batch = torch.randn(16, 3, 8, 8)
    held = StorageWeakRef(batch.untyped_storage())
    trainer.step(batch)
    del batch
    gc.collect()
    assert held.expired()


def test_processes_that_do_not_know_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(irc.UsageError, match=r"IRC488.*2 processes were started"):
        planned("skips", 2, "1f1b", 4).start()


def test_arguments_that_require_gradients_are_refused() -> None:
    model, (x,) = pipeline_models.skips()
    with pytest.raises(irc.UnsupportedError, match="IRC483"):
        pipeline(model, (x.requires_grad_(),), "1MiB", stages=2, micro_batches=2, costs="analytic")
