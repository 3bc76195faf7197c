"""Several forwards before their backwards, retained graphs, accumulation: numbers, memory, what is logged."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from support.torch_cases import Model, assert_same, fitted, image, keep_all, net, recompute_some, slow_among
from torch import Tensor, nn

import irc
from irc.backends.torch import StandaloneModule, bind_program, compile_program
from irc.compiler.model_source import training_loss
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import Captured, capture
from irc.ir import Graph, Schedule
from irc.passes import Cost, HoldForwards, PassManager, PlanMemory, Planner, Program, ReleaseGradients
from irc.passes.costs.allocations import peak_bytes

torch.set_num_threads(1)

Backwards = Callable[[Sequence[Tensor]], object]


def first_in_first_out(losses: Sequence[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def last_in_first_out(losses: Sequence[Tensor]) -> None:
    for loss in reversed(losses):
        loss.backward()


def all_in_one(losses: Sequence[Tensor]) -> None:
    torch.stack(list(losses)).sum().backward()


ORDERS: dict[str, Backwards] = {
    "first in, first out": first_in_first_out,
    "last in, first out": last_in_first_out,
    "one backward": all_in_one,
}


def recomputing(graph: Graph) -> Schedule:
    return recompute_some(graph, 1)


def accumulating(
    module: nn.Module, *args: Any, schedule: Callable[[Graph], Schedule] = keep_all
) -> nn.Module:
    captured = capture(module, args)
    graph = ReleaseGradients().run(Program(captured.graph)).graph
    return bind_program(module, compile_program(schedule(graph), captured.constants), captured.signature)


def planned_for(count: int, module: nn.Module, *args: Any) -> nn.Module:
    captured = capture(module, args)
    graph = HoldForwards(count).run(Program(captured.graph)).graph
    return bind_program(module, compile_program(keep_all(graph), captured.constants), captured.signature)


# ---------------------------------------------------------------------- the same numbers


def trained(
    module: nn.Module,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    step: Callable[..., object],
) -> dict[str, Any]:
    """What three optimizer steps leave: parameters, buffers, the generator, and the last gradients."""
    optimizer = make(list(module.parameters()))
    torch.manual_seed(3)
    for number in range(3):
        optimizer.zero_grad(set_to_none=number == 0)
        step(module)
        optimizer.step()
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {**module.state_dict(), **gradients, "generator": torch.get_rng_state()}


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.parametrize(("optimizer", "schedule"), [(sgd, recomputing), (adamw, keep_all)])
@pytest.mark.parametrize("plan", [fitted, accumulating])
@pytest.mark.parametrize("order", ORDERS)
def test_three_forwards_before_their_backwards_train_as_the_original(
    order: str, schedule: Callable[[Graph], Schedule], plan: Callable[..., nn.Module], optimizer: Any
) -> None:
    """BatchNorm's statistics, dropout, and a gradient that the other calls leave behind among them."""
    torch.manual_seed(0)
    module, inputs = net(), [*image(), *image(), *image()]
    original = copy.deepcopy(module)
    ours = plan(module, inputs[0], schedule=schedule)

    def step(model: nn.Module) -> None:
        ORDERS[order]([model(x).square().mean() for x in inputs])

    assert_same(trained(ours, optimizer, step), trained(original, optimizer, step))


def test_a_forward_may_come_between_two_backwards() -> None:
    torch.manual_seed(0)
    module, inputs = net(), [*image(), *image(), *image()]
    original = copy.deepcopy(module)
    ours = fitted(module, inputs[0], schedule=recomputing)

    def step(model: nn.Module) -> None:
        first, second = (model(x).square().mean() for x in inputs[:2])
        first.backward()
        third = model(inputs[2]).square().mean()
        third.backward()
        second.backward()

    assert_same(trained(ours, sgd, step), trained(original, sgd, step))


@pytest.mark.parametrize("plan", [fitted, accumulating])
@pytest.mark.parametrize("schedule", [keep_all, recomputing])
def test_a_retained_graph_gives_the_gradients_again(
    schedule: Callable[[Graph], Schedule], plan: Callable[..., nn.Module]
) -> None:
    torch.manual_seed(0)
    module, (x,) = net(), image()
    loss = plan(module, x, schedule=schedule)(x).square().mean()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert once.keys() == dict(module.named_parameters()).keys()
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and torch.equal(
            parameter.grad, once[name] + once[name] + once[name]
        )
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def heads(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    trunk = torch.tanh(m.trunk(x))
    return m.left(trunk).relu(), m.right(trunk)


@pytest.mark.parametrize("plan", [fitted, accumulating])
@pytest.mark.parametrize("schedule", [keep_all, recomputing])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0), (1, 1)])
def test_losses_on_different_outputs_in_any_order(
    order: Sequence[int], schedule: Callable[[Graph], Schedule], plan: Callable[..., nn.Module]
) -> None:
    torch.manual_seed(0)
    module: Any = Model(heads, trunk=nn.Linear(6, 8), left=nn.Linear(8, 8), right=nn.Linear(8, 3))
    original, x = copy.deepcopy(module), torch.randn(5, 6)

    def gradients(model: nn.Module) -> dict[str, Tensor | None]:
        model.zero_grad()
        left, right = model(x)
        losses = left.square().mean(), right.exp().mean()
        for number, index in enumerate(order):
            losses[index].backward(retain_graph=number + 1 < len(order))
        return {name: p.grad for name, p in model.named_parameters()}

    wanted = gradients(original)
    assert (wanted["left.weight"] is None) == (0 not in order)
    assert_same(gradients(plan(module, x, schedule=schedule)), wanted)


# ---------------------------------------------------------------------- what is logged


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "irc"]
    caplog.clear()
    return found


def test_each_number_of_forwards_in_flight_beyond_the_plan_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    module, (x,) = net(), image()
    ours = planned_for(2, module, x)
    first, second = ours(x).sum(), ours(x).sum()
    assert warnings_of(caplog) == []
    third = ours(x).sum()
    (warning,) = warnings_of(caplog)
    assert warning.startswith(
        "IRC567: 3 forwards are in flight (their backward has not run), and the plan counted 2"
    )
    assert "Plan with forwards_in_flight=3" in warning
    fourth = ours(x).sum()
    assert warnings_of(caplog) == []  # the number is known when the first backward begins
    second.backward()
    assert [line[: len("IRC567: 4 forwards")] for line in warnings_of(caplog)] == ["IRC567: 4 forwards"]
    for loss in (first, fourth, third):
        loss.backward()
    for _ in range(2):
        torch.stack([ours(x).sum() for _ in range(4)]).sum().backward()
    assert warnings_of(caplog) == []
    twin = copy.deepcopy(ours)
    kept = [twin(x).sum() for _ in range(3)]
    assert len(warnings_of(caplog)) == len(kept[2:])


def test_forwards_of_several_plans_do_not_use_up_the_line_about_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.randn(4, 8)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    ours = irc.optimize(module, (x,), "1MiB", forwards_in_flight=3, costs="analytic", time_limit=1)

    def rollout(count: int) -> list[str]:
        state = x
        for _ in range(count):
            state = ours(state)
        state.sum().backward()
        return [line for line in warnings_of(caplog) if "IRC567" in line]

    (several,) = rollout(2)
    assert "2 forwards of 2 plans" in several and "input 0 has requires_grad=True" in several
    assert rollout(2) == []
    numbers = [line.split(":")[1].split("in flight")[0].strip() for line in rollout(6)]
    assert numbers == ["4 forwards are", "6 forwards are", "6 forwards of 2 plans are"]
    assert rollout(6) == []
    assert "8 forwards are" in rollout(8)[0]


def test_only_forwards_whose_backward_may_still_run_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module, (x,) = net(), image()
    ours = planned_for(1, module, x)
    kept: list[Tensor] = []
    gc.disable()
    try:
        for _ in range(3):
            ours(x)  # dropped
            kept.append(ours(x).sum())
            kept[-1].backward()
            kept.append(ours(x).detach())
            with torch.no_grad():
                ours(x)
            with pytest.raises(irc.UsageError, match="IRC501"):
                ours(x[:2])
        assert [tensor.requires_grad for tensor in kept] == [True, False] * 3
    finally:
        gc.enable()
    assert warnings_of(caplog) == []


def test_a_forward_that_fails_is_not_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    ours = planned_for(1, module, x)
    program = ours.__dict__["_irc"].compiled_plans[0].program

    def fails(inputs: object) -> object:
        raise MemoryError("there is none left")

    forward = program.forward
    object.__setattr__(program, "forward", fails)
    for _ in range(2):
        with pytest.raises(MemoryError):
            ours(x)
    object.__setattr__(program, "forward", forward)
    ours(x).sum().backward()
    assert warnings_of(caplog) == []


def test_a_retained_graph_counts_as_one_more(caplog: pytest.LogCaptureFixture) -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    planned_for(2, module, x)(x).sum().backward(retain_graph=True)
    assert warnings_of(caplog) == []
    planned_for(1, module, x)(x).sum().backward(retain_graph=True)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(
        "IRC567: 2 forwards are in flight (a backward that retains its graph counts as one more), and the "
        "plan counted 1"
    )


def test_a_standalone_module_counts_too(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    plan = irc.optimize(module, x, "100%", costs="analytic", time_limit=1).plan
    captured = capture(module, (x,))
    program = compile_program(keep_all(captured.graph), captured.constants)
    standalone = StandaloneModule(program, dict(module.state_dict()), captured.signature.deliveries, plan)
    kept = [standalone(x), copy.deepcopy(standalone)(x)]
    assert warnings_of(caplog) == []
    kept.append(standalone(x))
    assert len(warnings_of(caplog)) == 1 and len(standalone.live_forwards) == len(kept) - 1


# ---------------------------------------------------------------------- memory


def convolutions() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(nn.Conv2d(3, 8, 3), *layers, *ends), (torch.randn(4, 3, 18, 18),)


def transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """With large outputs: their gradients wait too, where one backward is for all calls."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    parts = {"embed": nn.Embedding(50, 32), "layer": layer, "head": nn.Linear(32, 50)}
    module = Model(lambda m, i: m.head(m.layer(m.embed(i))), **parts)
    return module, (torch.randint(0, 50, (4, 20)),)


def wide() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model whose peak is made of gradients; two of its layers are tied."""
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(48, 48) for _ in range(8)]
    layers[7].weight = layers[0].weight
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))), (torch.randn(4, 48),)


def measured(
    fitted: Any, args: tuple[Any, ...], backwards: Backwards, *, with_gradients: bool = False
) -> int:
    """The peak of as many forwards as the plan counts, then their losses, then the backwards."""
    plan: irc.Plan = fitted.irc_plan
    calls = [tuple(arg.clone() for arg in args) for _ in range(plan.forwards_in_flight)]

    def step() -> None:
        outputs = [fitted(*call) for call in calls]
        backwards([training_loss(output) for output in outputs])

    fitted.zero_grad()
    step()
    released = plan.gradients != "returned"
    if not released and not with_gradients:
        fitted.zero_grad()
    gradients = {p: p.grad.nbytes for p in fitted.parameters() if p.grad is not None}
    there_bytes = 0 if released else sum(gradients.values())
    return peak_bytes(step) + plan.static_bytes + there_bytes


MODELS = {"convolutions": convolutions, "transformer": transformer, "wide": wide}


@dataclass(frozen=True)
class Prepared:
    """A model, captured and measured once for all plans."""

    module: nn.Module
    args: tuple[Any, ...]
    captured: Captured
    program: Program

    def planner(self, count: int) -> Planner:
        return Planner(HoldForwards(count).run(self.program))

    def fitted(self, planner: Planner, budget: int | str) -> Any:
        chosen = PlanMemory(budget, time_limit=1.0).choose(planner)
        assert chosen.schedule is not None and chosen.plan is not None
        plan = replace(chosen.plan, gradients=chosen.graph.gradients.value)
        compiled = compile_program(chosen.schedule, self.captured.constants)
        return bind_program(self.module, compiled, self.captured.signature, plan)


@cache
def prepared(name: str, accumulate: bool) -> Prepared:
    module, args = MODELS[name]()
    captured = capture(module, args, loss=training_loss)
    passes = [*([ReleaseGradients()] if accumulate else []), Cost()]
    return Prepared(module, args, captured, PassManager(passes).run(Program(captured.graph)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "accumulate"),
    [(name, count, count == 3 and name != "convolutions") for name in MODELS for count in (2, 3)],
)
def test_the_measured_peak_of_several_forwards_is_the_predicted_one(
    name: str, count: int, accumulate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = prepared(name, accumulate)
    planner = model.planner(count)
    outputs_bytes = sum(t.nbytes for t in [model.module(*model.args)] if isinstance(t, Tensor))
    ample = model.fitted(planner, "100%")
    tight = model.fitted(planner, ample.irc_plan.minimum_budget_bytes)
    for ours, one_by_one in ((ample, first_in_first_out), (tight, last_in_first_out)):
        plan: irc.Plan = ours.irc_plan
        assert plan.forwards_in_flight == count and plan.peak_bytes <= plan.budget_bytes
        found = measured(ours, model.args, all_in_one)
        assert 0.995 * plan.peak_bytes <= found <= plan.peak_bytes
        # one by one, no gradient of an output waits: that matters where outputs are large
        found = measured(ours, model.args, one_by_one)
        assert 0.995 * plan.peak_bytes - (count - 1) * outputs_bytes <= found <= plan.peak_bytes
    there_bytes = plan.peak_with_gradients_bytes
    assert there_bytes is not None
    found = measured(tight, model.args, all_in_one, with_gradients=True)
    assert 0.995 * there_bytes <= found <= there_bytes
    assert measured(tight, model.args, last_in_first_out, with_gradients=True) <= there_bytes
    assert warnings_of(caplog) == []


class _Parts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean(-1), x.square().mean()


@pytest.mark.parametrize("forwards", [1, 2, 3])
@pytest.mark.parametrize("is_sum", [False, True])
def test_a_loss_that_is_an_output_holds_its_gradient_until_all_backwards_are_over(
    forwards: int, is_sum: bool
) -> None:
    def loss(result: tuple[Tensor, Tensor]) -> Tensor:
        return result[1] + result[0].square().mean() if is_sum else result[1]

    x = torch.randn(1, 8, 16, requires_grad=True)
    fitted = irc.optimize(_Parts(), (x,), "100%", loss=loss, forwards_in_flight=forwards)
    loss(fitted(x)).backward()
    peak_bytes = irc.measured_peak_bytes(fitted, (x,), loss=loss, forwards=forwards)
    assert peak_bytes == fitted.plan.peak_bytes


@pytest.mark.parametrize("name", slow_among(MODELS, "transformer", "convolutions"))
def test_a_step_that_finds_gradients_takes_what_is_predicted(name: str) -> None:
    model = prepared(name, False)
    module, args = model.module, model.args
    fitted = model.fitted(model.planner(1), "100%")
    plan: irc.Plan = fitted.irc_plan
    gradient_bytes = sum(p.nbytes for p in module.parameters())
    there_bytes = plan.peak_with_gradients_bytes
    assert there_bytes is not None and there_bytes - plan.peak_bytes >= gradient_bytes

    def step() -> None:
        result = fitted(*args)
        training_loss(result).backward()

    fitted.zero_grad()
    step()
    for set_to_none in (True, False):
        fitted.zero_grad(set_to_none=set_to_none)
        wanted = plan.peak_bytes if set_to_none else there_bytes
        zeros_bytes = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
        found = peak_bytes(step) + plan.static_bytes + zeros_bytes
        assert 0.995 * wanted <= found <= wanted
        assert measured_peak_bytes(fitted, args, plan.static_bytes, with_gradients=not set_to_none) == found
        step()


@pytest.mark.parametrize("name", slow_among(MODELS, "transformer", "convolutions"))
def test_accumulation_as_gradients_come_takes_no_second_set(name: str) -> None:
    model, returned = prepared(name, True), prepared(name, False)
    fitted = model.fitted(model.planner(1), "100%")
    plan: irc.Plan = fitted.irc_plan
    assert plan.peak_with_gradients_bytes == plan.peak_bytes
    found = measured_peak_bytes(fitted, model.args, plan.static_bytes)
    assert 0.995 * plan.peak_bytes <= found <= plan.peak_bytes
    there_bytes = returned.fitted(returned.planner(1), "100%").irc_plan.peak_with_gradients_bytes
    assert plan.peak_bytes <= there_bytes
    if name == "wide":  # a second set of gradients is most of the difference
        assert plan.peak_bytes < there_bytes - 0.5 * sum(p.nbytes for p in model.module.parameters())


@pytest.mark.parametrize("name", slow_among(MODELS, "transformer", "convolutions"))
def test_a_retained_graph_takes_no_more_than_one_more_forward_in_flight(name: str) -> None:
    model = prepared(name, False)
    fitted, args = model.fitted(model.planner(2), "100%"), model.args
    plan: irc.Plan = fitted.irc_plan

    def step() -> None:
        loss = training_loss(fitted(*args))
        loss.backward(retain_graph=True)
        loss.backward()

    step()
    fitted.zero_grad()
    assert peak_bytes(step) + plan.static_bytes <= plan.peak_bytes
