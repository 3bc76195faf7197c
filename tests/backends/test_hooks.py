"""Hooks and what torch builds on them: the calls that the original makes, or a refusal by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model, assert_same, fitted, outcome, recompute_some
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import irc
from irc.ir import Graph, Schedule

torch.set_num_threads(1)


def recomputing(graph: Graph) -> Schedule:
    return recompute_some(graph, 3)


def _forward(m: Any, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    h = torch.tanh(m.first(x)) * scale
    return m.second(h), h.exp()


def model() -> Any:
    """Two layers with one weight under two names."""
    torch.manual_seed(0)
    module: Any = Model(_forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    module.second.weight = module.first.weight
    return module


def total(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].square().sum() + outputs[1].sum()


Calls = list[Any]


def copied(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def same(mine: Any, its: Any) -> bool:
    a, b = pytree.tree_leaves(mine), pytree.tree_leaves(its)
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


# ---------------------------------------------------------------------- the same calls


def _root(m: Any, calls: Calls) -> None:
    """Hooks of every kind on the root, some of which change what goes through them."""

    def pre(module: Any, args: Any, kwargs: Any) -> Any:
        calls.append(("pre", copied(args), kwargs))
        return (args[0] * 2,), {"scale": kwargs["scale"] + 0.5}

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        calls.append(("after", copied(args), kwargs, copied(output)))
        return output[0] * 3, output[1]

    def backward_pre(module: Any, gradients: Any) -> Any:
        calls.append(("backward pre", copied(gradients)))
        return tuple(gradient * 0.5 for gradient in gradients)

    def backward(module: Any, inputs: Any, outputs: Any) -> Any:
        calls.append(("backward", copied(inputs), copied(outputs)))
        return tuple(None if gradient is None else gradient + 1 for gradient in inputs)

    m.register_forward_pre_hook(pre, with_kwargs=True)
    m.register_forward_hook(after, with_kwargs=True, always_call=True)
    m.register_full_backward_pre_hook(backward_pre)
    m.register_full_backward_hook(backward)


def _parameters(m: Any, calls: Calls) -> None:
    """Hooks on the parameters; the order among parameters is the engine's own affair."""
    found: dict[str, Calls] = {name: [] for name, _ in m.named_parameters()}
    calls.append(found)

    def of(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def gradient(value: Tensor) -> Tensor:
            found[name].append(("gradient", value.clone()))
            return value * 2

        def accumulated(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found[name].append(("accumulated", parameter.grad.clone(), parameter.detach().clone()))

        return gradient, accumulated

    for name, parameter in m.named_parameters():
        gradient, accumulated = of(name)
        parameter.register_hook(gradient)
        parameter.register_post_accumulate_grad_hook(accumulated)


HOOKS: dict[str, Callable[[Any, Calls], None]] = {
    "root": _root,
    "parameters": _parameters,
}


def hooked_step(m: Any, x: Tensor, calls: Calls) -> dict[str, Any]:
    m.zero_grad()
    x.grad = None
    middle = x * 1.0
    middle.register_hook(lambda gradient: calls.append(("input", gradient.clone())))
    first, second = m(middle, scale=2.0)
    first.register_hook(lambda gradient: gradient * 3)
    second.retain_grad()
    second.register_hook(lambda gradient: calls.append(("output", gradient.clone())))
    (first.sum() + second.square().sum()).backward()
    found = {n: None if p.grad is None else p.grad.clone() for n, p in m.named_parameters()}
    return found | {"x": x.grad, "second": second.grad}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_the_root_on_parameters_and_on_tensors_make_the_same_calls(kind: str, when: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    results: list[tuple[list[dict[str, Any]], Calls]] = []
    for is_planned in (False, True):
        calls: Calls = []
        module = model()
        if when == "before":
            HOOKS[kind](module, calls)
        scale = 2.5 if kind == "root" else 2.0
        trained = fitted(module, x, schedule=recomputing, scale=scale) if is_planned else module
        if when == "after":
            HOOKS[kind](trained, calls)
        results.append(([hooked_step(trained, x, calls) for _ in range(2)], calls))
    (its, its_calls), (mine, mine_calls) = results
    for a, b in zip(mine, its, strict=True):
        assert_same(a, b)
    assert same(mine_calls, its_calls) and len(its_calls) >= 3
    if kind == "parameters":
        assert [len(found) for found in mine_calls[0].values()] == [4, 4, 4]


def test_an_optimizer_in_post_accumulate_hooks_trains_as_with_the_original() -> None:
    x = torch.randn(3, 4)
    states: list[dict[str, Any]] = []
    for is_planned in (False, True):
        module = model()
        trained = fitted(module, x, schedule=recomputing) if is_planned else module
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in trained.parameters()}

        def apply(parameter: Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in trained.parameters():
            parameter.register_post_accumulate_grad_hook(apply)
        for _ in range(3):
            total(trained(x)).backward()
        states.append(dict(trained.state_dict()))
    assert_same(states[1], states[0])


def test_a_hook_on_several_gradients_is_called_with_the_same() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    calls: list[Calls] = []
    trained: Any
    for trained in (model(), fitted(model(), x, schedule=recomputing)):
        calls.append([])
        watched = [trained.first.weight, trained.first.bias, x]
        for mode in ("all", "any"):
            torch.autograd.graph.register_multi_grad_hook(
                watched, lambda found, calls=calls: calls[-1].append(copied(found)), mode=mode
            )
        total(trained(x)).backward()
    assert len(calls[0]) == 2 and same(calls[1][-1], calls[0][-1])


@pytest.mark.parametrize("kind", ["hook", "post"])
def test_a_hook_whose_gradient_the_loss_does_not_reach_is_refused_by_name(kind: str) -> None:
    x = torch.randn(3, 4)
    ours: Any = fitted(model(), x)
    bias = ours.second.bias
    handle = bias.register_hook(watch) if kind == "hook" else bias.register_post_accumulate_grad_hook(watch)
    with pytest.raises(irc.UnsupportedError, match=r"IRC537.*second\.bias has a hook \(<function watch"):
        ours(x)[1].sum().backward()
    assert all(parameter.grad is None for parameter in ours.parameters())
    ours(x)[1].sum().backward(inputs=[ours.first.bias])
    total(ours(x)).backward()
    handle.remove()
    handle = ours.second.weight.register_hook(watch)  # tied: it has a gradient under its other name
    ours(x)[1].sum().backward()
    handle.remove()


def test_a_hook_that_is_removed_is_not_called() -> None:
    x = torch.randn(3, 4)
    ours = fitted(model(), x)
    calls: Calls = []
    for handle in (
        ours.register_forward_hook(lambda *_: calls.append(1)),
        ours.first.weight.register_post_accumulate_grad_hook(lambda _: calls.append(2)),  # type: ignore[union-attr]
    ):
        handle.remove()
    total(ours(x)).backward()
    assert not calls


# ---------------------------------------------------------------------- on submodules, and on all modules

GLOBAL: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "forward hooks": module_hooks.register_module_forward_hook,
    "forward pre hooks": module_hooks.register_module_forward_pre_hook,
    "backward hooks": module_hooks.register_module_full_backward_hook,
    "backward pre hooks": module_hooks.register_module_full_backward_pre_hook,
}


def watch(*_: Any) -> None:
    """A hook that does nothing."""


@pytest.mark.parametrize("kind", GLOBAL)
def test_a_hook_on_all_modules_is_refused_by_name_where_there_are_submodules(kind: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    ours, leaf = fitted(model(), x), fitted(nn.Linear(4, 4), x)
    calls: Calls = []
    handle = GLOBAL[kind](watch)
    try:
        with pytest.raises(irc.UnsupportedError, match=rf"IRC532.*on all modules \({kind}: .*watch"):
            ours(x)
        with pytest.raises(irc.UnsupportedError, match="IRC532"):
            irc.optimize(model(), x, "100%", costs="analytic")
        with torch.no_grad():
            ours(x)
        handle.remove()
        handle = GLOBAL[kind](lambda module, *_: calls.append(type(module).__name__))
        leaf(x).sum().backward()
        assert calls == ["Linear"]
    finally:
        handle.remove()
    total(ours(x)).backward()


def test_a_legacy_backward_hook_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    ours = fitted(nn.Linear(4, 4), x)
    handle = ours.register_backward_hook(watch)
    with pytest.raises(irc.UnsupportedError, match=r"IRC532.*register_backward_hook\(\).*the root module"):
        ours(x)
    handle.remove()
    monkeypatch.setattr(module_hooks, "_global_is_full_backward_hook", None)  # torch never goes back
    handle = module_hooks.register_module_backward_hook(watch)
    try:
        with pytest.raises(irc.UnsupportedError, match=r"IRC532.*register_backward_hook\(\).*all modules"):
            ours(x)
    finally:
        handle.remove()
    ours(x).sum().backward()


def test_counting_operations_sees_those_that_run_again() -> None:
    x = torch.randn(3, 4)
    counts: list[int] = []
    for trained in (model(), fitted(model(), x, schedule=lambda graph: recompute_some(graph, 7))):
        with FlopCounterMode(display=False) as counter:
            total(trained(x)).backward()
        counts.append(counter.get_total_flops())
    assert counts[1] >= counts[0] > 0


def test_a_hook_of_torch_distributed_on_a_submodule_is_refused() -> None:
    x = torch.randn(3, 4)
    ours: Any = fitted(model(), x)

    def hook(*_: Any) -> None:
        """As those of `torch.distributed.tensor.parallel`."""

    hook.__module__ = "torch.distributed.somewhere"
    handle = ours.first.register_forward_pre_hook(hook)
    with pytest.raises(irc.UnsupportedError, match=r"IRC505.*'first'"):
        ours(x)
    handle.remove()


# ---------------------------------------------------------------------- registered by the forward itself


def test_a_hook_on_a_tensor_inside_of_the_forward_is_traced_where_it_computes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.lin(x)
        h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return torch.tanh(h)

    torch.manual_seed(0)
    module, x = Model(forward, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    original = copy.deepcopy(module)
    ours = irc.optimize(module, x, "100%", costs="analytic", time_limit=1)
    assert_same(outcome(ours, (x,), {}), outcome(original, (x,), {}))


SIDE_EFFECTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "hook": (lambda h: h.register_hook(watch), r"hook on a tensor \(<function watch.*returns no gradient"),
    "parameter": (
        lambda h: h.register_post_accumulate_grad_hook(watch),
        r"hook on a tensor \(<function watch",
    ),
    "retain_grad": (lambda h: h.retain_grad(), r"retain_grad\(\) on a tensor"),
}


@pytest.mark.parametrize("kind", SIDE_EFFECTS)
def test_a_hook_on_a_tensor_inside_of_the_forward_that_acts_is_refused(kind: str) -> None:
    register, message = SIDE_EFFECTS[kind]

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.lin(x)
        register(h)
        return torch.tanh(h)

    module, x = Model(forward, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    with pytest.raises(irc.UnsupportedError, match=rf"(?s)IRC536.*{message}.*help: return the tensor"):
        irc.optimize(module, x, "100%", costs="analytic")
    handle = torch.ones(1, requires_grad=True).register_hook(watch)  # the refusal ends with the capture
    handle.remove()


# ---------------------------------------------------------------------- weights made by hooks


def _pruned(module: nn.Module) -> Any:
    return prune.l1_unstructured(module, "weight", amount=0.5)


class Checkered(prune.BasePruningMethod):
    """A user's own pruning method."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Any, default_mask: Any) -> Any:
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


class Doubled(nn.Module):
    """A user's own parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


WEIGHTS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": _pruned,
    "own pruning": lambda module: Checkered.apply(module, "weight"),
    "parametrize": lambda module: parametrize.register_parametrization(module, "weight", Doubled()),
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
}


def weighted(kind: str) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        WEIGHTS[kind](module[0])
    return module


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_computed_before_each_forward_train_as_in_the_original(kind: str) -> None:
    x = torch.randn(3, 4)
    states: list[dict[str, Any]] = []
    for is_planned in (False, True):
        module = weighted(kind)
        trained = fitted(module, x, schedule=recomputing) if is_planned else module
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            trained(x).square().sum().backward()
            optimizer.step()
        states.append(dict(trained.state_dict()))
    assert_same(states[1], states[0])


@pytest.mark.parametrize("where", ["submodule", "root"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_computed_from_now_on_are_noticed(kind: str, where: str) -> None:
    x = torch.randn(3, 4)
    module = nn.Linear(4, 4)
    ours: Any = fitted(nn.Sequential(module) if where == "submodule" else module, x)
    ours(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        WEIGHTS[kind](ours[0] if where == "submodule" else ours)
    with pytest.raises(irc.IrcError, match=r"IRC507|IRC532"):
        ours(x)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune", "own pruning"])
def test_a_root_whose_weights_a_hook_computes_is_refused_by_name(kind: str) -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        WEIGHTS[kind](module)
    with pytest.raises(irc.UnsupportedError, match=r"IRC532.*root module computes its weights") as raised:
        irc.optimize(module, x, "100%", costs="analytic")
    assert raised.value.help is not None and "Sequential" in raised.value.help
    ours = irc.optimize(nn.Sequential(module), x, "100%", costs="analytic", time_limit=1)
    assert torch.equal(ours(x), ours.eval()(x)) or kind == "spectral_norm"


# ---------------------------------------------------------------------- what else is changed afterwards


def _forward_of_part(ours: Any) -> None:
    ours.first.forward = lambda x: x


def _replaced_activation(ours: Any) -> None:
    ours.first.activation = torch.relu


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a parameter more": (
        lambda m: m.first.register_parameter("extra", nn.Parameter(torch.ones(1))),
        "IRC507.*'first' has other submodules, parameters or buffers",
    ),
    "a parameter of the root": (
        lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(1))),
        "IRC507.*the module has other submodules, parameters or buffers",
    ),
    "a buffer more": (
        lambda m: m.register_buffer("extra", torch.ones(1)),
        "IRC507.*module has other .*buffers",
    ),
    "a parameter less": (
        lambda m: setattr(m.first, "bias", None),
        r"IRC501.*first\.bias is gone",
    ),
    "another class": (
        lambda m: setattr(m.first, "__class__", nn.Bilinear),
        "IRC507.*of class Linear",
    ),
    "another forward": (_forward_of_part, "IRC507.*'first'.*'forward': .*lambda"),
    "another function": (_replaced_activation, "IRC507.*setting of submodule 'first'.*relu"),
    "half": (lambda m: m.half(), r"IRC501.*first\.weight is float16.*made for float32"),
    "double": (lambda m: m.to(torch.float64), r"IRC501.*first\.weight is float64"),
    "device": (lambda m: m.to("meta"), "IRC501.*on meta"),
    "other shape": (lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(4, 5))), "IRC501.*4, 5"),
    "frozen": (lambda m: m.requires_grad_(False), r"IRC503.*requires_grad=False"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_after_planning_is_noticed(what: str) -> None:
    x = torch.randn(3, 4)
    ours = fitted(model(), x)
    ours(x)
    change, message = CHANGES[what]
    change(ours)
    with pytest.raises(irc.IrcError, match=message) as raised:
        ours(x)
    assert raised.value.help is not None


def test_a_replaced_parameter_is_the_one_that_is_trained_and_ties_are_those_of_now() -> None:
    x = torch.randn(3, 4)
    original, module = model(), model()
    ours: Any = irc.optimize(module, x, "200%", costs="analytic", time_limit=1)
    for trained in (original, ours):
        trained.second.weight = nn.Parameter(torch.full((4, 4), 0.3))  # no longer tied
    assert_same(outcome(ours, (x,), {}), outcome(original, (x,), {}))
    assert len(list(ours.parameters())) == 4
    for trained in (original, ours):
        trained.first.weight = trained.second.weight  # tied again
        trained.zero_grad()
    assert_same(outcome(ours, (x,), {}), outcome(original, (x,), {}))


# ---------------------------------------------------------------------- gradient checkpointing


def _tokens() -> Any:
    torch.manual_seed(0)
    module: Any = Model(
        lambda m, tokens: m.head(torch.tanh(h := m.embedding(tokens))).sum() + h.sum() * 0,
        embedding=nn.Embedding(11, 4),
        head=nn.Linear(4, 3),
    )
    return module


def asking(module: Any, _: Any, made: Any) -> None:
    made.requires_grad_(True)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_hook_that_asks_for_an_embedding_s_gradient_is_taken(is_frozen: bool) -> None:
    ours: Any = _tokens()
    tokens = torch.randint(11, (2, 5))
    ours.embedding.requires_grad_(not is_frozen)
    ours.embedding.register_forward_hook(asking)
    original = copy.deepcopy(ours)
    ours = fitted(ours, tokens, schedule=recomputing)
    ours.embedding.register_forward_hook(asking)
    assert_same(outcome(ours, (tokens,), {}), outcome(original, (tokens,), {}))


def _scaling(module: Any, _: Any, made: Any) -> None:
    made.mul_(2)


def _flag(module: Any, _: Any, made: Any, flag: bool = True) -> None:
    made.requires_grad_(flag)


def test_a_hook_that_also_computes_is_traced() -> None:
    ours, tokens = _tokens(), torch.randint(11, (2, 5))
    ours.embedding.register_forward_hook(_scaling)
    original = copy.deepcopy(ours)
    ours = irc.optimize(ours, tokens, "1MiB", costs="analytic", time_limit=1)
    assert_same(outcome(ours, (tokens,), {}), outcome(original, (tokens,), {}))


def test_a_hook_that_does_nothing_here_is_refused_with_the_way_out() -> None:
    ours = _tokens()
    ours.embedding.register_forward_hook(_flag)
    with pytest.raises(irc.UnsupportedError, match=r"IRC505.*'embedding' has a hook") as raised:
        irc.optimize(ours, torch.randint(11, (2, 5)), "100%", costs="analytic")
    assert raised.value.help is not None and "gradient_checkpointing_disable()" in raised.value.help


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("is_before", [True, False])
def test_gradient_checkpointing_of_transformers_adds_nothing(is_before: bool) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, use_cache=False, bos_token_id=0
    )
    torch.manual_seed(0)
    ours: Any = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(16, (2, 6))
    named = {"input_ids": tokens, "labels": tokens}
    models = [ours, copy.deepcopy(ours)]
    for model in models if is_before else ():
        model.gradient_checkpointing_enable()
    models[0] = irc.optimize(ours, (), "1MiB", example_kwargs=named, costs="analytic", time_limit=1)
    for model in () if is_before else models:
        model.gradient_checkpointing_enable()
    for model in models:
        torch.manual_seed(1)
        model(**named).loss.backward()
    for mine, its in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, its.grad)
    assert len(models[0].irc_plans) == (1 if is_before else 2)
