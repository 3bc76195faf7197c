"""Derivatives in other ways than `loss.backward()`: the original's numbers, or a refusal before any run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model, assert_same, fitted, keep_all, recompute_some
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import irc
from irc.ir import Graph, Schedule

torch.set_num_threads(1)

SCHEDULES: list[Callable[[Graph], Schedule]] = [keep_all, lambda graph: recompute_some(graph, 3)]


def _forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(m.norm(m.first(x)))
    return m.second(h), h.exp()


def pair(schedule: Callable[[Graph], Schedule] = keep_all) -> tuple[Any, Any, Tensor]:
    """The original, a fitted copy of it, and an input that asks for its gradient; two weights are tied."""
    torch.manual_seed(0)
    module = Model(_forward, first=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), second=nn.Linear(4, 4))
    module.second.weight = module.first.weight  # type: ignore[union-attr]
    x = torch.randn(3, 4, requires_grad=True)
    return copy.deepcopy(module), fitted(module, x, schedule=schedule), x


def loss(model: Any, x: Tensor) -> Tensor:
    first, second = model(x)
    return first.square().sum() + second.sum()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_that_are_asked_for_are_the_original_s(schedule: Callable[[Graph], Schedule]) -> None:
    original, ours, x = pair(schedule)
    found: list[list[Any]] = []
    for model in (original, ours):
        named = dict(model.named_parameters())
        torch.autograd.backward(loss(model, x), inputs=[model.norm.bias, model.second.bias])
        kept = [None if p.grad is None else p.grad.clone() for p in named.values()]
        assert sum(gradient is None for gradient in kept) == 3 and x.grad is None
        found.append(kept)
        first, _ = model(x)
        found[-1] += torch.autograd.grad(first.sum(), [x, model.first.weight], retain_graph=True)
        found[-1] += torch.autograd.grad(first.sum(), [first, model.second.bias])
        assert torch.autograd.grad(model(x)[1].sum(), [model.second.bias], allow_unused=True) == (None,)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(model(x)[1].sum(), [model.second.bias])
        found[-1] += [buffer.clone() for buffer in model.buffers()]
    assert_same(dict(enumerate(found[1])), dict(enumerate(found[0])))  # type: ignore[arg-type]


def test_a_parameter_without_gradient_is_no_part_of_the_graph_as_in_eager() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x)

    x = torch.randn(3, 4, requires_grad=True)
    module: Any = Model(forward, lin=nn.Linear(4, 4), unused=nn.Linear(2, 2))
    ours = fitted(module, x)
    for model in (module, ours):
        out = model(x)
        node: Any = out.grad_fn
        reached = {following for following, _ in node.next_functions if following is not None}
        assert len(reached) <= 3
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(out.sum(), [module.unused.weight])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_functional_call_uses_and_differentiates_the_given_parameters(tied: bool) -> None:
    original, module, x = pair(lambda graph: recompute_some(graph, 3))
    ours: Any = module if tied else irc.optimize(copy.deepcopy(original), x, "200%", costs="analytic")
    before = {name: value.detach().clone() for name, value in ours.state_dict().items()}
    found: list[dict[str, Any]] = []
    for model in (original, ours):
        torch.manual_seed(1)
        given = {
            name: torch.randn_like(value).requires_grad_()
            for name, value in model.named_parameters(remove_duplicate=tied)
        }
        computed = {name: value * 2 for name, value in given.items()}
        statistics = {name: value.clone() for name, value in model.named_buffers()}
        value = functional_call(model, computed | statistics, (x,), tie_weights=tied)
        gradients = torch.autograd.grad(value[0].sum() + value[1].sum(), [*given.values(), x])
        found.append({str(k): g for k, g in enumerate((*value, *gradients))} | statistics)
    assert_same(found[1], found[0])
    assert_same({n: v for n, v in ours.state_dict().items()}, before)
    if tied:
        with pytest.raises(irc.IrcError, match=r"IRC503.*requires_grad=False"):
            functional_call(ours, {n: p.detach() for n, p in ours.named_parameters()}, (x,))


@pytest.mark.slow
def test_a_jacobian_row_by_row_is_the_original_s() -> None:
    original, ours, x = pair()
    for schedule in SCHEDULES:
        original, ours, x = pair(schedule)
        mine, its = (functional.jacobian(lambda x, m=m: m(x)[0], x) for m in (ours, original))
        assert torch.equal(mine, its)  # type: ignore[arg-type]
    vector = torch.ones(3, 4)
    mine, its = (functional.vjp(lambda x, m=m: m(x)[0], x, vector)[1] for m in (ours, original))
    assert torch.equal(mine, its)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- refused, and nothing has run


def _dual(model: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, torch.ones_like(x)))


def _dual_parameter(model: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(model.first.weight, torch.ones(4, 4))
        return functional_call(model, {"first.weight": weight}, (x,))


def _of_parameters(model: Any, x: Tensor) -> Any:
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    return torch.func.grad(lambda p: functional_call(model, p, (x,))[0].sum())(parameters)


def _first(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x)[0]


FORWARDS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "grad": (lambda m, x: torch.func.grad(lambda x: m(x)[0].sum())(x), r"torch\.func\.grad"),
    "grad of parameters": (_of_parameters, r"torch\.func\.grad"),
    "vjp": (lambda m, x: torch.func.vjp(m, x), r"torch\.func\.grad"),
    "jacrev": (lambda m, x: torch.func.jacrev(_first(m))(x), r"torch\.func\.grad"),
    "vmap": (lambda m, x: torch.func.vmap(m)(x.detach().expand(2, 3, 4)), r"torch\.func\.vmap"),
    "jvp": (lambda m, x: torch.func.jvp(m, (x,), (torch.ones(3, 4),)), r"torch\.func\.jvp"),
    "jacfwd": (lambda m, x: torch.func.jacfwd(_first(m))(x), r"torch\.func\.(jvp|vmap)"),
    "hessian": (lambda m, x: torch.func.hessian(lambda x: m(x)[0].sum())(x), r"torch\.func\."),
    "forward mode": (_dual, "forward-mode"),
    "forward mode of a parameter": (_dual_parameter, "forward-mode"),
    "jit": (lambda m, x: torch.jit.trace(m, x), r"torch\.jit\.trace"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.parametrize("name", FORWARDS)
def test_a_transform_is_refused_by_name_before_the_forward(name: str) -> None:
    _, ours, x = pair()
    before = copy.deepcopy(ours.state_dict())
    state = torch.get_rng_state()
    transform, named = FORWARDS[name]
    with pytest.raises(NotImplementedError, match=rf"IRC533.*{named}") as raised:
        transform(ours, x)
    assert isinstance(raised.value, irc.UnsupportedError) and raised.value.help is not None
    assert_same(dict(ours.state_dict()), dict(before))
    assert torch.equal(torch.get_rng_state(), state)
    loss(ours, x).backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_no_call_is_planned_within_a_transform() -> None:
    module, _, x = pair()
    ours: Any = irc.optimize(module, x, "200%", costs="analytic", time_limit=1)
    other = torch.randn(5, 4, requires_grad=True)
    for name in ("grad", "vjp", "jacrev", "hessian", "forward mode"):
        with pytest.raises(NotImplementedError, match="IRC533"):
            FORWARDS[name][0](ours, other)
    assert len(ours.irc_plans) == 1
    loss(ours, other).backward()
    assert len(ours.irc_plans) == 2


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.parametrize("name", FORWARDS)
def test_what_is_refused_in_training_runs_the_original_in_eval_mode(name: str) -> None:
    original, ours, x = pair()
    transform, _ = FORWARDS[name]
    mine, its = (transform(model.eval(), x) for model in (ours, original))
    if name == "jit":
        mine, its = mine(x), its(x)
    leaves = [torch.utils._pytree.tree_leaves(result) for result in (mine, its)]  # pyright: ignore
    for a, b in zip(*leaves, strict=True):
        assert not isinstance(a, Tensor) or torch.equal(a, b)


def _batch(model: Any, x: Tensor) -> Any:
    first, _ = model(x)
    return torch.func.vmap(lambda v: torch.autograd.grad(first, x, v)[0])(torch.ones(2, 3, 4))


BACKWARDS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "create_graph": (
        lambda m, x: torch.autograd.grad(loss(m, x), x, create_graph=True),
        "IRC504.*create_graph",
    ),
    "backward": (lambda m, x: loss(m, x).backward(create_graph=True), "IRC504.*create_graph"),
    "hessian": (lambda m, x: functional.hessian(lambda x: loss(m, x), x), "IRC504.*create_graph"),
    "batched": (
        lambda m, x: torch.autograd.grad(m(x)[0], x, torch.randn(5, 3, 4), is_grads_batched=True),
        "IRC533.*batch of gradients",
    ),
    "vectorized": (lambda m, x: functional.jacobian(_first(m), x, vectorize=True), "IRC533.*vectorize"),
    "vmap": (_batch, "IRC533.*vmap"),
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", BACKWARDS)
def test_another_backward_is_refused_by_name_before_it_runs(name: str) -> None:
    _, ours, x = pair()
    differentiate, named = BACKWARDS[name]
    with pytest.raises(NotImplementedError, match=named) as raised:
        differentiate(ours, x)
    assert isinstance(raised.value, irc.UnsupportedError) and raised.value.help is not None
    assert x.grad is None and all(parameter.grad is None for parameter in ours.parameters())
    loss(ours, x).backward()


# ---------------------------------------------------------------------- saved tensors


@pytest.mark.parametrize("kind", ["hooks", "save_on_cpu", "checkpoint"])
def test_hooks_on_saved_tensors_are_refused_by_name(kind: str) -> None:
    _, ours, x = pair()
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with pytest.raises(irc.UnsupportedError, match=r"IRC535.*hooks on saved tensors"):
        if kind == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                ours(x)
        elif kind == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                ours(x)
        else:
            checkpoint(ours, x, use_reentrant=False)
    assert not seen
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(x)


def test_a_reentrant_checkpoint_runs_the_plan_when_it_recomputes() -> None:
    original, ours, x = pair()
    found: list[dict[str, Any]] = []
    for model in (original, ours):
        x.grad = None
        first, second = checkpoint(model, x, use_reentrant=True)
        (first.square().sum() + second.sum()).backward()
        found.append({n: p.grad for n, p in model.named_parameters()} | {"x": x.grad} | model.state_dict())
    assert_same(found[1], found[0])
