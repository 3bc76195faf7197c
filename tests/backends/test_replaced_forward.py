"""A forward that somebody gives to a fitted module is planned: eager's bits, within the same budget."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc

# Dynamo has no public name for its reset
# pyright: reportPrivateUsage=false

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = 2.0
        layers = (layer for _ in range(3) for layer in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))
        self.body, self.head = nn.Sequential(*layers), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.scale


def rows() -> Tensor:
    return torch.randn(512, 16, generator=torch.Generator().manual_seed(1))


def loss(y: Tensor) -> Tensor:
    return y.float().square().mean()


def fitted(module: nn.Module) -> Any:
    return irc.optimize(module, (rows(),), "70%", loss=loss, costs="analytic", time_limit=1)


def through_backbone(self: Net, x: Tensor) -> Tensor:
    """What TRL's trainers do: the backbone, and then a head of their own."""
    return torch.cat([self.head(part) for part in self.body(x).chunk(4)]) * self.scale


def method(model: Any) -> None:
    model.forward = MethodType(through_backbone, model)


def method_in_dict(model: Any) -> None:
    model.__dict__["forward"] = MethodType(through_backbone, model)


def method_of_class(model: Any) -> None:
    model.forward = MethodType(lambda self, x: Net.forward(self, x) + 1.0, model)


def wrapped(model: Any) -> None:
    forward = model.forward

    @functools.wraps(forward)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        return 2.0 * forward(*args, **kwargs)

    model.forward = doubled


def wrapped_twice(model: Any) -> None:
    wrapped(model)
    wrapped(model)


def closure(model: Any) -> None:
    model.forward = lambda x: model.head(model.body(x).relu()) * model.scale


def of_a_hook(model: Any) -> None:
    """As accelerate's hooks do."""
    model._old_forward = model.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs).tanh()

    model.forward = functools.update_wrapper(functools.partial(forward, model), model.forward)


def prepared(model: Any) -> None:
    """As accelerate's `prepare` does for mixed precision."""
    model._original_forward = model.forward
    function = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__)
    model.forward = MethodType(function, model)
    whole = model.forward.__func__

    @functools.wraps(whole)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs).float()

    model.forward = MethodType(in_float32, model)


def unwrapped(model: Any) -> None:
    """As accelerate's `unwrap_model(keep_fp32_wrapper=False)` does."""
    prepared(model)
    forward = model.forward
    original = model.__dict__.pop("_original_forward")
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == original:
            break
    model.forward = MethodType(forward, model)


def gone_again(model: Any) -> None:
    method(model)
    del model.forward


def put_back(model: Any) -> None:
    before = model.forward
    method(model)
    model.forward = before


REPLACED = [
    method,
    method_in_dict,
    method_of_class,
    wrapped,
    wrapped_twice,
    closure,
    of_a_hook,
    prepared,
]
"""The ways to give a module another forward that computes something else."""

SAME = [unwrapped, gone_again, put_back]
"""The ways that end with the forward of its class."""


def step(model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    result = model(x)
    loss(result).backward()
    return [result.detach(), *(p.grad for p in model.parameters())]


def assert_as_eager(ours: Any, original: Any) -> None:
    for _ in range(2):
        for mine, its in zip(step(ours, rows()), step(original, rows()), strict=True):
            assert torch.equal(mine, its)


def assert_runs_its_plan(ours: Any) -> None:
    assert "Step" in type(ours(rows()).grad_fn).__name__
    plan = ours.irc_plans[0].plan
    assert plan.peak_bytes <= plan.budget_bytes == ours.plan.budget_bytes
    assert irc.measured_peak_bytes(ours, (rows(),), loss=loss) <= plan.peak_bytes


@pytest.mark.parametrize("replace", REPLACED)
def test_another_forward_is_planned_within_the_budget(
    replace: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    ours, original = fitted(Net()), Net()
    assert_as_eager(ours, original)
    replace(ours)
    replace(original)
    assert_as_eager(ours, original)
    assert len(ours.irc_plans) == 2 and "the module's forward is" in caplog.text
    assert_runs_its_plan(ours)
    with torch.no_grad():
        assert torch.equal(ours(rows()), original(rows()))


@pytest.mark.parametrize("replace", SAME)
def test_the_forward_of_the_class_has_one_plan(replace: Callable[[Any], None]) -> None:
    ours, original = fitted(Net()), Net()
    replace(ours)
    assert_as_eager(ours, original)
    assert len(ours.irc_plans) == 1
    assert_runs_its_plan(ours)


@pytest.mark.parametrize("replace", [method, wrapped])
def test_a_forward_that_the_module_has_before_is_the_first_plan(replace: Callable[[Any], None]) -> None:
    module, original = Net(), Net()
    replace(module)
    replace(original)
    ours = fitted(module)
    assert_as_eager(ours, original)
    assert len(ours.irc_plans) == 1
    assert_runs_its_plan(ours)


@pytest.mark.parametrize("replace", [method, closure, wrapped])
def test_what_another_forward_reads_of_the_module_counts(replace: Callable[[Any], None]) -> None:
    ours, original = fitted(Net()), Net()
    for model in (ours, original):
        replace(model)
    assert_as_eager(ours, original)
    ours.scale = original.scale = 3.0
    assert_as_eager(ours, original)


def test_another_forward_that_changes_the_module_by_another_name_is_refused() -> None:
    ours = fitted(Net())

    def keeping(x: Tensor) -> Tensor:
        ours.seen = ours.body(x)
        return ours.head(ours.seen)

    def undoing(x: Tensor) -> Tensor:
        del ours.forward
        return ours(x)

    for forward, cure in ((keeping, "types.MethodType"), (undoing, "before the module is called")):
        ours.forward = forward
        with pytest.raises(irc.UnsupportedError) as refused:
            ours(rows())
        assert refused.value.code == "IRC539" and cure in (refused.value.help or "")
        assert not hasattr(ours, "seen") and ours.__dict__["forward"] is forward

    def keeping_as_method(self: Any, x: Tensor) -> Tensor:
        self.seen = self.body(x)
        return self.head(self.seen)

    original: Any = Net()
    for model in (ours, original):
        model.forward = MethodType(keeping_as_method, model)
    assert_as_eager(ours, original)
    assert torch.equal(ours.seen, original.seen)


def test_dynamo_runs_a_plan_as_it_is_and_lets_misses_be_planned() -> None:
    ours, original = fitted(Net()), Net()
    compiled: Any = torch.compile(ours, backend="eager")
    for count in (1, 2):
        assert torch.equal(compiled(rows()), original(rows()))
        assert len(ours.irc_plans) == count
        for model in (ours, original):
            method(model)
    torch._dynamo.reset()


def test_copies_have_another_forward_of_their_own() -> None:
    ours, original = fitted(Net()), Net()
    method(ours)
    method(original)
    assert_as_eager(ours, original)
    twin = copy.deepcopy(ours)
    assert twin.forward.__self__ is twin
    with torch.no_grad():
        twin.head.weight.mul_(2)
        changed = copy.deepcopy(original)
        changed.head.weight.mul_(2)
    assert_as_eager(ours, original)
    assert_as_eager(twin, changed)
    assert len(twin.irc_plans) == 2
    again = pickle.loads(pickle.dumps(fitted(Net())))
    assert_as_eager(again, Net())


def test_a_forward_is_seen_as_it_was_set() -> None:
    ours = fitted(Net())
    method(ours)
    assert ours.forward.__func__.__wrapped__ is through_backbone
    assert ours.__dict__["forward"].__func__ is through_backbone
    wrapped(ours)
    assert not hasattr(ours.forward, "__func__") and callable(ours.forward)


def result_kib(body: Any) -> float:
    """KiB of what a part returns."""
    return body(rows()).nbytes / 1024


def test_parts_that_train_beside_the_plan_are_named_once_with_their_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, original = fitted(Net()), Net()
    caplog.clear()
    ours.eval()
    loss(ours.body(rows())).backward()
    ours.train()
    with torch.no_grad():
        ours.body(rows())
    assert_as_eager(ours, original)
    method(ours)
    ours(rows())
    assert "IRC568" not in caplog.text
    for _ in range(2):
        for model in (ours, original):
            model.zero_grad()
            loss(model.body(rows())).backward()
        pairs: Any = zip(ours.parameters(), original.parameters(), strict=True)
        assert all(a.grad is b.grad is None or torch.equal(a.grad, b.grad) for a, b in pairs)
    (line,) = [record.getMessage() for record in caplog.records if "IRC568" in record.getMessage()]
    assert "submodule 'body' is called in training" in line
    assert f"{result_kib(ours.body):.0f} KiB of results" in line
    assert pickle.loads(pickle.dumps(ours.body)).__dict__.get("_compiled_call_impl") is None
    assert "_compiled_call_impl" not in vars(copy.deepcopy(ours.body))


def test_checkpoints_beside_the_plan_run_as_often_as_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    ours, original, calls = fitted(Net()), Net(), []
    ours.body.register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (ours, original):
        loss(checkpoint(model.body, rows(), use_reentrant=False)).backward()
    pairs: Any = zip(ours.body.parameters(), original.body.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs) and len(calls) == 2
    assert sum("IRC568" in record.getMessage() for record in caplog.records) == 1


def test_a_part_of_a_planned_module_can_be_planned_too(caplog: pytest.LogCaptureFixture) -> None:
    whole = Net()
    outer = fitted(whole)
    for part in (whole.body, outer.body):
        ours: Any = irc.optimize(part, (rows(),), "70%", loss=loss, costs="analytic", time_limit=1)
        for each in (ours, copy.copy(ours), copy.deepcopy(ours)):
            assert irc.measured_peak_bytes(each, (rows(),), loss=loss) <= ours.plan.budget_bytes
    assert "IRC568" not in caplog.text
    assert_as_eager(outer, Net())


def test_the_original_is_called_and_scripted_as_before(caplog: pytest.LogCaptureFixture) -> None:
    original = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    ours: Any = irc.optimize(original, (rows(),), "100%", loss=loss, costs="analytic")
    loss(original(rows())).backward()
    assert "IRC568" not in caplog.text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on what is deprecated
        scripted: Any = torch.jit.script(original)  # pyright: ignore[reportUnknownMemberType]
    assert torch.equal(scripted(rows()), ours(rows()))
