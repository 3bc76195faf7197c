"""Calls unlike the example: planned within the same bytes, kept, and the numbers those of the original."""

from __future__ import annotations

import copy
import gc
import linecache
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.torch_cases import Model, assert_same, net, outcome
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

import irc
from irc.backends.torch import Compilation, CompiledPlan, PlanCacheState, bind, compile_program
from irc.compiler.model_source import training_loss
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import capture
from irc.passes import Program, SplitConvolutions
from irc.passes.pass_manager import PassManager
from irc.passes.remat.reuse_schedule import reuse_schedule

torch.set_num_threads(1)

PLENTY = "1GiB"


class Sequence(nn.Module):
    """A language model whose sequences may have any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def tanh() -> nn.Module:
    return Model(lambda m, x: torch.tanh(m.lin(x)) * x, lin=nn.Linear(4, 4))


def images(count: int) -> tuple[Tensor]:
    return (torch.randn(count, 3, 14, 14),)


def tokens(length: int) -> tuple[Tensor]:
    return (torch.randint(11, (2, length)),)


def rows(count: int) -> tuple[Tensor]:
    return (torch.randn(count, 4),)


def chain() -> nn.Module:
    """A model whose peak is made of activations, which can be computed again."""
    layers = (layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh()))
    return nn.Sequential(*layers)


def wide_rows(count: int) -> tuple[Tensor]:
    return (torch.randn(count, 32),)


def recomputed(plan: irc.Plan) -> dict[str, int]:
    return {decision.operation: decision.runs_again for decision in plan.decisions}


def planned(module: nn.Module, args: tuple[Any, ...], budget: Any = PLENTY, **options: Any) -> Any:
    options = {"costs": "analytic", "time_limit": 20, "strategy": "eviction", **options}
    return irc.optimize(module, args, budget, **options)


def pair(module: nn.Module, args: tuple[Any, ...], budget: Any = PLENTY, **options: Any) -> tuple[Any, Any]:
    """The fitted module, and a copy of the original."""
    original = copy.deepcopy(module)
    return planned(module, args, budget, **options), original


def assert_steps_agree(ours: nn.Module, original: nn.Module, *args: Any, **kwargs: Any) -> None:
    """One step of each leaves the same behind, bit for bit: outputs, gradients, buffers, generator."""
    ours.zero_grad()
    original.zero_grad()
    wanted = outcome(original, args, kwargs)
    assert_same(outcome(ours, args, kwargs), wanted)


def peaks(ours: Any) -> list[int]:
    return [plan.peak_bytes for _, plan in ours.irc_plans]


# ---------------------------------------------------------------------- shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "draw", "sizes"),
    [(net, images, (4, 3, 1, 4, 3)), (Sequence, tokens, (5, 8, 3, 5))],
    ids=["batches", "sequences"],
)
def test_other_shapes_are_planned_and_give_the_original_s_numbers(
    make: Callable[[], nn.Module], draw: Callable[[int], tuple[Tensor]], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    ours, original = pair(make(), draw(sizes[0]))
    for size in sizes:
        assert_steps_agree(ours, original, *draw(size))
    assert len(ours.irc_plans) == len(set(sizes))
    assert ours.irc_plans[0].call == "the example arguments" or sizes[-1] != sizes[0]
    assert len(repr(ours.irc_plans)) < 200 * len(ours.irc_plans)
    assert {plan.budget_bytes for _, plan in ours.irc_plans} == {1 << 30}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "draw", "sizes", "budget"),
    [(chain, wide_rows, (64, 20, 70), "100%"), (Sequence, tokens, (24, 16), "75%")],
    ids=["batches", "sequences"],
)
def test_the_measured_peak_of_each_shape_is_within_the_first_budget(
    make: Callable[[], nn.Module], draw: Callable[[int], tuple[Tensor]], sizes: tuple[int, ...], budget: str
) -> None:
    torch.manual_seed(0)
    measured_as: Any = {"costs": "measured", "strategy": "auto", "loss": training_loss, "time_limit": 3}
    ours: Any = planned(make(), draw(sizes[0]), budget, **measured_as)
    first: irc.Plan = ours.plan
    for size in sizes:
        args = draw(size)
        training_loss(ours(*args)).backward()
        plan: irc.Plan = ours.irc_plans[0].plan
        measured = measured_peak_bytes(ours, args, plan.static_bytes)
        assert 0.95 * plan.peak_bytes <= measured <= plan.peak_bytes <= plan.budget_bytes
        assert plan.budget_bytes == first.budget_bytes
        static = sum(p.nbytes for p in (*ours.parameters(), *ours.buffers(), *args))
        assert plan.static_bytes == static
    assert ours.plan is first and len(ours.irc_plans) == len(sizes)
    assert any(any(recomputed(plan).values()) for _, plan in ours.irc_plans)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_ran() -> None:
    torch.manual_seed(0)
    ours, original = pair(net(), images(4))
    budget = ours.plan.peak_bytes
    ours = planned(copy.deepcopy(original), images(4), budget)
    before, generator = copy.deepcopy(ours.state_dict()), torch.get_rng_state()
    large = images(40)
    with pytest.raises(irc.BudgetError, match=r"IRC520.*input 0 is float32\[40, 3, 14, 14\]"):
        ours(*large)
    with pytest.raises(irc.BudgetError) as raised:
        ours(*large)
    assert raised.value.minimum_bytes > budget and "larger budget" in str(raised.value)
    assert_same(dict(ours.state_dict()), dict(before))
    assert len(ours.irc_plans) == 1 and all(p.grad is None for p in ours.parameters())
    torch.set_rng_state(generator)
    assert_steps_agree(ours, original, *images(4))
    roomy = planned(copy.deepcopy(original), images(4), raised.value.minimum_bytes)
    assert_steps_agree(roomy, original, *large)


def test_the_least_recently_used_plan_is_given_up_and_each_new_one_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, original = pair(tanh(), rows(3), plans=2)
    caplog.set_level(logging.INFO, "irc")

    def logged(count: int) -> list[str]:
        caplog.clear()
        assert_steps_agree(ours, original, *rows(count))
        return [record.getMessage() for record in caplog.records if record.name == "irc"]

    assert logged(3) == []
    (line,) = logged(2)
    assert "planned again in" in line and "plan 2 of at most 2" in line and "predicted peak" in line
    assert "input 0 is float32[2, 4] on cpu; the plan was made for float32[3, 4]" in line
    assert logged(3) == []
    new, old = logged(1)
    assert "input 0 is float32[1, 4]" in new and "plans=3" in old and "float32[2, 4]" in old
    assert logged(3) == [] and logged(1) == []
    assert [call for call, _ in ours.irc_plans][1] == "the example arguments"
    assert len(logged(2)) == 2 and ours.plan is ours.irc_plan and len(ours.irc_plans) == 2


@pytest.mark.slow
@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), limit=st.integers(2, 4))
def test_any_sequence_of_batches_trains_as_the_original(sizes: list[int], limit: int) -> None:
    torch.manual_seed(0)
    module = Model(lambda m, x: m.norm(torch.tanh(m.lin(x))), lin=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    ours, original = pair(module, rows(3), plans=limit)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (ours, original)]
    for size in sizes:
        assert_steps_agree(ours, original, *rows(size))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(dict(ours.state_dict()), dict(original.state_dict()))
    assert len(ours.irc_plans) == min(limit, len({3, *sizes}))


# ---------------------------------------------------------------------- what else a call is made of


def test_keywords_constants_and_nesting_are_planned_as_they_come() -> None:
    def forward(m: Any, x: Tensor, gain: Tensor | None = None, power: int = 1) -> Any:
        y = m.lin(x) ** power
        return y if gain is None else {"y": y * gain}

    ours, original = pair(Model(forward, lin=nn.Linear(4, 4)), rows(3))
    x, gain = torch.randn(3, 4), torch.rand(4, requires_grad=True)
    calls: list[dict[str, Any]] = [{"power": 2}, {"gain": gain}, {"gain": gain, "power": 3}, {}]
    for kwargs in (*calls, *calls, {"power": 3, "gain": gain}):
        assert_steps_agree(ours, original, x, **kwargs)
    assert len(ours.irc_plans) == 4
    with pytest.raises(TypeError, match="positional arguments") as raised:
        ours(x, x, x, x)
    assert any("while irc planned for another call: the arguments are" in n for n in raised.value.__notes__)
    assert_steps_agree(ours, original, x)


@pytest.mark.parametrize("constant", [object(), lambda: 0], ids=["object", "function"])
def test_a_constant_that_cannot_be_known_again_is_refused(constant: Any) -> None:
    ours, _ = pair(Model(lambda m, x, c: m.lin(x), lin=nn.Linear(4, 4)), (*rows(3), None))
    with pytest.raises(irc.UsageError, match=r"IRC501.*the plan was made for None"):
        ours(*rows(3), constant)


@pytest.mark.slow
def test_flips_of_requires_grad_give_the_same_gradients_as_in_eager() -> None:
    torch.manual_seed(0)
    module: Any = Model(
        lambda m, x, y: (m.b(torch.tanh(m.a(x))) * y, m.a(y)), a=nn.Linear(4, 4), b=nn.Linear(4, 4)
    )
    x, y = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    ours, original = pair(module, (x, y))
    flips: list[Callable[[Any], object]] = [
        lambda m: None,
        lambda m: m.a.requires_grad_(False),
        lambda m: x.requires_grad_(),
        lambda m: m.b.bias.requires_grad_(False),
        lambda m: y.requires_grad_(False),
        lambda m: m.requires_grad_(False),
        lambda m: m.requires_grad_(),
        lambda m: (x.requires_grad_(False), y.requires_grad_()),
    ]
    for flip in flips:
        for model in (ours, original):
            flip(model)
        assert_steps_agree(ours, original, x, y)
    assert len(ours.irc_plans) == 7


def test_a_module_with_nothing_to_train_runs_its_original_forward() -> None:
    ours, original = pair(tanh(), rows(3))
    ours.requires_grad_(False)
    x = torch.randn(2, 4)
    assert not ours(x).requires_grad and torch.equal(ours(x), original(x)) and len(ours.irc_plans) == 1


@pytest.mark.slow
def test_modes_of_submodules_are_honoured() -> None:
    torch.manual_seed(0)
    module: Any = net()
    ours, original = pair(module, images(4))
    changes: list[Callable[[Any], object]] = [
        lambda m: m[1].eval(),
        lambda m: m[7].eval(),
        lambda m: (m[1].train(), m[4].eval()),
        lambda m: m.train(),
    ]
    for change in changes:
        for model in (ours, original):
            change(model)
        assert_steps_agree(ours, original, *images(4))
    assert len(ours.irc_plans) == 4
    ours.eval()
    assert len(ours.irc_plans) == 4 and ours(*images(2)).shape == (2, 5)
    assert len(ours.irc_plans) == 4, "in eval() the original runs"


def test_a_module_planned_in_eval_is_planned_again_when_it_trains() -> None:
    torch.manual_seed(0)
    module: Any = net().eval()
    ours, original = pair(module, images(4))
    for change in (lambda m: m, lambda m: m.train(), lambda m: m.eval(), lambda m: m[1].train()):
        for model in (ours, original):
            change(model)
        assert_steps_agree(ours, original, *images(4))
    assert len(ours.irc_plans) == 3


@pytest.mark.slow
def test_settings_submodules_and_attributes_that_change_are_planned_anew() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.drop(m.scale * m.act(m.lin(x)))

    module: Any = Model(forward, lin=nn.Linear(4, 4, bias=False), drop=nn.Dropout(0.5), act=torch.tanh)
    module.scale, module.unread = 2.0, 1
    ours, original = pair(module, rows(3))
    changes: list[Callable[[Any], object]] = [
        lambda m: setattr(m.drop, "p", 0.25),
        lambda m: setattr(m, "scale", 3.0),
        lambda m: setattr(m, "act", torch.sigmoid),
        lambda m: setattr(m.lin, "bias", nn.Parameter(torch.ones(4))),
        lambda m: setattr(m, "drop", nn.Dropout(0.75)),
        lambda m: setattr(m.drop, "inplace", True),
    ]
    x = rows(3)
    for change in changes:
        seen = ours.irc_plans[0]
        for model in (ours, original):
            change(model)
        assert_steps_agree(ours, original, *x)
        assert ours.irc_plans[0] is not seen
    seen = ours.irc_plans[0].plan
    ours.unread = 2
    assert_steps_agree(ours, original, *x)
    assert ours.irc_plans[0].plan is seen


def test_plans_for_submodules_that_were_replaced_do_not_keep_them() -> None:
    ours, original = pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rows(3))
    assert_steps_agree(ours, original, *rows(2))
    gc.collect()
    held = tensor_bytes()
    ours[0] = nn.Linear(4, 4)
    original[0] = copy.deepcopy(ours[0])
    ours(*rows(2))
    gc.collect()
    assert tensor_bytes() == held - 2 * 80 and len(ours.irc_plans) == 1  # without two gradients
    assert_steps_agree(ours, original, *rows(2))


def test_tensors_that_no_longer_share_their_memory_are_counted_apart() -> None:
    ours, original = pair(Model(lambda m, a, b: m.lin(a) * b, lin=nn.Linear(4, 4)), rows(3) * 2)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert_steps_agree(ours, original, x, x)
    assert_steps_agree(ours, original, x, y)
    ((_, apart), (_, together)) = ours.irc_plans
    assert apart.static_bytes == together.static_bytes + x.nbytes
    assert_steps_agree(ours, original, y, y)
    assert len(ours.irc_plans) == 2


def test_an_input_that_is_written_and_shares_its_memory_is_planned_as_such() -> None:
    def writes(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = m.lin(y * 2.0)
        x.add_(1.0)
        return z * m.lin(y * 3.0)

    ours, original = pair(Model(writes, lin=nn.Linear(4, 4)), (*rows(3), *rows(3)))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    ours(x.clone(), y)
    both = [(t, t) for t in (x.clone(), x.clone())]
    assert torch.equal(ours(*both[0]), original(*both[1])) and torch.equal(both[0][0], both[1][0])
    assert len(ours.irc_plans) == 2


def test_autocast_is_planned_as_it_is_at_the_call() -> None:
    ours, original = pair(tanh(), rows(3))
    x = rows(3)
    for enabled in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results = [model(*x) for model in (ours, original)]
        assert results[0].dtype is results[1].dtype
        for model, result in zip((ours, original), results, strict=True):
            model.zero_grad()
            result.float().square().sum().backward()
        for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)
    assert len(ours.irc_plans) == 2


def test_another_element_type_of_the_whole_model_is_planned() -> None:
    ours, original = pair(tanh(), rows(3))
    for model in (ours, original):
        model.double()
    assert_steps_agree(ours, original, torch.randn(3, 4, dtype=torch.float64))


# ---------------------------------------------------------------------- several at once


def test_two_shapes_in_flight_have_their_own_gradients() -> None:
    torch.manual_seed(0)
    ours, original = pair(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh()), rows(5))
    args = [rows(5), rows(3), rows(2)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        for model in (ours, original):
            model.zero_grad()
            losses = [model(*x).square().mean() for x in args]
            for index in order:
                losses[index].backward()
        for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)
        assert_same(dict(ours.named_buffers()), dict(original.named_buffers()))


def test_a_plan_that_is_given_up_still_runs_its_backward() -> None:
    ours, original = pair(tanh(), rows(5), plans=2)
    x = rows(5)
    loss = ours(*x).sum()
    for count in (4, 3, 2):
        ours(*rows(count))
    assert all(call != "the example arguments" for call, _ in ours.irc_plans)
    loss.backward()
    original(*x).sum().backward()
    assert torch.equal(ours.lin.weight.grad, original.lin.weight.grad)


@pytest.mark.slow
def test_a_deep_copy_plans_for_itself() -> None:
    torch.manual_seed(0)
    ours, original = pair(net(), images(4))
    ours(*images(3))
    twin = copy.deepcopy(ours)
    before = copy.deepcopy(ours.state_dict())
    for count in (3, 2, 4):
        torch.manual_seed(count)
        assert_steps_agree(twin, copy.deepcopy(ours), *images(count))
        twin.load_state_dict(before)
    assert all(p.grad is None for p in ours.parameters())
    assert_same(dict(ours.state_dict()), dict(before))
    assert (len(twin.irc_plans), len(ours.irc_plans)) == (3, 2)
    ours[7] = nn.Identity()
    other = copy.deepcopy(ours)
    original.load_state_dict(before)
    original[7] = nn.Identity()
    assert_steps_agree(other, original, *images(3))


def test_a_deep_copy_of_a_graph_module_trains() -> None:
    ours, original = pair(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), rows(3))
    twin = copy.deepcopy(ours)
    assert isinstance(twin, fx.GraphModule)
    for count in (3, 2):
        assert_steps_agree(twin, original, *rows(count))
    assert all(p.grad is None for p in ours.parameters())


def test_threads_that_miss_at_once_plan_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    ours, original = pair(tanh(), rows(5))
    counts = (2, 3, 2, 3, 5, 2)
    args = [rows(count) for count in counts]
    found: dict[int, Tensor] = {}
    start = threading.Barrier(len(args))
    weight: Tensor = ours.lin.weight  # not read within a thread: another may plan, with others in its place

    def run(index: int) -> None:
        start.wait()
        for _ in range(3):
            found[index] = torch.autograd.grad(ours(*args[index]).square().sum(), weight)[0]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(args))]
    with caplog.at_level(logging.INFO, "irc"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, x in enumerate(args):
        (wanted,) = torch.autograd.grad(original(*x).square().sum(), original.lin.weight)
        assert torch.equal(found[index], wanted)
    assert sum("planned again" in record.getMessage() for record in caplog.records) == 2
    assert len(ours.irc_plans) == 3


@pytest.mark.slow
def test_modules_in_two_threads_plan_each_for_itself() -> None:
    torch.manual_seed(0)
    models = [pair(tanh(), rows(5)) for _ in range(2)]
    agreed: list[int] = []

    def run(index: int) -> None:
        ours, original = models[index]
        for count in (5, 4, 3, 2):
            x = torch.full((count, 4), 0.1 * count)
            mine, its = (torch.autograd.grad(m(x).sum(), m.lin.weight)[0] for m in (ours, original))
            assert torch.equal(mine, its)
            agreed.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(agreed) == [0] * 4 + [1] * 4


# ---------------------------------------------------------------------- modules in modules


def test_a_fitted_module_inside_of_another_is_part_of_its_plan() -> None:
    torch.manual_seed(0)
    inner, original = pair(tanh(), rows(5))
    outer, both = pair(nn.Sequential(inner, nn.Linear(4, 2)), rows(3))
    both[0] = original
    for count in (3, 2):
        assert_steps_agree(outer, both, *rows(count))
    assert len(inner.irc_plans) == 1 and len(outer.irc_plans) == 2


def test_a_fitted_module_is_fitted_again_as_the_one_that_it_was_made_of() -> None:
    ours, original = pair(tanh(), rows(5))
    again = planned(ours, rows(3))
    assert type(again).__mro__[3] is Model and again.lin is ours.lin
    for model in (again, ours):
        assert_steps_agree(model, original, *rows(3))


def test_a_forward_that_is_an_attribute_of_the_module_is_planned() -> None:
    module: Any = tanh()
    plain = module.forward
    module.forward = lambda x: plain(x) * 3.0
    ours = planned(module, rows(3))
    for count in (3, 2):
        x = rows(count)
        mine, wanted = ours(*x), module(*x)
        assert torch.equal(mine, wanted) and "Step" in type(mine.grad_fn).__name__
    with torch.no_grad():
        assert torch.equal(ours(*x), wanted)


# ---------------------------------------------------------------------- released gradients


def momentum(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return Model(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def test_optimizers_in_backward_go_on_under_another_plan() -> None:
    ours, original = pair(two_layers(), rows(5), optimizer_in_backward=momentum)
    ordinary = momentum(list(original.parameters()))
    optimizers = ours.irc_optimizers
    for count in (5, 3, 5, 2, 3):
        x = rows(count)
        for model in (ours, original):
            model(*x).square().mean().backward()
        ordinary.step()
        ordinary.zero_grad()
        assert_same(dict(ours.state_dict()), dict(original.state_dict()))
        assert all(parameter.grad is None for parameter in ours.parameters())
    assert ours.irc_optimizers == optimizers and len(ours.irc_plans) == 3
    assert {plan.reserved_bytes for _, plan in ours.irc_plans} == {160}
    with pytest.raises(irc.UnsupportedError, match="IRC512"):
        nn.utils.clip_grad_norm_(ours.parameters(), 1.0)


def test_gradients_go_on_accumulating_under_another_plan() -> None:
    ours, original = pair(two_layers(), rows(5), accumulate_gradients=True)
    for count in (5, 3, 2):
        x = rows(count)
        for model in (ours, original):
            model(*x).square().mean().backward()
        for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)
    assert {plan.reserved_bytes for _, plan in ours.irc_plans} == {160}


@pytest.mark.parametrize("way", ["apply", "accumulate"])
def test_what_is_reserved_for_a_frozen_parameter_stays_counted(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = (
        {"optimizer_in_backward": momentum} if way == "apply" else {"accumulate_gradients": True}
    )
    module: Any = two_layers()
    module.a.requires_grad_(False)
    ours, original = pair(module, rows(5), **options)
    ordinary = momentum(list(original.parameters())) if way == "apply" else None

    def step(reserved_bytes: int) -> None:
        caplog.clear()
        x = rows(5)
        for model in (ours, original):
            model(*x).square().mean().backward()
        if ordinary is not None:
            ordinary.step()
            ordinary.zero_grad()
        assert_same(dict(ours.state_dict()), dict(original.state_dict()))
        for mine, its in zip(ours.parameters(), original.parameters(), strict=True):
            assert mine.grad is its.grad is None or torch.equal(mine.grad, its.grad)
        assert ours.irc_plans[0].plan.reserved_bytes == reserved_bytes

    step(80)
    for part, trains, reserved_bytes, plans in (
        ("a", True, 160, 1),
        ("b", False, 160, 2),
        ("a", False, 0, 2),
    ):
        for model in (ours, original):
            getattr(model, part).requires_grad_(trains)
        if reserved_bytes:
            step(reserved_bytes)
        assert len(ours.irc_plans) == plans, "a plan that does not count new state is given up"
        told = [record.getMessage() for record in caplog.records if "gave up" in record.getMessage()]
        assert len(told) == (plans == 1)
        assert all("does not count what the new plan keeps; calls like that" in line for line in told)
    assert list(ours.irc_optimizers) == (["b.weight", "b.bias", "a.weight", "a.bias"] if ordinary else [])
    _, frozen = ours.irc_plans
    assert ours.irc_plans[0].plan.static_bytes == frozen.plan.static_bytes


def test_a_plan_leaves_room_for_the_state_of_frozen_parameters() -> None:
    module: Any = Model(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(96, 96), b=nn.Linear(96, 96))
    example = (torch.randn(4, 96),)
    measured: Any = {"costs": "measured", "strategy": "auto", "loss": training_loss}
    ours = planned(module, example, "100%", optimizer_in_backward=momentum, **measured)
    training_loss(ours(*example)).backward()
    ours.b.requires_grad_(False)
    training_loss(ours(*example)).backward()
    plan: irc.Plan = ours.irc_plans[0].plan
    assert plan.reserved_bytes == sum(p.nbytes for p in module.parameters())
    held = plan.static_bytes  # the states of both layers are there
    assert measured_peak_bytes(ours, example, held) <= plan.peak_bytes <= ours.plan.budget_bytes


def test_a_parameter_that_is_replaced_has_no_optimizer() -> None:
    ours, _ = pair(two_layers(), rows(5), optimizer_in_backward=momentum)
    ours.a.weight = nn.Parameter(torch.zeros(4, 4))
    for count in (5, 2):
        with pytest.raises(irc.UsageError, match=r"IRC507.*parameter a\.weight is not the one of planning"):
            ours(*rows(count))
    assert list(ours.irc_optimizers) == ["a.weight", "a.bias", "b.weight", "b.bias"]


# ---------------------------------------------------------------------- what plans hold


def tensor_bytes() -> int:
    """Bytes of the storages that Python can reach."""
    tensors = (t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.slow
def test_plans_hold_no_memory_of_the_device_and_nothing_of_those_given_up() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    ours, _ = pair(Model(forward, lin=nn.Linear(4, 4)), rows(9), plans=3)
    ours(*rows(9))
    gc.collect()
    held, sources = tensor_bytes(), sum(name.startswith("<irc program") for name in linecache.cache)
    for count in range(1, 7):
        ours(*rows(count))
    gc.collect()
    assert tensor_bytes() == held, "equal constants are shared"
    assert sum(name.startswith("<irc program") for name in linecache.cache) == sources + 2


def test_constants_that_differ_are_counted_by_the_plans_beside_them() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x) + torch.tensor([[float(k)] for k in range(len(x))])

    ours, original = pair(Model(forward, lin=nn.Linear(4, 4)), rows(8))
    for count in (8, 4, 2):
        assert_steps_agree(ours, original, *rows(count))
    parameters_bytes, row_bytes = 80, 16
    counted = {4 * k + 16 * k + 80 for k in (8,)}
    plans = [plan.static_bytes - parameters_bytes for _, plan in ours.irc_plans]
    assert plans == [2 * (4 + row_bytes) + 32 + 16, 4 * (4 + row_bytes) + 32, 8 * (4 + row_bytes)]
    assert counted == {plans[2] + parameters_bytes}
    budget = ours.irc_plans[-1].plan.peak_bytes
    ours = planned(copy.deepcopy(original), rows(8), budget)
    ours(*rows(4))
    assert len(ours.irc_plans) == 1, "the first plan no longer fits beside other constants"
    ours(*rows(2))
    assert len(ours.irc_plans) == 2


# ---------------------------------------------------------------------- the largest batch


@pytest.mark.slow
@pytest.mark.parametrize(("make", "draw"), [(chain, wide_rows), (net, images)], ids=["chain", "net"])
def test_smaller_batches_take_over_the_schedule_of_the_largest(
    make: Callable[[], nn.Module], draw: Callable[[int], tuple[Tensor]]
) -> None:
    torch.manual_seed(0)
    module, example = make(), draw(64)
    strategy = "auto" if make is chain else "eviction"
    measured: Any = {"costs": "measured", "strategy": strategy, "loss": training_loss, "time_limit": 3}
    probe: irc.Plan = planned(copy.deepcopy(module), example, **measured).plan
    budget = probe.minimum_budget_bytes if make is chain else probe.peak_bytes
    ours, original = pair(module, example, budget, dynamic="batch", **measured)
    for count in (64, 33, 4):
        args = draw(count)
        assert_steps_agree(ours, original, *args)
        plan: irc.Plan = ours.irc_plans[0].plan
        assert recomputed(plan) == recomputed(ours.plan)
        assert plan.strategy == ours.plan.strategy + (", carried over" if count < 64 else "")
        peak = measured_peak_bytes(ours, args, plan.static_bytes)
        assert peak <= plan.peak_bytes <= plan.budget_bytes == budget
    assert any(recomputed(ours.plan).values()) or make is net
    with pytest.raises(irc.BudgetError, match=r"IRC520.*float32\[192, "):
        ours(*draw(192))


@pytest.mark.slow
def test_what_is_not_a_batch_gets_a_search_of_its_own() -> None:
    ours, original = pair(Sequence(), (torch.randint(11, (4, 6)),), dynamic="batch")
    assert_steps_agree(ours, original, torch.randint(11, (4, 5)))
    assert ours.irc_plans[0].plan.strategy == "eviction"
    assert_steps_agree(ours, original, torch.randint(11, (2, 6)))
    assert ours.irc_plans[0].plan.strategy == "eviction, carried over"
    assert_steps_agree(ours, original, torch.randint(11, (5, 6)))
    assert ours.irc_plans[0].plan.strategy == "eviction, carried over", "a larger batch that fits"


def test_a_batch_with_other_operations_gets_a_search_of_its_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        return y if len(x) < 3 else y.tanh()

    ours, original = pair(Model(forward, lin=nn.Linear(4, 4)), rows(5), dynamic="batch")
    for count, strategy in ((4, "eviction, carried over"), (2, "eviction"), (3, "eviction, carried over")):
        assert_steps_agree(ours, original, *rows(count))
        assert ours.irc_plans[0].plan.strategy == strategy


def costed(count: int) -> Program:
    captured = capture(net(), images(count))
    return PassManager([SplitConvolutions(), irc.passes.Cost(profile="cpu")]).run(Program(captured.graph))


def test_a_schedule_is_carried_over_only_where_it_fits() -> None:
    torch.manual_seed(0)
    large, small = costed(8), costed(3)
    chosen = irc.passes.PlanMemory("100%", strategy="auto", time_limit=2).run(large)
    assert chosen.plan is not None and chosen.schedule is not None
    carried = reuse_schedule(chosen, small, chosen.plan.budget_bytes)
    assert carried is not None and carried.plan is not None and carried.schedule is not None
    assert [n.name for n in carried.schedule.computed] == [n.name for n in chosen.schedule.computed]
    assert carried.plan.peak_bytes < chosen.plan.peak_bytes
    assert reuse_schedule(chosen, small, carried.plan.peak_bytes) is not None
    assert reuse_schedule(chosen, small, carried.plan.peak_bytes - 1) is None
    other = capture(tanh(), rows(3)).graph
    assert reuse_schedule(chosen, irc.passes.Cost(profile="cpu").run(Program(other)), 1 << 40) is None


# ---------------------------------------------------------------------- the loss, and what is refused


def test_a_loss_for_the_example_s_targets_counts_for_smaller_results() -> None:
    target = torch.randint(4, (5,))
    ours, original = pair(tanh(), rows(5), loss=lambda y: functional.cross_entropy(y, target))
    assert_steps_agree(ours, original, *rows(3))
    with pytest.raises(irc.UsageError, match=r"IRC522.* 96 bytes where those of the example take 80 bytes"):
        ours(*rows(6))
    assert_steps_agree(ours, original, *rows(5))


def test_one_plan_refuses_other_calls() -> None:
    ours, original = pair(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), rows(3), plans=1)
    with pytest.raises(irc.UsageError, match="IRC501"):
        ours(*rows(2))
    ours[0].bias.requires_grad_(False)
    with pytest.raises(irc.IrcError, match="IRC503"):
        ours(*rows(3))
    ours[0].bias.requires_grad_()
    ours[1].eval()
    with pytest.raises(irc.IrcError, match="IRC502"):
        ours(*rows(3))
    ours[1].train()
    ours[1].p = 0.0
    with pytest.raises(irc.UsageError, match=r"IRC507.*setting of submodule '1'.*'p': 0.5.*'p': 0.0"):
        ours(*rows(3))
    ours[1].p = 0.5
    assert_steps_agree(ours, original, *rows(3))
    ours[0] = nn.Linear(4, 4)
    with pytest.raises(irc.UsageError, match=r"IRC507.*the module has other submodules"):
        ours(*rows(3))


def test_a_root_attribute_that_changes_is_refused_with_one_plan() -> None:
    module: Any = Model(lambda m, x: m.lin(x) * m.scale, lin=nn.Linear(4, 4))
    module.scale = 2.0
    ours, _ = pair(module, rows(3), plans=1)
    ours.scale = 3.0
    with pytest.raises(irc.UsageError, match=r"IRC507.*attribute 'scale'.*2\.0 is now 3\.0"):
        ours(*rows(3))


def advice(caplog: pytest.LogCaptureFixture, ours: nn.Module, *shapes: tuple[int, int]) -> list[str]:
    """What the log advises for calls of these shapes."""
    caplog.clear()
    for shape in shapes:
        ours(torch.randn(*shape, 4))
    texts = (text.rpartition("; ")[2] for text in caplog.messages if text.startswith("planned again"))
    return [text if text.startswith("pad") else "" for text in texts]


def test_a_range_is_advised_where_one_size_varies_and_then_trains(caplog: pytest.LogCaptureFixture) -> None:
    pad = "pad it to few shapes"
    either = f"{pad}, or plan for a range of them with dynamic= of irc.optimize"
    module, example = tanh(), (torch.randn(3, 8, 4),)
    ours = irc.optimize(copy.deepcopy(module), example, PLENTY, costs="analytic")
    assert advice(caplog, ours, (3, 7), (3, 6), (2, 8)) == [either, either, pad]
    assert advice(caplog, irc.optimize(copy.deepcopy(module), example, PLENTY, costs="analytic"), (2, 7)) == [
        pad
    ]
    ranged = irc.optimize(copy.deepcopy(module), example, PLENTY, costs="analytic", dynamic={0: {1: (3, 20)}})
    assert advice(caplog, ranged, (3, 7), (3, 20)) == []
    assert advice(caplog, ranged, (2, 7), (3, 21)) == [pad, pad]
    for length in (3, 20):
        assert_steps_agree(ranged, module, torch.randn(3, length, 4))


NAN = float("nan")
ODD_VALUES: list[Any] = [
    *(NAN, -NAN, 0.0, -0.0, 1, 1.0, True, np.float64(1.0), np.float32(1.0), np.int64(1), np.float32("nan")),
    *((1, NAN), (True, NAN), [0.0], [-0.0], {"scale": NAN}),
]


@pytest.mark.slow
def test_values_of_odd_equality_have_a_plan_each() -> None:
    def scaled(m: Any, x: Tensor, value: Any) -> Tensor:
        value = value[-1] if isinstance(value, tuple | list) else value
        value = value["scale"] if isinstance(value, dict) else value
        return m.net(x) * {bool: 3, int: 5}.get(type(value), 7) * value * math.copysign(2, value)

    ours, original = pair(Model(scaled, net=tanh()), (*rows(3), 2.5), plans=40)
    for planned in (False, True):
        count = len(ours.irc_plans)
        for value in copy.deepcopy(ODD_VALUES):  # a NaN that is another object
            for each in (ours, original):
                each.zero_grad()
            x = rows(3)[0]
            assert torch.equal(ours(x, value).nan_to_num(), original(x, value).nan_to_num())
        assert not planned or len(ours.irc_plans) == count


def test_a_plan_that_is_not_for_its_call_is_refused() -> None:
    module = tanh()
    captured = capture(module, rows(3))
    graph = irc.passes.PlanMemory("100%", strategy="keep-all").run(Program(captured.graph))
    assert graph.schedule is not None
    first = CompiledPlan(compile_program(graph.schedule, captured.constants), captured.signature)
    state = PlanCacheState(lambda *_: Compilation(first, {}, "any"), "any", 2, False, (first,))
    ours, _ = bind(module, state)
    with pytest.raises(irc.UsageError, match=r"IRC521.*input 0 is float32\[2, 4\]") as alone:
        ours(*rows(2))
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    assert ("another thread" in str(alone.value)) == bool(others)
    ends = threading.Event()
    other = threading.Thread(target=ends.wait, name="loader")
    other.start()
    try:
        with pytest.raises(irc.UsageError, match=r"(?s)IRC521.*another thread \(.*loader"):
            ours(*rows(2))
    finally:
        ends.set()
        other.join()
    assert ours(*rows(3)).requires_grad


@pytest.mark.parametrize("options", [{"plans": 0}, {"plans": True}, {"plans": "8"}, {"dynamic": "rows"}])
def test_malformed_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(irc.UsageError, match="IRC406"):
        planned(tanh(), rows(3), **options)
    with pytest.raises(irc.UsageError, match=r"IRC406.*more than one plan"):
        planned(tanh(), rows(3), plans=1, dynamic="batch")


def test_no_call_is_planned_within_a_mode() -> None:
    ours, original = pair(tanh(), rows(3))
    with (
        FlopCounterMode(display=False),
        pytest.raises(irc.UnsupportedError, match=r"IRC523.*within \w*FlopCounterMode"),
    ):
        ours(*rows(2))
    assert_steps_agree(ours, original, *rows(2))


class _Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, timestep: float = 0, sizes: Any = ()) -> Tensor:
        return self.lin(x).clamp(max=timestep + 1 + sum(sizes))


def test_a_plan_for_another_number_names_the_argument_the_nearest_plan_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.randn(4, 8)
    fitted = irc.optimize(_Timed(), (x, 5), "200%", costs="analytic")
    for timestep in (6, 7, 8, 9):
        fitted(x, timestep).sum().backward()
    lines = [record.getMessage() for record in caplog.records if record.name == "irc"]
    assert "argument timestep is 7; the plan was made for 6; pass it as a tensor" in lines[1]
    assert [line for line in lines if "3 plans in a row" in line] == [lines[3]] and len(lines) == 5
    caplog.clear()
    fitted(x, 9, [1, 2]).sum().backward()
    fitted(x, 9, [1, 3]).sum().backward()
    fitted(x, timestep=9).sum().backward()
    lines = [record.getMessage() for record in caplog.records]
    assert "argument sizes[1] is 3; the plan was made for 2" in lines[1]
    assert "the arguments are 1 positional and timestep=" in lines[2]


@pytest.mark.parametrize(("planned", "now"), [(0.0, -0.0), (2, 2.0), (1, True), ((1, 0.0), (1, -0.0))])
def test_equal_numbers_of_another_class_or_sign_are_other_constants(planned: Any, now: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.scale = nn.Linear(4, 4), [planned]
            self.inner = Settings(planned)

        def forward(self, x: Tensor, k: Tensor, by: Any) -> Tensor:
            numbers = [
                n
                for each in (by, *self.scale, self.inner.scale)
                for n in (each if isinstance(each, tuple) else [each])
            ]
            return torch.tanh(self.lin(x)) * sum((k * n).sum() for n in numbers) + 1 / torch.full(
                (), numbers[-1]
            )

    class Settings(nn.Module):
        def __init__(self, scale: Any) -> None:
            super().__init__()
            self.scale = scale

    x, k = torch.randn(3, 4), torch.tensor([2**53 + 1, 3])
    original = Scaled()
    fitted = irc.optimize(copy.deepcopy(original), (x, k, planned), "1GiB", costs="analytic")
    for change in ("argument", "attribute", "submodule"):
        for model in (original, fitted):
            model.scale = [now if change == "attribute" else planned]
            model.inner.scale = now if change == "submodule" else planned
        by = now if change == "argument" else planned
        mine, its = original(x, k, by), fitted(x, k, by)
        assert mine.dtype == its.dtype
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


def test_plans_for_calls_that_take_turns_are_not_plans_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 8)
    fitted = irc.optimize(_Timed(), (x, 5), "200%", costs="analytic")
    for timestep in (6, 7, 8, 9):
        fitted(x, timestep).sum().backward()
        fitted(x, 5).sum().backward()
    assert not any("in a row" in record.getMessage() for record in caplog.records)
