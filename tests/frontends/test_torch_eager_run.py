"""The baseline of a plan is what the model takes as its user runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.torch_cases import slow_among
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import irc
from irc.frontends.torch import capture
from irc.ir import format_bytes
from irc.passes.costs.allocations import peak_bytes


class ModelOutput:
    """The base of results of Hugging Face's models, by its name."""


@dataclass
class Result(ModelOutput):
    """A result with a loss of its own."""

    loss: Tensor
    logits: Tensor


class Blocks(nn.Module):
    """Residual blocks, which checkpoint themselves if asked to."""

    def __init__(self, wrap: Callable[..., Tensor]) -> None:
        super().__init__()
        self.wrap = wrap
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(12)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.wrap(block, x)
        return x


class Labelled(nn.Module):
    """A classifier that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 400)

    def forward(self, x: Tensor, labels: Tensor) -> Result:
        logits = self.head(self.body(x).relu())
        return Result(functional.cross_entropy(logits, labels), logits)


class Halves(nn.Module):
    """Blocks, and a layer whose halves are read apart: the engine adds their gradients in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Blocks(plain), nn.Linear(32, 512)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.hsplit(self.head(self.body(x)), 2)
        return first.sum(1) + second.sum(1)


class Pooled(nn.Module):
    """Takes the largest of each column, whose gradient autograd writes into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).max(0).values[torch.arange(64)]


class Masked(nn.Module):
    """Multiplies by a mask, which takes a workspace, and by a tensor of the same shape, which takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return (y * (y > 0)).tanh()


class Looking(nn.Module):
    """Looks at data, as its code does in eager without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.body(x).tanh() if (x < 9).all() else x
        return x


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def drawing(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda each: functional.dropout(block(each)), x, use_reentrant=False)


def square(result: Tensor) -> Tensor:
    return result.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (lambda: Blocks(plain), lambda: torch.randn(64, 32)),
    "checkpointed": (lambda: Blocks(checkpointed), lambda: torch.randn(64, 32)),
    "checkpointed by another backward": (
        lambda: Blocks(lambda block, x: checkpoint(block, x, use_reentrant=True)),
        lambda: torch.randn(64, 32, requires_grad=True),
    ),
    "checkpointed with dropout": (lambda: Blocks(drawing), lambda: torch.randn(64, 32)),
    "in place": (
        lambda: nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 2)
        ),
        lambda: torch.randn(64, 32),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 2, 3)
        ),
        lambda: torch.randn(2, 3, 24, 24),
    ),
    "halves": (Halves, lambda: torch.randn(64, 32)),
    "pooled": (Pooled, lambda: torch.randn(64, 16)),
    "masked": (Masked, lambda: torch.randn(64, 64)),
    "looking": (Looking, lambda: torch.randn(64, 16)),
}


def measured(
    model: nn.Module, args: tuple[Tensor, ...], loss: Callable[[Any], Tensor], *, holds: bool
) -> int:
    """The peak of a step in bytes, with parameters, buffers and arguments."""

    def step() -> None:
        result = model(*args)
        value = loss(result)
        if not holds:
            del result
        value.backward()

    for parameter in model.parameters():
        parameter.grad = None
    step()
    for parameter in model.parameters():
        parameter.grad = None
    static = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers(), *args)}
    return peak_bytes(step) + sum(static.values())


@pytest.mark.parametrize("name", slow_among(MODELS, "residual", "checkpointed", "halves", "looking"))
def test_the_baseline_is_the_peak_of_eager(name: str) -> None:
    make, example = MODELS[name]
    model, x = make(), example()
    plan = irc.optimize(model, (x,), "8MiB", loss=square, time_limit=1, specialize_branches=True).plan
    eager = measured(model, (x,), square, holds=True)
    assert 0.999 * eager <= plan.baseline_peak_bytes <= max(eager, plan.floor_bytes)


LOSSES = (
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.soft_margin_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.l1_loss,
)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_keeps_its_terms_takes_what_is_predicted(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model, x, wanted = (
        nn.Sequential(nn.Linear(16, 256), nn.Sigmoid()),
        torch.randn(64, 16),
        torch.rand(64, 256),
    )

    def of_result(result: Tensor) -> Tensor:
        return loss(result, wanted)

    fitted = irc.optimize(model, (x,), "2MiB", loss=of_result, time_limit=1)
    assert measured(fitted, (x,), of_result, holds=True) == fitted.plan.peak_bytes


def test_parameters_of_the_loss_get_no_gradient() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(128))

        def forward(self, y: Tensor) -> Tensor:
            return (y * self.weight).square().mean()

    model, x, loss, table = nn.Linear(16, 128), torch.randn(4, 16), Weighted(), nn.Parameter(torch.ones(128))
    irc.optimize(model, (x,), "100%", loss=loss, costs="analytic")
    irc.optimize(model, (x,), "100%", loss=lambda y: (y * table).sum(), costs="analytic")
    assert loss.weight.grad is None and table.grad is None and model.weight.grad is None


def test_a_percentage_of_a_model_that_checkpoints_itself_is_of_what_it_takes_today() -> None:
    model, x = Blocks(checkpointed), torch.randn(64, 32)
    fitted = irc.optimize(model, (x,), "101%", loss=square, time_limit=2)
    eager = measured(model, (x,), square, holds=True)
    assert measured(fitted, (x,), square, holds=True) == fitted.plan.peak_bytes <= 1.02 * eager


def test_a_result_with_a_loss_is_trained_by_it() -> None:
    torch.manual_seed(0)
    model, x, labels = Labelled(), torch.randn(32, 16), torch.randint(400, (32,))
    fitted = irc.optimize(model, (x, labels), "100%", time_limit=1)
    plan = fitted.plan
    assert "the result's .loss alone" in plan.summary()
    assert plan.baseline_peak_bytes == measured(model, (x, labels), lambda r: r.loss, holds=True)
    without_bytes = measured(model, (x, labels), lambda r: r.loss, holds=False)
    baseline_bytes, peak_bytes = plan.baseline_without_unused_bytes, plan.peak_without_unused_bytes
    assert baseline_bytes is not None and peak_bytes is not None
    assert peak_bytes <= baseline_bytes  # 100% of what either loop takes
    assert 0 <= baseline_bytes - without_bytes <= 16 and baseline_bytes < plan.baseline_peak_bytes
    part = f"{peak_bytes / baseline_bytes:.1%} of {format_bytes(baseline_bytes)}"
    assert f"({peak_bytes:,} bytes, {part}) if those beside the loss" in plan.summary()
    losses: list[Callable[[Any], Tensor]] = [lambda r: r.loss, lambda r: r.loss / 4]
    for scale in losses:
        held, dropped = (measured(fitted, (x, labels), scale, holds=holds) for holds in (True, False))
        assert plan.peak_without_unused_bytes is not None
        assert 0 <= plan.peak_bytes - held <= 16  # a scaled loss and its gradient
        assert 0 <= plan.peak_without_unused_bytes - dropped <= 16
        assert dropped < plan.peak_bytes
    with pytest.raises(irc.UnsupportedError, match="IRC346"):
        fitted(x, labels).logits.sum().backward()


class Beside(nn.Module):
    """Layers side by side, whose results have a loss of their own each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 128)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in self.parts)


def squares(results: tuple[Tensor, ...]) -> Tensor:
    return sum((result.square().mean() for result in results), torch.zeros(()))


def test_a_baseline_above_eager_names_the_gradients_of_outputs() -> None:
    model, x = Beside(), torch.randn(8, 8)
    plan = irc.optimize(model, (x,), "100%", loss=squares, time_limit=1).plan
    eager = measured(model, (x,), squares, holds=True)
    more_bytes, outputs_bytes = plan.baseline_above_eager_bytes, 4 * 8 * 128 * 4
    assert plan.baseline_peak_bytes == plan.floor_bytes == eager + more_bytes
    assert 0 < more_bytes <= outputs_bytes
    assert f"{more_bytes:,} bytes more than eager's step: a plan holds the gradients" in plan.summary()
    with pytest.raises(irc.BudgetError) as caught:
        irc.optimize(model, (x,), eager, loss=squares, time_limit=1)
    assert caught.value.minimum_bytes == plan.peak_bytes
    why = f"eager's step takes {eager} bytes: a plan holds the gradients of outputs, {outputs_bytes} bytes"
    assert why in str(caught.value)


def test_gradients_that_are_there_do_not_change_the_baseline() -> None:
    model, x = Beside(), torch.randn(8, 8)
    before = irc.optimize(model, (x,), "1MiB", loss=squares, time_limit=1).plan
    squares(model(x)).backward()
    after = irc.optimize(model, (x,), "1MiB", loss=squares, time_limit=1).plan
    assert after.baseline_above_eager_bytes == before.baseline_above_eager_bytes


def test_a_baseline_that_is_not_followed_is_named_as_modelled() -> None:
    model, x = Beside(), torch.randn(8, 8)
    plan = irc.optimize(model, (x,), "100%", costs="analytic").plan
    assert plan.baseline_source == plan.to_json()["baseline_source"] == "modelled"
    assert "modelled: the graph as it was captured" in plan.summary()
    plan = irc.optimize(model, (x,), "100%", time_limit=1).plan
    assert plan.baseline_source == "followed" and "modelled" not in plan.summary()
    plan = irc.optimize(model, (x,), "100%", forwards_in_flight=2, time_limit=1).plan
    assert plan.baseline_source == "modelled"


def test_a_loss_of_another_class_may_be_one_of_several_terms() -> None:
    @dataclass
    class Terms:
        loss: Tensor
        scores: Tensor

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Terms:
            scores = self.body(x)
            return Terms(scores.square().mean(), scores)

    fitted = irc.optimize(Both(), (torch.randn(4, 8),), "100%", costs="analytic", time_limit=1)
    result = fitted(torch.randn(4, 8))
    (result.loss + result.scores.sum()).backward()
    assert "not known" in fitted.plan.summary()


class Cast(nn.Module):
    """Runs a model under autocast, which ends before backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


def test_the_baseline_under_autocast_holds_no_casts_that_eager_drops_before_backward() -> None:
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 1)), torch.randn(128, 32)

    def mean(result: Tensor) -> Tensor:
        return result.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        plan = irc.optimize(model, (x,), "100%", loss=mean, time_limit=1).plan
    eager = measured(Cast(model), (x,), mean, holds=True)
    assert plan.baseline_peak_bytes <= max(eager, plan.floor_bytes)


class Returning(nn.Module):
    """Returns a parameter, or a part of it, for a penalty in the loss."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.body = part, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x).sin(), self.part(self.body.weight)


@pytest.mark.parametrize("part", [lambda w: w, lambda w: w[1], lambda w: w.t(), lambda w: w.view(-1)])
def test_the_gradient_that_a_returned_parameter_gets_from_the_loss_is_counted(
    part: Callable[[Tensor], Tensor],
) -> None:
    model, x = Returning(part), torch.randn(8, 16)

    def penalized(result: tuple[Tensor, Tensor]) -> Tensor:
        return result[0].square().mean() + result[1].square().mean()

    fitted = irc.optimize(model, (x,), "1MiB", loss=penalized, time_limit=1)
    assert measured(fitted, (x,), penalized, holds=True) <= fitted.plan.peak_bytes


class Viewing(nn.Module):
    """Returns a view that is made under no_grad beside its result: a leaf, which has its own gradient."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view, self.body = view, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x)
        with torch.no_grad():
            view = self.view(hidden)
        return hidden.tanh(), view, view


@pytest.mark.parametrize("view", [lambda y: y[:, :24], lambda y: y.t(), lambda y: y.view(-1)])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_gradient_that_a_view_without_gradients_gets_from_the_loss_is_counted(
    view: Callable[[Tensor], Tensor], is_first: bool
) -> None:
    model, x = Viewing(view), torch.randn(64, 16)

    def looked_at(result: tuple[Tensor, ...]) -> Tensor:
        first, second = result[:2] if is_first else result[1::-1]
        return first.square().mean() + second.square().mean()

    held_bytes = capture(model, (x,), loss=looked_at).graph.loss_held_bytes
    assert held_bytes == 2 * 4 + view(model.body(x)).nbytes  # and the loss, with its gradient
    fitted = irc.optimize(model, (x,), "100%", loss=looked_at, costs="measured", time_limit=1)
    assert measured(fitted, (x,), looked_at, holds=True) == fitted.plan.peak_bytes
    unread = irc.optimize(model, (x,), "100%", loss=lambda result: result[0].sum(), costs="measured")
    assert unread.plan.peak_bytes < fitted.plan.peak_bytes


def test_nothing_of_the_model_changes_while_its_memory_is_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    irc.optimize(model, (torch.zeros(4, 8),), "100%", costs="analytic", time_limit=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
