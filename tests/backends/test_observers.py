"""Hooks of submodules that look at what passes, beside the original: taps, logs, statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc
from irc.compiler.training import measured_peak_bytes
from irc.ir import UnsupportedError

scale = 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(16, 16), nn.Dropout(0.1)
        self.factor = 1.0

    def forward(self, x: Tensor, *, times: int = 1) -> Tensor:
        return x + self.drop(torch.relu(self.inner(x))) * times * self.factor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.store: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, times=2)
        return self.head(x) * scale


Hook = Callable[..., Any]


def fitted(*hooks: tuple[str, Hook], make: Callable[[], nn.Module] = Model, **options: Any) -> Any:
    torch.manual_seed(0)
    model = make()
    for name, hook in hooks:
        model.get_submodule(name).register_forward_hook(hook)
    return irc.optimize(model, (torch.randn(8, 16),), budget="1MiB", **options)


def trained(model: Any, seed: int, size: int = 8) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    result = model(torch.randn(size, 16))
    result.logsumexp(1).mean().backward()
    return [result.detach(), torch.get_rng_state(), *(p.grad.clone() for p in model.parameters())]


def watch(model: Any, log: list[Any]) -> None:
    def after(name: str) -> Hook:
        @torch.no_grad()
        def hook(_: nn.Module, args: Any, result: Tensor) -> None:
            log.append((name, args[0].sum().item(), result.clone()))

        return hook

    def before(_: nn.Module, args: Any, keywords: dict[str, int]) -> None:
        log.append((args[0].mean().item(), keywords))

    model.blocks[0].register_forward_hook(after("block"))
    model.blocks[1].inner.register_forward_hook(after("inner"))
    model.blocks[1].register_forward_pre_hook(before, with_kwargs=True)
    model.head.register_forward_hook(after("head"))


def same(mine: Any, its: Any) -> bool:
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(its) and all(map(same, mine, its))
    return torch.equal(mine, its) if isinstance(mine, Tensor) else mine == its


@pytest.mark.parametrize("is_before", [True, False])
def test_hooks_see_in_each_step_what_eager_shows_them(is_before: bool) -> None:
    torch.manual_seed(0)
    original = Model()
    planned = copy.deepcopy(original)
    log, ours_log = list[Any](), list[Any]()
    watch(original, log)
    if is_before:
        watch(planned, ours_log)
    ours: Any = irc.optimize(planned, (torch.randn(8, 16),), budget="1MiB")
    assert not ours_log
    if not is_before:
        watch(ours, ours_log)
    for seed in range(3):
        assert same(trained(original, seed), trained(ours, seed))
    assert same(log, ours_log) and len(log) == 12
    assert len(ours.irc_plans) == 2 - is_before


def test_a_hook_that_is_removed_is_called_no_more() -> None:
    log = list[Any]()
    ours = fitted()
    before = trained(ours, 1)

    def count(*_: Any) -> None:
        log.append(1)

    handle = ours.blocks[0].register_forward_hook(count)
    assert same(trained(ours, 1), before) and log == [1]
    handle.remove()
    assert same(trained(ours, 1), before) and log == [1]
    assert len(ours.irc_plans) == 2


def test_what_hooks_are_given_is_within_the_plan() -> None:
    kept = dict[str, Tensor]()

    def keep(_: nn.Module, args: Any, result: Tensor) -> None:
        kept["x"] = result

    ours = fitted(("blocks.0", keep))
    x, plan = torch.randn(8, 16), ours.irc_plan
    trained(ours, 1)
    assert measured_peak_bytes(ours, (x,), plan.static_bytes) <= plan.peak_bytes
    with pytest.raises(UnsupportedError, match="IRC346"):
        (ours(x).sum() + kept["x"].sum()).backward()


class Keeper:
    """Holds the model and what a layer of it returns, as extractors of features do."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found = model, list[Tensor]()

    def keep(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.found.append(result.detach())


def test_a_method_of_an_object_that_holds_the_model_is_called() -> None:
    model = Model()
    keeper = Keeper(model)
    model.blocks[2].register_forward_hook(keeper.keep)
    ours: Any = irc.optimize(model, (torch.randn(8, 16),), budget="1MiB")
    trained(ours, 1)
    assert len(keeper.found) == 1


def _write_global(_: nn.Module, args: Any, result: Any) -> None:
    global scale
    scale = 1.0


def _pass(*_: Any) -> None:
    pass


def _doubled(_: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 2


def _changed(_: nn.Module, args: Any, result: Tensor) -> None:
    with torch.no_grad():
        result.mul_(2)


def _drawn(_: nn.Module, args: Any, result: Tensor) -> None:
    torch.rand(1)


def _constrained(module: Any, args: Any, result: Tensor) -> None:
    module.inner.weight.data.clamp_(-0.01, 0.01)


def _set(module: Any, args: Any, result: Tensor) -> None:
    module.factor = 2.0


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (_changed, "changes what it is given"),
        (_drawn, "draws random numbers"),
        (_constrained, "changes a parameter"),
        (_set, "changes a setting"),
    ],
)
def test_a_hook_that_the_forward_depends_on_is_refused_in_the_step(hook: Hook, reason: str) -> None:
    ours = fitted(("blocks.0", hook))
    with pytest.raises(UnsupportedError, match=f"IRC505.*'blocks.0'.*{reason}"):
        trained(ours, 1)


def test_a_hook_that_leads_to_what_the_forward_leads_to_is_refused() -> None:
    model = Model()
    store = model.store

    def keep(_: nn.Module, args: Any, result: Tensor) -> None:
        store["x"] = result

    model.head.register_forward_hook(keep)
    for refused in (model, _with(_write_global)):
        with pytest.raises(UnsupportedError, match=r"IRC505.*'head'.*shares an object"):
            irc.optimize(refused, (torch.randn(8, 16),), budget="1MiB")
    assert not store


def _with(hook: Hook) -> nn.Module:
    model = Model()
    model.head.register_forward_hook(hook)
    return model


def _generating(*_: Any) -> Any:
    yield 1


@pytest.mark.parametrize("hook", [_doubled, lambda *_: 3, _generating, print])
def test_a_hook_that_may_return_something_is_refused_before_anything_runs(hook: Hook) -> None:
    ours = fitted()
    ours.blocks[0].register_forward_hook(hook)
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=r"IRC505.*'blocks.0'.*may return"):
        ours(torch.ones(8, 16))
    assert torch.equal(torch.get_rng_state(), state)


class InPlace(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.blocks[0](x))


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.blocks[0], x, use_reentrant=False)


@pytest.mark.parametrize(
    ("make", "reason"), [(InPlace, "changes afterwards"), (Checkpointed, "checkpointed")]
)
def test_hooks_that_eager_shows_something_else_are_refused(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"IRC505.*{reason}"):
        fitted(("blocks.0", _pass), make=make)


def test_a_pipeline_refuses_hooks() -> None:
    with pytest.raises(UnsupportedError, match=r"IRC505.*a pipeline"):
        irc.pipeline(
            _with(_pass),
            (torch.randn(8, 16),),
            stages=2,
            micro_batches=2,
            budget="1GiB",
            loss=lambda y, _: y.sum(),
        )
