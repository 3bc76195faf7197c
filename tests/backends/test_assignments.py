"""Attributes that a forward changes: auxiliary losses, feature taps and counters, beside the original."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irc
from irc.compiler.training import measured_peak_bytes
from irc.ir import UnsupportedError


class Block(nn.Module):
    """A residual block with an auxiliary loss and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.aux_loss: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.inner(x))
        self.aux_loss = y.pow(2).mean()
        self.calls += 1
        return x + y


class Model(nn.Module):
    """Blocks whose activations are tapped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.rate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.taps = []
        for block in self.blocks:
            x = block(x)
            self.taps.append({"mean": x.mean(0), "still": x.detach()})
        self.total = sum(cast("Any", block).aux_loss for block in self.blocks)
        self.rate = self.rate * 0.5 + 0.25
        return self.head(x)


def loss_of(model: Any, x: Tensor) -> Tensor:
    result = model(x).logsumexp(1).mean()
    return result + 0.01 * model.total + 0.1 * model.blocks[1].aux_loss + model.taps[0]["mean"].sum()


def values_of(model: Any) -> list[Any]:
    taps = [part for tap in model.taps for part in tap.values()]
    return [*taps, model.total, model.rate, *(block.calls for block in model.blocks)]


def same(mine: list[Any], its: list[Any]) -> bool:
    pairs = zip(mine, its, strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else type(a) is type(b) and a == b for a, b in pairs
    )


def steps(model: nn.Module, count: int, step: Callable[[Any, Tensor], Tensor] = loss_of) -> list[Any]:
    found: list[Any] = []
    torch.manual_seed(1)
    for _ in range(count):
        model.zero_grad()
        loss = step(model, torch.randn(32, 16))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * cast("Tensor", parameter.grad)
    return found


def pair(make: Callable[[], nn.Module], *sizes: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    original = make()
    options = {"budget": "100%", **options}
    return original, irc.optimize(copy.deepcopy(original), (torch.randn(*sizes or (32, 16)),), **options)


@pytest.mark.parametrize("budget", ["100%", "95%"])
def test_losses_taps_and_counters_are_those_of_eager(budget: str) -> None:
    original, ours = pair(Model, budget=budget)
    assert same(steps(original, 4), steps(ours, 4))
    assert same(values_of(original), values_of(ours))
    assert len(ours.irc_plans) == 1 and ours.blocks[0].calls == 4
    assert ours.total.requires_grad and not ours.taps[1]["still"].requires_grad


def test_a_call_outside_of_training_counts_as_well() -> None:
    original, ours = pair(Model)
    for model in (original, ours):
        steps(model, 1)
        with torch.no_grad():
            model(torch.ones(2, 16))
        model.eval()(torch.ones(2, 16))
        model.train()
        cast("Any", model).blocks[0].calls = 100
        cast("Any", model).total = None
        steps(model, 2)
    assert same(values_of(original), values_of(ours)) and ours.blocks[0].calls == 102
    assert len(ours.irc_plans) == 1


def test_nothing_changes_while_it_is_planned() -> None:
    model = Model()

    def attributes() -> dict[str, dict[str, Any]]:
        """All but what calls submodules, by which one that trains beside the plan is seen."""
        return {
            name: {key: value for key, value in vars(child).items() if key != "_compiled_call_impl"}
            for name, child in model.named_modules()
        }

    before = attributes()
    irc.optimize(model, (torch.randn(32, 16),), budget="100%")
    assert before == attributes()


def test_a_counter_of_another_type_is_planned_anew() -> None:
    original, ours = pair(Model)
    for model in (original, ours):
        steps(model, 1)
        cast("Any", model).blocks[0].calls = 0.5
        steps(model, 2)
    assert same(values_of(original), values_of(ours)) and ours.blocks[0].calls == 2.5
    assert len(ours.irc_plans) == 2


@pytest.mark.parametrize("budget", ["100%", "1MiB"])
def test_what_a_step_leaves_is_within_the_plan(budget: str) -> None:
    _, ours = pair(Wide, 256, 64, budget=budget)
    x, plan = torch.randn(256, 64), ours.irc_plan
    with_aux(ours, ours(x)).backward()
    loss = lambda y: with_aux(ours, y)  # noqa: E731
    peaks = [measured_peak_bytes(ours, (x,), plan.static_bytes, loss=loss) for _ in range(2)]
    assert 0.99 * plan.peak_bytes < max(peaks) <= plan.peak_bytes


class Wide(nn.Module):
    """A layer that leaves a loss and a large tensor behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).relu()
        self.aux, self.seen = y.mean(), y.detach() * 2
        return y


def with_aux(model: Any, result: Tensor) -> Tensor:
    return result.sum() + model.aux


def test_a_known_loss_leaves_single_numbers_to_the_caller() -> None:
    original, ours = pair(Wide, 256, 64, loss=lambda y: y.sum())
    torch.manual_seed(3)
    x = torch.randn(256, 64)
    for model in (original, ours):
        with_aux(model, model(x)).backward()
    grads = [[p.grad for p in model.parameters()] for model in (original, ours)]
    assert same(*grads)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        last = self.last = self.inner(x if self.last is None else x + self.last.detach())
        return last


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.found = nn.Linear(16, 16), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.found.append(y)
        return y


class Bypassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.__dict__["found"] = y
        return y


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.found: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if "found" in self.__dict__ and self.__dict__["found"] is not None:
            y = y * 2
        self.found = y
        return y


@pytest.mark.parametrize("make", [Recurrent, Appending, Bypassing, Looking])
def test_what_the_last_call_left_is_not_read(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match=r"IRC338.*reads what the last call left there"):
        pair(make)


DECISIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "branch": lambda self, y: y * 2 if self.calls > 2 else y,
    "truth": lambda self, y: y * 2 if self.calls else y,
    "index": lambda self, y: y[:, self.calls - self.calls],
    "product": lambda self, y: y * self.calls,
    "power": lambda self, y: y**self.calls,
    "tensor": lambda self, y: y + torch.tensor(self.calls),
    "full": lambda self, y: y + torch.full((16,), self.calls),
    "text": lambda self, y: y * len(f"{self.calls}"),
    "class": lambda self, y: y * 2 if isinstance(self.calls, int) else y,
    "hash": lambda self, y: y * {0: 1, 1: 2}.get(self.calls, 3),
    "float": lambda self, y: y * float(self.calls),
    "range": lambda self, y: sum((y for _ in range(self.calls)), y),
    "method": lambda self, y: y * self.calls.bit_length(),
    "caught": lambda self, y: y * _caught(self),
    "stored": lambda self, y: setattr(self, "other", self.calls) or y,
    "equal": lambda self, y: y * 2 if self.calls == 1 else y,
    "printed": lambda self, y: (repr(self.calls), y)[1],
}


def _caught(counting: Any) -> float:
    try:
        return float(counting.calls)
    except Exception:
        return 1.0


class Deciding(nn.Module):
    def __init__(self, decide: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.calls, self.decide = nn.Linear(16, 16), 0, decide

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.decide(self, self.inner(x))


@pytest.mark.parametrize("decision", DECISIONS)
def test_a_counter_that_decides_is_refused(decision: str) -> None:
    with pytest.raises(UnsupportedError, match=r"IRC338.*calls"):
        pair(lambda: Deciding(DECISIONS[decision]))


class Returning(Deciding):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.inner(x), self.calls


def test_a_counter_that_is_returned_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"IRC338.*calls"):
        pair(lambda: Returning(lambda _, y: y))


class Switched(nn.Module):
    """Reads in one kind of call what it leaves in another."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, *, keep: bool = True) -> Tensor:
        return self.part(x, keep=keep)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.kept: Tensor = torch.zeros(16)

    def forward(self, x: Tensor, *, keep: bool) -> Tensor:
        y = self.inner(x)
        if keep:
            self.kept = y.detach().mean(0)
            return y
        return y * self.kept


def test_a_call_that_reads_sees_what_another_left() -> None:
    original, ours = pair(Switched, budget="1MiB")
    kept = lambda model, x: model(x).sum()  # noqa: E731
    read = lambda model, x: model(x, keep=False).sum()  # noqa: E731
    found: list[list[Any]] = []
    for model in (original, ours):
        found.append(
            [*steps(model, 1, kept), *steps(model, 2, read), *steps(model, 2, kept), *steps(model, 1, read)]
        )
    assert same(*found)


def test_a_pipeline_refuses_attributes() -> None:
    with pytest.raises(UnsupportedError, match=r"IRC338.*a pipeline"):
        irc.pipeline(
            Model(),
            (torch.randn(32, 16),),
            stages=2,
            micro_batches=2,
            budget="1GiB",
            loss=lambda y, _: y.sum(),
        )


class Choosing(nn.Module):
    """Leaves a loss in some calls, and says each time what it did."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(16, 16))
        self.aux: Any = 0.0
        self.rows, self.sizes, self.mode = 0, None, "none"

    def forward(self, x: Tensor, *, with_aux: bool = False) -> Tensor:
        y = self.part(x)
        self.aux, self.mode = 0.0, "plain"
        self.rows, self.sizes = x.shape[0], [x.shape[0], {"columns": 16}]
        if with_aux:
            self.aux, self.mode = y.mean(), "aux"
        return y


@pytest.mark.parametrize("first", [False, True])
def test_each_call_leaves_what_eager_leaves(first: bool) -> None:
    original, ours = pair(Choosing, budget="1MiB")
    for count, with_aux in enumerate((first, not first, first, first, not first)):
        for model in (original, ours):
            cast("Any", model).mode = "reset"
            step = lambda model, x: model(x, with_aux=with_aux).sum() + model.aux  # noqa: B023, E731
            steps(model, 1, step)
            if count == 2:
                model.eval()(torch.ones(5, 16))
                model.train()
        found = [[m.aux, m.rows, m.sizes, m.mode] for m in cast("Any", (original, ours))]
        assert same(*found) or count == 2
    assert len(ours.irc_plans) == 3


CLASSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "type": lambda self, y: y * (1.0 if type(self.calls) is int else 100.0),
    "identity": lambda self, y: y * (1.0 if self.calls is self.one else 100.0),
    "callable": lambda self, y: y * (100.0 if callable(self.calls) else 1.0),
}


@pytest.mark.parametrize("decision", CLASSES)
def test_a_counter_whose_class_decides_is_refused(decision: str) -> None:
    def make() -> nn.Module:
        model = Deciding(CLASSES[decision])
        vars(model)["one"] = 1
        return model

    with pytest.raises(UnsupportedError, match=r"IRC338.*calls"):
        pair(make)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a setting of a layer": lambda self: setattr(self.act, "negative_slope", self.act.negative_slope * 0.5),
    "a rate": lambda self: setattr(self.drop, "p", self.drop.p * 0.5),
    "a mode": lambda self: self.norm.eval(),
    "the submodules": lambda self: (setattr(self, "a", self.b), setattr(self, "b", self.a)),
    "a number of numpy": lambda self: setattr(self, "scale", self.scale * np.float32(0.5)),
    "a clock": lambda self: setattr(self, "seen", time.perf_counter()),
}


class Changing(nn.Module):
    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.act, self.drop, self.norm = nn.LeakyReLU(), nn.Dropout(0.5), nn.BatchNorm1d(16)
        self.scale, self.change = np.float32(1), change

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.drop(self.act(self.b(self.a(x))))) * float(self.scale)
        self.change(self)
        return y


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_of_a_forward_are_refused(change: str) -> None:
    model = Changing(CHANGES[change])
    before = (model.act.negative_slope, model.drop.p, model.norm.training, model.a, model.scale)
    with pytest.raises(UnsupportedError, match="IRC338"):
        irc.optimize(model, (torch.randn(32, 16),), budget="1MiB")
    assert before == (model.act.negative_slope, model.drop.p, model.norm.training, model.a, model.scale)
