"""Outputs that the given loss does not use: no gradient is planned for them, and none is lost."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.frontends.torch import capture
from irc.ir import InputRole, UnsupportedError

torch.set_num_threads(1)
flat_module: Any = sys.modules["irc.frontends.torch.flat_module"]


class Scored(nn.Module):
    """As the models of transformers: a loss, the scores that it is made of, and states."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.lin(x).tanh()
        scores = self.head(h)
        loss = scores.log_softmax(-1)[:, 0].mean().neg()
        return {
            "loss": loss,
            "scores": scores,
            "again": scores,
            "row": h[0],
            "weight": self.lin.weight,
            "x": x,
            "turned": self.lin.weight.t(),
            "best": scores.argmax(-1),
        }


def loss(result: dict[str, Any]) -> Tensor:
    return result["loss"]


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4)


def gradients(module: nn.Module, value: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    value.backward()
    return [p.grad for p in module.parameters()]


def test_a_loss_is_tried_within_the_trace_and_again_alone_if_it_fails_there(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[bool] = []
    run = vars(flat_module.FlatModule)["run"]
    monkeypatch.setattr(flat_module.FlatModule, "run", lambda *given: runs.append(True) or run(*given))
    within = capture(Scored(), (x,), loss=loss)
    assert len(runs) == 2, "as often as without a loss"
    asked = vars(flat_module)["loss_gradients"]

    def fails_once(*given: Any) -> dict[int, tuple[int, ...] | None]:
        monkeypatch.setattr(flat_module, "loss_gradients", asked)
        raise RuntimeError("a trace is under way")

    monkeypatch.setattr(flat_module, "loss_gradients", fails_once)
    assert str(capture(Scored(), (x,), loss=loss).graph) == str(within.graph) and len(runs) == 5


def test_a_loss_that_writes_into_the_model_is_asked_outside_of_the_trace() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    model = torch.nn.Sequential(layer, torch.nn.Tanh())

    def clamping(result: Tensor) -> Tensor:
        layer.bias.data.clamp_(-1, 1)
        return result.sum()

    clamping(irc.optimize(model, (x,), "100%", costs="analytic", loss=clamping)(x)).backward()
    assert layer.bias.grad is not None


def test_the_graph_has_no_gradient_for_them(x: Tensor) -> None:
    used, all_used = capture(Scored(), (x,), loss=loss), capture(Scored(), (x,))
    tangents = [[i for i in c.graph.inputs if i.role is InputRole.TANGENT] for c in (used, all_used)]
    assert [len(found) for found in tangents] == [1, 3]
    assert len(used.graph.operations) < len(all_used.graph.operations)
    assert all_used.signature.unused == frozenset() and len(used.signature.unused) >= 2


def test_training_is_the_same_and_outputs_look_as_in_eager(x: Tensor) -> None:
    module = Scored()
    original = copy.deepcopy(module)
    fitted = irc.optimize(module, (x,), "100%", costs="analytic", loss=loss)
    ours, theirs = fitted(x), original(x)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor) and ours[name].requires_grad == tensor.requires_grad, name
    assert ours["weight"] is module.lin.weight and ours["x"] is x
    for a, b in zip(gradients(fitted, ours["loss"]), gradients(original, theirs["loss"]), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
    # what is a parameter, or a view of one, has its gradient all the same
    ours, theirs = fitted(x), original(x)
    both = [r["loss"] + r["turned"].square().sum() + r["weight"].sum() for r in (ours, theirs)]
    for a, b in zip(gradients(fitted, both[0]), gradients(original, both[1]), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("name", ["scores", "again", "row"])
def test_a_gradient_that_was_planned_away_is_refused(name: str, x: Tensor) -> None:
    fitted = irc.optimize(Scored(), (x,), "100%", costs="analytic", loss=loss)
    result = fitted(x)
    with pytest.raises(UnsupportedError, match=r"IRC346.*loss that does not use it") as raised:
        (result["loss"] + result[name].sum()).backward()
    assert "loss=" in str(raised.value.help)
    assert all(p.grad is None for p in fitted.parameters())


def test_the_same_output_twice_is_used_where_one_of_them_is(x: Tensor) -> None:
    module = Scored()
    original = copy.deepcopy(module)
    fitted = irc.optimize(module, (x,), "100%", costs="analytic", loss=lambda r: r["again"].square().mean())
    pair = [r["scores"].square().mean() + r["again"].sum() for r in (fitted(x), original(x))]
    for a, b in zip(gradients(fitted, pair[0]), gradients(original, pair[1]), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
