"""Roundings that only a step can show: a plan names them as soon as one has."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc
from irc.ir.pipeline.plan import PipelinePlan


class Tied(nn.Module):
    """An embedding that is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(50, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.inner(self.embedding(ids))), self.embedding.weight)


def _penalty(module: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in module.parameters()]).sum()


LOOPS: dict[str, tuple[int, bool, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "one forward": (1, False, lambda m, a, b: m(a).square().mean()),
    "a penalty before": (1, False, lambda m, a, b: 1e-2 * _penalty(m) + m(a).square().mean()),
    "a penalty after": (1, True, lambda m, a, b: m(a).square().mean() + 1e-2 * _penalty(m)),
    "two forwards": (2, True, lambda m, a, b: (m(a) - m(b)).square().mean()),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_added_to_several_uses_of_a_parameter_is_named_where_it_comes_first(name: str) -> None:
    forwards, differs, loss = LOOPS[name]
    torch.manual_seed(0)
    module, (a, b) = Tied(), torch.randint(50, (2, 4, 6))
    fitted: Any = irc.optimize(
        copy.deepcopy(module), (a,), "100%", costs="analytic", forwards_in_flight=forwards
    )
    assert fitted.plan.roundings == ()
    for each in (module, fitted):
        loss(each, a, b).backward()
    pairs = dict(
        zip(
            dict(module.named_parameters()),
            zip(module.parameters(), fitted.parameters(), strict=True),
            strict=True,
        )
    )
    others = [name for name, (ours, its) in pairs.items() if not torch.equal(ours.grad, its.grad)]  # pyright: ignore
    assert others == (["embedding.weight"] if differs else [])
    assert [rounding.tensors for rounding in fitted.plan.roundings] == [("embedding.weight",)] * differs
    assert all(not parameter._backward_hooks for parameter in fitted.parameters())  # pyright: ignore


class _Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.within = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.within, self.before(x), use_reentrant=True)  # pyright: ignore
        return result


class _ClosedOver(_Reentrant):
    """The function reads a view of a parameter that was made outside of it."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (each.view_as(each) for each in self.within[0].parameters())
        result: Tensor = checkpoint(lambda y: y @ weight.t() + bias, self.before(x), use_reentrant=True)  # pyright: ignore
        return result


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("kind", [_Reentrant, _ClosedOver])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_what_is_added_beside_a_reentrant_checkpoint_is_named(
    kind: type[_Reentrant], name: str, is_hooked: bool
) -> None:
    forwards, _, loss = LOOPS[name]
    torch.manual_seed(0)
    module, batches = kind(), torch.randn(2, 4, 16)
    fitted: Any = irc.optimize(
        copy.deepcopy(module), (batches[0],), "100%", costs="analytic", forwards_in_flight=forwards
    )
    for each in (*module.parameters(), *fitted.parameters()) if is_hooked else ():
        each.register_hook(lambda gradient: gradient * 1.5)
    for _ in range(3):
        for each in (module, fitted):
            loss(each, *batches).backward()
    pairs = zip(module.named_parameters(), fitted.parameters(), strict=True)
    others = [name for (name, ours), its in pairs if not torch.equal(ours.grad, its.grad)]  # pyright: ignore
    assert is_hooked or bool(others) is (name != "one forward")
    named = {name for rounding in fitted.plan.roundings for name in rounding.tensors}
    assert named >= {*others} and named <= {"within.0.weight", "within.0.bias"}
    assert bool(named) is (name != "one forward")


def test_a_parameter_that_a_checkpoint_is_given_and_reads_is_named() -> None:
    class Both(_Reentrant):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.within[0].weight
            result: Tensor = checkpoint(  # pyright: ignore
                lambda y, given: nn.functional.linear(self.within(y), given),
                self.before(x),
                weight,
                use_reentrant=True,
            )
            return result

    torch.manual_seed(0)
    module, x = Both(), torch.randn(4, 16)
    fitted: Any = irc.optimize(copy.deepcopy(module), (x,), "100%", costs="analytic")
    for _ in range(2):
        for each in (module, fitted):
            each(x).square().mean().backward()
    pairs = zip(module.named_parameters(), fitted.parameters(), strict=True)
    others = {name for (name, ours), its in pairs if not torch.equal(ours.grad, its.grad)}  # pyright: ignore
    assert others == {"within.0.weight"} and fitted.plan.may_differ("within.0.weight")


@pytest.mark.parametrize(
    "options", [{"accumulate_gradients": True}, {"optimizer_in_backward": torch.optim.SGD}]
)
def test_a_parameter_that_is_frozen_after_the_forward_gets_no_released_gradient(
    options: dict[str, Any],
) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    fitted: Any = irc.optimize(module, (x,), "100%", costs="analytic", **options)
    before = fitted[2].weight.detach().clone()
    loss = fitted(x).square().mean()
    fitted[2].weight.requires_grad_(False)
    loss.backward()
    assert fitted[2].weight.grad is None and torch.equal(fitted[2].weight, before)
    assert options.get("optimizer_in_backward") or fitted[0].weight.grad is not None


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_backward_adds_to_gradients_that_a_plan_accumulates_is_named(name: str) -> None:
    forwards, _, loss = LOOPS[name]
    torch.manual_seed(0)
    module, batches = Tied(), torch.randint(50, (4, 4, 6))
    fitted: Any = irc.optimize(
        copy.deepcopy(module),
        (batches[0],),
        "100%",
        costs="analytic",
        forwards_in_flight=forwards,
        accumulate_gradients=True,
    )
    names = set[str]()
    for a, b in (batches[:2], batches[2:]):
        for each in (module, fitted):
            loss(each, a, b).backward()
        pairs = zip(module.named_parameters(), fitted.parameters(), strict=True)
        names |= {n for (n, ours), its in pairs if not torch.equal(ours.grad, its.grad)}  # pyright: ignore
        assert all(fitted.plan.may_differ(n) for n in names)
    assert names == (set(dict(module.named_parameters())) if name != "one forward" else set())
    assert len(fitted.plan.roundings) == len(names)


def test_all_names_of_a_tied_parameter_are_named() -> None:
    layer = nn.Linear(8, 8)
    module, x = nn.Sequential(layer, nn.Sequential(layer, nn.Tanh())), torch.randn(4, 8)
    fitted: Any = irc.optimize(module, (x,), "100%", costs="analytic")
    (fitted(x).square().mean() + 1e-2 * _penalty(fitted)).backward()
    tensors = [rounding.tensors for rounding in fitted.plan.roundings]
    assert tensors == [("0.weight", "1.0.weight"), ("0.bias", "1.0.bias")]


class _Einsum(nn.Module):
    """Two uses of a weight whose gradients come transposed: their sum is laid out as the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.einsum("bld,bmd,ml->bld", x, x, self.weight)
        return x


def test_several_uses_whose_sum_is_laid_out_anew_are_named() -> None:
    torch.manual_seed(0)
    module, x = _Einsum(), torch.randn(4, 6, 8)
    fitted: Any = irc.optimize(module, (x,), "100%", costs="analytic", loss=lambda y: y.square().mean())
    (fitted(x).square().mean() + 1e-2 * _penalty(fitted)).backward()
    assert [rounding.tensors for rounding in fitted.plan.roundings] == [("weight",)]


def test_a_gradient_in_a_layout_that_the_loss_did_not_tell_is_named() -> None:
    torch.manual_seed(0)
    module, x, gradient = nn.Linear(8, 8), torch.randn(16, 8), torch.randn(8, 16).t()
    fitted: Any = irc.optimize(copy.deepcopy(module), (x,), "100%", costs="analytic")
    fitted(x).backward(gradient=gradient.contiguous())
    assert fitted.plan.roundings == ()
    fitted(x).backward(gradient=gradient)
    (rounding,) = fitted.plan.roundings
    text = str(rounding)
    assert rounding.tensors == ("weight", "bias")
    assert "output 0" in text and "[1, 16]" in text and "loss=" in text
    assert text in fitted.plan.summary()


def test_a_backward_that_does_not_reach_a_parameter_leaves_nothing_on_it() -> None:
    torch.manual_seed(0)
    module, ids = Tied(), torch.randint(50, (4, 6))
    fitted: Any = irc.optimize(copy.deepcopy(module), (ids,), "100%", costs="analytic")
    for _ in range(3):
        for each in (module, fitted):
            gradients = torch.autograd.grad(each(ids).square().mean(), each.inner.weight)
            each.inner.weight.grad = gradients[0]
        assert not fitted.embedding.weight._backward_hooks
    for each in (module, fitted):
        each(ids).square().mean().backward()
        for parameter, other in zip(module.parameters(), fitted.parameters(), strict=True):
            assert each is module or torch.equal(parameter.grad, other.grad)  # pyright: ignore
    assert fitted.plan.roundings == ()


def test_a_parameter_that_is_frozen_before_backward_gets_no_gradient() -> None:
    torch.manual_seed(0)
    module, ids = Tied(), torch.randint(50, (4, 6))
    fitted: Any = irc.optimize(copy.deepcopy(module), (ids,), "100%", costs="analytic")
    for each in (module, fitted):
        result = each(ids).square().mean()
        each.embedding.weight.requires_grad_(False)
        result.backward()
        assert each.embedding.weight.grad is None
    assert torch.equal(module.inner.weight.grad, fitted.inner.weight.grad)  # pyright: ignore


class _TwoCheckpoints(_Reentrant):
    """A parameter of two reentrant checkpoints is named before any step, as more than a loop shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("kind", [_Reentrant, _TwoCheckpoints])
def test_plans_of_graphs_name_what_reentrant_checkpoints_add(kind: type[_Reentrant], name: str) -> None:
    torch.compiler.reset()
    _, _, loss = LOOPS[name]
    torch.manual_seed(0)
    module, batches = kind(), torch.randn(2, 4, 16)
    twin, backend = copy.deepcopy(module), irc.backend("1GiB", costs="analytic")
    compiled: Any = torch.compile(twin, backend=backend)
    for _ in range(2):
        for each in (module, compiled):
            loss(each, *batches).backward()
    pairs = zip(module.named_parameters(), twin.parameters(), strict=True)
    others = {name for (name, ours), its in pairs if not torch.equal(ours.grad, its.grad)}  # pyright: ignore
    assert all(any(plan.may_differ(other) for plan in backend.plans) for other in others)
    assert bool(others) is (kind is _TwoCheckpoints or name != "one forward")


def _squares(result: Tensor, *_: Any) -> Tensor:
    return result.square().mean()


def test_a_pipeline_names_what_reentrant_checkpoints_add() -> None:
    torch.manual_seed(0)
    module, x = _TwoCheckpoints(), torch.randn(8, 16)
    planned = irc.pipeline(module, (x,), "1GiB", stages=2, micro_batches=2, costs="analytic", loss=_squares)
    names = {name for each in planned.plan.roundings for name in each.tensors or ()}
    assert names == {"within.0.weight", "within.0.bias"}
    assert all(str(each) in planned.plan.summary() for each in planned.plan.roundings)
    assert PipelinePlan.from_json(json.loads(json.dumps(planned.plan.to_json()))) == planned.plan
