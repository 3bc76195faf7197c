"""Gradients that leave within backward: the ordinary loop's numbers, the predicted memory, the refusals."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import (
    CASES,
    Model,
    assert_same,
    captured_case,
    image,
    keep_all,
    net,
    outcome,
    recompute_some,
    slow_among,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import irc
from irc.backends.torch import StandaloneModule, bind_program, compile_program
from irc.compiler.model_source import training_loss
from irc.compiler.training import compare, measured_peak_bytes
from irc.frontends.torch import Captured, capture
from irc.ir import Gradients, Graph, Plan, Schedule, verify_graph, verify_schedule
from irc.passes import Program, ReleaseGradients
from irc.passes.costs.optimizer_costs import OptimizerFactory, optimizer_of
from irc.passes.rewrites.release_gradients import release_gradients

torch.set_num_threads(1)


def momentum(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def recomputing(graph: Graph) -> Schedule:
    return recompute_some(graph, 1)


def released(
    module: nn.Module,
    *args: Any,
    factory: OptimizerFactory | None = None,
    schedule: Callable[[Graph], Schedule] = keep_all,
    **kwargs: Any,
) -> Any:
    """The fitted module whose gradients are accumulated, or applied by the factory's optimizers."""
    return released_from(capture(module, args, kwargs), module, factory, schedule)


def released_from(
    captured: Captured,
    module: nn.Module,
    factory: OptimizerFactory | None,
    schedule: Callable[[Graph], Schedule],
) -> Any:
    step = ReleaseGradients() if factory is None else ReleaseGradients("apply", factory)
    graph = step.run(Program(captured.graph)).graph
    verify_graph(graph)
    chosen = schedule(graph)
    verify_schedule(chosen, {})
    program = compile_program(chosen, captured.constants)
    optimizers = {
        name: optimizer_of(factory, [module.get_parameter(name)])
        for name in (program.released if factory is not None else ())
        if factory is not None
    }
    return bind_program(module, program, captured.signature, None, optimizers)


# ---------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("schedule", [keep_all, recomputing])
@pytest.mark.parametrize("name", slow_among(CASES, "LSTM"))
def test_accumulated_gradients_are_those_of_the_engine(
    name: str, schedule: Callable[[Graph], Schedule]
) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    module, args, kwargs = case.module(), case.arguments(), case.keywords()
    original = copy.deepcopy(module)
    ours = released_from(captured_case(name), module, None, schedule)
    for _ in range(3):
        wanted = outcome(original, args, kwargs)
        found = outcome(ours, args, kwargs)
        if name.startswith("outputs that are views"):  # two gradients of one weight: summed in another order
            weight = "parameter lin.weight"
            torch.testing.assert_close(found[weight], wanted[weight])
            found[weight] = wanted[weight]
        assert_same(found, wanted)


INSIDE = [name for name in CASES if not name.startswith("outputs that are views") and "no leaf" not in name]
"""The cases whose parameters are not delivered, and whose graph need not be retained."""


def optimizer_states(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    found = {name: dict(optimizer.state.get(parameter, {})) for name, parameter in parameters.items()}
    return {name: state for name, state in found.items() if state}


def assert_same_state(
    ours: nn.Module, optimizers: dict[str, Optimizer], original: nn.Module, one: Optimizer
) -> None:
    wanted = optimizer_states(dict(original.named_parameters()), one)
    mine = dict(ours.named_parameters())
    found: dict[str, dict[str, Any]] = {}
    for name, optimizer in optimizers.items():
        found |= optimizer_states({name: mine[name]}, optimizer)
    assert found.keys() == wanted.keys()
    for name, state in wanted.items():
        assert_same(found[name], state)


def one_step(module: nn.Module, args: Any, kwargs: Any, optimizer: Optimizer | None) -> dict[str, Any]:
    """An ordinary step; without an optimizer its parameters are updated within backward."""
    if optimizer is not None:
        optimizer.zero_grad()
    found = outcome(module, args, kwargs)
    if optimizer is not None:
        optimizer.step()
    found = {what: value for what, value in found.items() if not what.startswith("parameter ")}
    return found | {what: value.clone() for what, value in module.state_dict().items()}


@pytest.mark.parametrize(("factory", "schedule"), [(momentum, recomputing), (adamw, keep_all)])
@pytest.mark.parametrize("name", slow_among(INSIDE, "LSTM"))
def test_steps_within_backward_are_those_of_the_ordinary_loop(
    name: str, factory: OptimizerFactory, schedule: Callable[[Graph], Schedule]
) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    module, args, kwargs = case.module(), case.arguments(), case.keywords()
    original = copy.deepcopy(module)
    ours = released_from(captured_case(name), module, factory, schedule)
    ordinary = factory([p for p in original.parameters() if p.requires_grad])
    for _ in range(3):
        wanted = one_step(original, args, kwargs, ordinary)
        assert_same(one_step(ours, args, kwargs, None), wanted)
        assert all(parameter.grad is None for parameter in ours.parameters())
        assert_same_state(ours, ours.irc_optimizers, original, ordinary)


def thrice(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.sin(m.b(torch.tanh(m.a(x)))))


@pytest.mark.parametrize("factory", [None, momentum, adamw])
def test_a_weight_under_three_names_is_updated_once_by_the_sum(factory: OptimizerFactory | None) -> None:
    torch.manual_seed(0)
    module: Any = Model(thrice, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    module.b.weight = module.c.weight = module.a.weight
    original, x = copy.deepcopy(module), torch.randn(3, 4)
    ours = released(module, x, factory=factory)
    assert list(ours.irc_optimizers) == ([] if factory is None else [n for n, _ in module.named_parameters()])
    ordinary = factory(list(original.parameters())) if factory is not None else None
    for _ in range(3):
        ours(x).square().mean().backward()
        original(x).square().mean().backward()
        for mine, its in zip(module.parameters(), original.parameters(), strict=True):
            assert mine.grad is None or (its.grad is not None and torch.equal(mine.grad, its.grad))
        if ordinary is not None:
            ordinary.step()
            ordinary.zero_grad()
        assert_same(dict(module.state_dict()), dict(original.state_dict()))
    module.b.weight = nn.Parameter(module.a.weight.detach().clone())
    with pytest.raises(irc.UsageError, match=r"IRC507.*parameter a\.weight is not the one of planning"):
        ours(x)


def test_parameters_that_share_memory_without_being_one_are_refused() -> None:
    def halves(m: Any, x: Tensor) -> Tensor:
        return x * m.a + m.b

    flat, x = torch.randn(8), torch.randn(3, 4)
    module = Model(halves, a=nn.Parameter(flat[:4]), b=nn.Parameter(flat[4:]))
    for factory in (None, momentum):
        with pytest.raises(irc.UsageError, match=r"IRC507.*parameter a .*shares its memory with another"):
            released(module, x, factory=factory)


def test_an_output_that_the_loss_does_not_use_leaves_its_parameters_as_they_are() -> None:
    def two(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m.a(x), m.b(x)

    x = torch.randn(3, 4)
    for factory in (None, momentum):
        torch.manual_seed(0)
        module: Any = Model(two, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
        before = copy.deepcopy(module.state_dict())
        released(module, x, factory=factory)(x)[0].sum().backward()
        assert module.b.weight.grad is None and torch.equal(module.b.weight, before["b.weight"])
        moved = module.a.weight.grad is not None if factory is None else True
        assert moved and torch.equal(module.a.weight, before["a.weight"]) == (factory is None)


def test_gradients_are_accumulated_over_several_steps_in_place() -> None:
    torch.manual_seed(0)
    module, (x,) = net(), image()
    original = copy.deepcopy(module)
    ours = released(module, x)
    for model in (original, ours):
        torch.manual_seed(1)
        model(x).square().mean().backward()
    kept = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for model in (original, ours):
        torch.manual_seed(2)
        model(2 * x).square().mean().backward()
    for (name, mine), its in zip(ours.named_parameters(), original.parameters(), strict=True):
        assert mine.grad is kept[name] and its.grad is not None and torch.equal(mine.grad, its.grad)


def test_a_retained_graph_accumulates_twice() -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    loss = released(module, x)(x).sum()
    loss.backward(retain_graph=True)
    once = pytree.tree_map(torch.clone, [module.weight.grad, module.bias.grad])
    loss.backward()
    assert module.weight.grad is not None and torch.equal(module.weight.grad, 2 * once[0])
    assert module.bias.grad is not None and torch.equal(module.bias.grad, 2 * once[1])


def test_learning_rates_are_scheduled_and_states_saved_by_the_parameter_s_name() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(5, 4)
    original = copy.deepcopy(module)
    ours, ordinary = released(module, x, factory=adamw), adamw(list(original.parameters()))
    assert list(ours.irc_optimizers) == [name for name, _ in module.named_parameters()]

    def decay(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    theirs, mine = decay(ordinary), [decay(optimizer) for optimizer in ours.irc_optimizers.values()]
    for _ in range(3):
        original(x).square().mean().backward()
        ordinary.step()
        ordinary.zero_grad()
        theirs.step()
        ours(x).square().mean().backward()
        for scheduler in mine:
            scheduler.step()
    assert_same(dict(module.state_dict()), dict(original.state_dict()))
    saved = copy.deepcopy({name: o.state_dict() for name, o in ours.irc_optimizers.items()})
    weights = copy.deepcopy(module.state_dict())
    ours(x).square().mean().backward()
    after = copy.deepcopy(dict(module.state_dict()))
    assert not torch.equal(after["0.weight"], weights["0.weight"])
    module.load_state_dict(weights)
    for name, optimizer in ours.irc_optimizers.items():
        optimizer.load_state_dict(saved[name])
    ours(x).square().mean().backward()
    assert_same(dict(module.state_dict()), after)


def test_a_deep_copy_has_optimizers_of_its_own() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    ours = released(module, x, factory=momentum)
    ours(x).sum().backward()
    twin = copy.deepcopy(ours)
    before = copy.deepcopy(module.state_dict())
    twin(x).sum().backward()
    assert_same(dict(module.state_dict()), dict(before))
    ours(x).sum().backward()
    assert_same(dict(module.state_dict()), dict(twin.state_dict()))
    assert twin.irc_optimizers["weight"] is not ours.irc_optimizers["weight"]
    with pytest.raises(irc.UnsupportedError, match="IRC512"):
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)


def test_elsewhere_than_in_the_planned_step_gradients_are_ordinary() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4)
    ours = released(module, x, factory=momentum)
    before = copy.deepcopy(module.state_dict())
    ours.eval()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert_same(dict(module.state_dict()), dict(before))


# ---------------------------------------------------------------------- memory


def wide(depth: int = 3) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model whose peak is made of gradients."""
    torch.manual_seed(0)
    layers = (layer for _ in range(depth) for layer in (nn.Linear(96, 96), nn.Tanh()))
    return nn.Sequential(*layers), (torch.randn(4, 96),)


def deep() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model whose peak is made of activations."""
    torch.manual_seed(0)
    return net(), (torch.randn(16, 3, 14, 14),)


def plan_of(fitted: Any) -> Plan:
    return fitted.irc_plan


WAYS: dict[str, dict[str, Any]] = {
    "returned": {},
    "accumulated": {"accumulate_gradients": True},
    "SGD with momentum": {"optimizer_in_backward": momentum},
    "AdamW": {"optimizer_in_backward": adamw},
    "Adagrad, with its state from the start": {"optimizer_in_backward": torch.optim.Adagrad},
}


def planned(make: Callable[..., Any], way: str, budget: int | str) -> tuple[Any, tuple[Tensor, ...]]:
    module, args = make()
    return irc.optimize(module, args, budget, time_limit=3, loss=training_loss, **WAYS[way]), args


@functools.cache
def minimum_of(make: Callable[..., Any], way: str) -> int:
    return plan_of(planned(make, way, "100%")[0]).minimum_budget_bytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [wide, deep])
@pytest.mark.parametrize("budget", slow_among(["100%", "tight"], "100%"))
def test_the_measured_peak_is_the_predicted_one(make: Callable[..., Any], way: str, budget: str) -> None:
    fitted, args = planned(make, way, minimum_of(make, way) if budget == "tight" else budget)
    plan = plan_of(fitted)
    if way == "returned":
        outcome(fitted, args, {})  # kernels choose their workspaces on the first run
    before = copy.deepcopy(fitted.state_dict())
    states = copy.deepcopy({name: o.state_dict() for name, o in fitted.irc_optimizers.items()})
    measured = measured_peak_bytes(fitted, args, plan.static_bytes)
    assert plan.peak_bytes * 0.995 <= measured <= plan.peak_bytes
    assert_same(dict(fitted.state_dict()), dict(before))
    for name, optimizer in fitted.irc_optimizers.items():
        assert optimizer.state_dict()["state"].keys() == states[name]["state"].keys()
    assert plan.gradients == {"returned": "returned", "accumulated": "accumulated"}.get(way, "applied")
    gradient_bytes = sum(parameter.nbytes for parameter in fitted.parameters())
    assert (plan.reserved_bytes > 0) == (way != "returned")
    if way in ("accumulated", "SGD with momentum"):
        assert plan.reserved_bytes == gradient_bytes


def test_applied_gradients_take_less_than_returned_ones_beside_the_same_state() -> None:
    module, args = wide(5)
    returned = irc.optimize(module, args, "100%", costs="analytic").plan
    applied = irc.optimize(module, args, "100%", costs="analytic", optimizer_in_backward=momentum).plan
    state_bytes = applied.reserved_bytes
    assert applied.peak_bytes < returned.peak_bytes + state_bytes - 0.5 * state_bytes


def test_a_gradient_is_freed_as_soon_as_it_is_applied() -> None:
    module, (x,) = wide()
    alive: list[int] = []
    refs: list[weakref.ref[Tensor]] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            gradient = self.param_groups[0]["params"][0].grad
            alive.append(sum(ref() is not None for ref in refs))
            refs.append(weakref.ref(gradient))
            super().step()

    ours = released(module, x, factory=lambda params: Watching(params, lr=0.1))
    alive.clear()
    refs.clear()
    ours(x).sum().backward()
    assert len(alive) == 6 and max(alive) <= 1
    assert all(ref() is None for ref in refs)


# ---------------------------------------------------------------------- what is refused


def linear(factory: OptimizerFactory | None) -> tuple[nn.Linear, Tensor, Any, dict[str, Any]]:
    torch.manual_seed(0)
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    return module, x, released(module, x, factory=factory), copy.deepcopy(dict(module.state_dict()))


def is_untouched(module: nn.Module, before: dict[str, Any]) -> bool:
    assert_same(dict(module.state_dict()), before)
    return all(parameter.grad is None for parameter in module.parameters())


both = pytest.mark.parametrize("factory", [None, momentum], ids=["accumulated", "applied"])


@both
@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, module, x: torch.autograd.grad(loss, [module.weight]),
        lambda loss, module, x: torch.autograd.grad(loss, [x]),
        lambda loss, module, x: loss.backward(inputs=[module.weight]),
        lambda loss, module, x: loss.backward(inputs=[x]),
    ],
)
def test_a_backward_that_does_not_ask_for_all_gradients_is_refused(
    factory: OptimizerFactory | None, ask: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    ours, before = released(module, x, factory=factory), copy.deepcopy(dict(module.state_dict()))
    with pytest.raises(irc.UnsupportedError, match=r"IRC510.*does not ask for (weight|bias)\.grad"):
        ask(ours(x).sum(), module, x)
    assert is_untouched(module, before) and x.grad is None
    ours(x).sum().backward(inputs=[module.weight, module.bias, x])
    assert x.grad is not None


@both
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(factory: OptimizerFactory | None, kind: str) -> None:
    module, x, ours, before = linear(factory)
    loss = ours(x).sum()
    handle = getattr(module.weight, kind)(lambda _: None)
    for step in (loss.backward, lambda: ours(x), lambda: released(module, x, factory=factory)):
        with pytest.raises(irc.UnsupportedError, match=r"IRC509.*parameter weight has a hook"):
            step()
    assert is_untouched(module, before)
    handle.remove()
    loss.backward()


@both
def test_distributed_data_parallel_is_refused(
    factory: OptimizerFactory | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x, ours, before = linear(factory)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", object())
    with pytest.raises(irc.UnsupportedError, match=r"IRC509.*DistributedDataParallel"):
        ours(x)
    assert is_untouched(module, before)


@both
def test_a_parameter_that_is_computed_from_others_is_refused(factory: OptimizerFactory | None) -> None:
    module, x, ours, before = linear(factory)
    doubled = {name: parameter * 2 for name, parameter in module.named_parameters()}
    with pytest.raises(irc.UnsupportedError, match=r"IRC509.*weight is computed from other tensors"):
        torch.func.functional_call(ours, doubled, (x,))
    assert is_untouched(module, before)


def test_a_parameter_that_is_replaced_is_not_the_optimizer_s() -> None:
    module, x, ours, _ = linear(momentum)
    module.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(irc.UsageError, match=r"IRC507.*parameter weight is not the one of planning"):
        ours(x)


def test_a_retained_graph_is_refused_where_parameters_are_updated() -> None:
    module, x, ours, before = linear(momentum)
    with pytest.raises(irc.UnsupportedError, match=r"IRC510.*retain_graph=True"):
        ours(x).sum().backward(retain_graph=True)
    assert is_untouched(module, before)
    loss = ours(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_two_steps_in_one_backward_are_refused_and_one_that_is_left_out_is_not() -> None:
    module, x, ours, before = linear(momentum)
    unused = ours(x)
    with pytest.raises(irc.UnsupportedError, match=r"IRC510.*ran forward twice"):
        (ours(x).sum() + ours(2 * x).sum()).backward()
    assert is_untouched(module, before)
    ours(x).sum().backward()
    assert not torch.equal(module.weight, before["weight"]) and unused.requires_grad


def test_a_gradient_from_before_is_refused_where_another_is_applied() -> None:
    module, x, ours, before = linear(momentum)
    module.bias.grad = torch.ones(4)
    with pytest.raises(irc.IrcError, match=r"IRC511.*parameter bias has a gradient already"):
        ours(x).sum().backward()
    module.zero_grad()
    assert is_untouched(module, before)
    ours(x).sum().backward()


def test_a_module_that_hands_out_an_updated_parameter_is_refused() -> None:
    def with_weight(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m.lin(x), m.lin.weight.t()

    module, x = Model(with_weight, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    with pytest.raises(irc.UnsupportedError, match=r"IRC510.*returns parameter lin\.weight"):
        released(module, x, factory=momentum)


def test_a_gradient_from_outside_of_the_module_is_told_at_the_end() -> None:
    module, x, ours, _ = linear(momentum)
    with pytest.raises(irc.UnsupportedError, match=r"IRC510.*bias has a gradient from outside"):
        (ours(x).sum() + module.bias.sum()).backward()


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_gradients_that_are_gone_is_refused(clip: str) -> None:
    module, x, ours, _ = linear(momentum)
    other = nn.Linear(2, 2)
    ours(x).sum().backward()
    function: Any = getattr(nn.utils, clip)
    for parameters in (ours.parameters(), list(ours.parameters()), module.weight):
        with pytest.raises(irc.UnsupportedError, match=rf"IRC512.*{clip.strip('_')} comes too late"):
            function(parameters, 1.0)
    other(torch.ones(1, 2)).sum().backward()
    function(other.parameters(), 0.5)
    assert other.weight.grad is not None and float(other.weight.grad.abs().max()) <= 0.5
    del ours
    gc.collect()
    module.bias.grad = torch.ones(4)
    function(module.parameters(), 0.5)  # nobody applies its gradients any more
    assert float(module.bias.grad.abs().max()) <= 0.5


def test_clipping_by_a_function_that_was_imported_earlier_is_refused() -> None:
    clip: Any = vars(nn.utils.clip_grad)["clip_grad_norm_"]
    earlier = getattr(clip, "__wrapped__", clip)
    _, x, ours, _ = linear(momentum)
    ours(x).sum().backward()
    with pytest.raises(irc.UnsupportedError, match="IRC512"):
        earlier(list(ours.parameters()), 1.0)


def test_clipping_without_any_parameter_still_warns() -> None:
    linear(momentum)
    with pytest.warns(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)


def test_a_gradient_scaler_is_refused_before_anything_runs() -> None:
    module, x, ours, before = linear(momentum)
    scaler = torch.amp.GradScaler("cpu")
    loss = ours(x).sum().exp() + 1
    for given in (loss, [loss], (loss,)):
        with pytest.raises(irc.UnsupportedError, match=r"IRC512.*gradient scaler"):
            scaler.scale(given)
    assert is_untouched(module, before)
    assert torch.amp.GradScaler("cpu", enabled=False).scale(loss) is loss
    plain, y, accumulating, _ = linear(None)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler.scale(accumulating(y).sum()).backward()
    scaler.step(optimizer)
    other = nn.Linear(2, 2)
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()


def test_options_that_do_not_fit_are_refused() -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    options: dict[str, Any]
    for options, message in (
        ({"accumulate_gradients": 1}, "accumulate_gradients is a int, not a bool"),
        ({"optimizer_in_backward": "sgd"}, "optimizer_in_backward is a str, not a function"),
        ({"accumulate_gradients": True, "optimizer_in_backward": momentum}, "exclude each other"),
    ):
        with pytest.raises(irc.UsageError, match=f"IRC406.*{message}"):
            irc.optimize(module, x, "100%", **options)


# ---------------------------------------------------------------------- as text, and without the model


def test_the_source_releases_gradients_as_they_come() -> None:
    module, x = nn.Linear(4, 2), torch.randn(3, 4)
    captured = capture(module, (x,))
    program = compile_program(keep_all(release_gradients(captured.graph)), captured.constants)
    assert "def backward(inputs, saved, tangents, release):" in program.source
    assert "    release('weight', primals_1, " in program.source and "return [None, None" in program.source
    assert program.kind is Gradients.ACCUMULATED and set(program.released) == {"weight", "bias"}
    assert "release" not in compile_program(keep_all(captured.graph), captured.constants).source


def standalone(graph: Graph, optimizer: OptimizerFactory | None = None) -> StandaloneModule:
    captured = capture(nn.Linear(4, 2), (torch.randn(3, 4),))
    program = compile_program(keep_all(graph), captured.constants)
    state = {"weight": torch.ones(2, 4), "bias": torch.zeros(2)}
    plan: Any = None
    return StandaloneModule(program, state, captured.signature.deliveries, plan, optimizer=optimizer)


def test_a_program_without_its_model_accumulates() -> None:
    graph = capture(nn.Linear(4, 2), (torch.randn(3, 4),)).graph
    module, x = standalone(release_gradients(graph)), torch.randn(3, 4)
    for times in (1, 2):
        module(x).sum().backward()
        for name, parameter in module.named_parameters():
            wanted = x.sum(0).expand(2, 4) if name == "weight" else torch.full((2,), 3.0)
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, times * wanted)


def test_a_program_without_its_model_applies_gradients_by_optimizers_that_are_given() -> None:
    original, x = nn.Linear(4, 2), torch.randn(3, 4)
    graph = ReleaseGradients("apply", momentum).run(Program(capture(original, (x,)).graph)).graph
    with pytest.raises(irc.UsageError, match=r"IRC508.*no optimizer is given"):
        standalone(graph)
    module = standalone(graph, momentum)
    with torch.no_grad():
        original.weight.fill_(1)
        original.bias.zero_()
    one = momentum(list(original.parameters()))
    for _ in range(3):
        module(x).square().sum().backward()
        original(x).square().sum().backward()
        one.step()
        one.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())
        assert torch.equal(module.get_parameter("weight"), original.weight)
        assert torch.equal(module.get_parameter("bias"), original.bias)
    assert_same_state(module, module.irc_optimizers, original, one)
    with pytest.raises(irc.UnsupportedError, match="IRC512"):
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def test_a_comparison_with_the_original_holds_with_accumulated_gradients() -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = irc.optimize(module, args, "100%", time_limit=1, accumulate_gradients=True)
    assert compare(original, ours, args, 2).is_equal
