"""Annotations and operations that must not run again, end to end: numbers, schedule, explanation."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import irc
from irc.backends.torch import bind_program, compile_program
from irc.frontends.torch import capture
from irc.ir import Node, Region, Trait, nondeterminism
from irc.passes import PlanMemory, Planner, Program


class Calls(nn.Module):
    """A module whose forward is a function of itself and the arguments."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def steps(model: nn.Module, args: tuple[Any, ...], count: int = 3) -> list[Tensor]:
    """The losses of some steps of SGD, the gradients of the last, and what the generator draws next."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    found: list[Tensor] = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(*args).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *(b.clone() for b in model.buffers()), torch.rand(1)]


def at_two_budgets(model: nn.Module, *args: Tensor) -> tuple[Any, Any]:
    """The module fitted with room, and at the smallest budget that a schedule is found for."""
    plan = functools.partial(irc.optimize, model, args, costs="analytic", time_limit=2)
    roomy = plan("150%")
    return roomy, plan(roomy.plan.minimum_budget_bytes)


# ---------------------------------------------------------------------- the numbers


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE


WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, policy),
    },
}


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8), nn.BatchNorm1d(8))


def network(way: str) -> nn.Module:
    torch.manual_seed(0)
    options = WAYS[way]

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        for each in (m.a, m.b):
            x = x + (each(x) if options is None else checkpoint(each, x, **options))
        return m.head(x)

    return Calls(forward, stem=nn.Linear(8, 8), a=block(), b=block(), head=nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("way", "marks"),
    [
        ("plain", "ab"),
        ("selective", ""),
        *(
            pytest.param(way, marks, marks=pytest.mark.slow)
            for way, marks in [
                *((way, "") for way in WAYS if way != "selective"),
                ("plain", "a"),
                ("plain", "b"),
                ("selective", "ab"),
            ]
        ),
    ],
)
def test_steps_are_those_of_the_original(way: str, marks: str) -> None:
    model: Any = network(way)
    x = torch.randn(16, 8, requires_grad=True)
    if "a" in marks:
        irc.keep(model.a)
    if "b" in marks:
        irc.recompute(model.b)
    plain: Any = copy.deepcopy(model)
    plain.function = network("plain").__dict__["function"]  # torch's update running statistics twice
    for fitted in at_two_budgets(copy.deepcopy(model), x):
        wanted = steps(copy.deepcopy(plain), (x,))
        for mine, its in zip(steps(copy.deepcopy(fitted), (x,)), wanted, strict=True):
            assert torch.equal(mine, its)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "selective"])
def test_gradients_are_those_of_torch_s_checkpoints(way: str) -> None:
    model = network(way)
    x = torch.randn(16, 8, requires_grad=True)
    fitted = irc.optimize(copy.deepcopy(model), x, "150%", costs="analytic")
    for each in (model, fitted):
        torch.manual_seed(1)
        each(x).square().mean().backward()
    for mine, its in zip(fitted.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)


def test_a_recomputed_module_does_not_stay_and_a_kept_one_does_not_run_again() -> None:
    model: Any = network("plain")
    irc.recompute(model.a)
    irc.keep(model.b)
    for fitted in at_two_budgets(model, torch.randn(16, 8)):
        seen: set[str] = set()
        for decision in fitted.plan.decisions:
            path = decision.location.partition("module ")[2]
            seen.add(path)
            if path.startswith("b."):
                assert decision.runs_again == 0
            elif path in ("a.0", "a.1", "a.3") or decision.operation.startswith("native_dropout "):
                assert decision.action == "recompute" and decision.annotation == "irc.recompute(a)"
            elif path == "a.2":  # a mask that is smaller than a state of the generator
                assert decision.action == "keep" and "in spite of irc.recompute(a)" in decision.reason
        assert {"a.0", "a.1", "a.2", "a.3", "b.0"} <= seen
        explained = fitted.plan.explain()
        assert "  irc.recompute(a): backward reads it once; its operation runs again once" in explained
        assert "\nirc.recompute(a): 4 storages (6.5 KiB) not kept for backward, and made again; " in explained
        assert "\nirc.keep(b): " in explained


def test_a_kept_dropout_does_not_draw_again() -> None:
    model = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 8))
    irc.keep(model[2])
    for fitted in at_two_budgets(model, torch.randn(64, 8)):
        found = [decision for decision in fitted.plan.decisions if decision.location.endswith("module 2")]
        assert [d.annotation for d in found if d.action == "keep"] == ["irc.keep(2)"] * 2
        assert not any(decision.runs_again for decision in found)


# ---------------------------------------------------------------------- what must not run again


def test_what_writes_by_threads_runs_once_on_the_cpu() -> None:
    def forward(m: Any, x: Tensor, places: Tensor) -> Tensor:
        h = m.a(x).tanh()
        table = torch.zeros(4, 8).index_put((places,), h, accumulate=True).cos()
        copied = torch.zeros(16, 8).index_copy(0, places, h).sin()
        return m.b(table[places] * copied[places] + h)

    torch.manual_seed(0)
    model = Calls(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    args = torch.randn(16, 8), torch.randint(4, (16,))
    original = copy.deepcopy(model)
    _, fitted = at_two_budgets(model, *args)
    once = {
        d.operation.partition("(aten.")[2][:10]: d for d in fitted.plan.decisions if "nondeter" in d.reason
    }
    assert set(once) == {"index_put_", "index_copy"}
    assert all(d.action == "keep" and d.runs_again == 0 for d in once.values())
    assert "(nondeterministic: adds in the order of the threads)" in once["index_put_"].reason
    for mine, its in zip(steps(fitted, args), steps(original, args), strict=True):
        assert torch.equal(mine, its)


_runs: list[int] = []


@torch.library.custom_op("irc_tests::unsteady", mutates_args=())
def unsteady(x: Tensor) -> Tensor:
    """Other numbers at every run."""
    _runs.append(1)
    return x + len(_runs)


@unsteady.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


unsteady.register_autograd(lambda ctx, gradient: gradient)


def test_an_operation_of_which_nothing_is_known_runs_once() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.ops.irc_tests.unsteady(m.a(x).tanh()).sin().exp())

    model: Any = Calls(forward, a=nn.Linear(8, 64), b=nn.Linear(64, 8))
    irc.recompute(model)
    _, fitted = at_two_budgets(model, torch.randn(64, 8))
    (decision,) = (d for d in fitted.plan.decisions if "unsteady" in d.operation)
    assert "an operation of irc_tests, of which nothing is known" in decision.reason
    assert any(d.runs_again for d in fitted.plan.decisions)
    _runs.clear()
    fitted(torch.randn(64, 8)).sum().backward()
    assert len(_runs) == 1


def mixture() -> tuple[nn.Module, tuple[Tensor]]:
    """Each token's two best of four experts; every expert computes every token, so shapes stay the same."""

    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.router(x)
        best, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        results = [expert(x) * weights[..., index, None] for index, expert in enumerate(m.experts)]
        return m.norm(x + torch.stack(results).sum(0)).square().mean()

    torch.manual_seed(0)
    perceptrons = [nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(4)]
    parts = {"router": nn.Linear(16, 4), "experts": nn.ModuleList(perceptrons), "norm": nn.LayerNorm(16)}
    return Calls(forward, **parts), (torch.randn(16, 16),)


def as_on_an_accelerator(node: Node) -> str | None:
    """The table's answer, were the node's results on an accelerator."""

    def moved(value: Any) -> Any:
        return value and replace(value, type=replace(value.type, device="cuda:0"))

    return nondeterminism(replace(node, results=tuple(moved(value) for value in node.results)))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_routing_is_not_decided_anew(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, experts are chosen once; everywhere the numbers are the original's."""
    if device == "cuda":
        traits = sys.modules["irc.frontends.torch.node_traits"]
        monkeypatch.setattr(traits, "nondeterminism", as_on_an_accelerator)
    model, args = mixture()
    original = copy.deepcopy(model)
    captured = capture(model, args)
    graph = captured.graph
    once = {node.op for node in graph.nodes if Trait.NONDETERMINISTIC in node.traits}
    assert once == ({"aten.topk.default", "aten.scatter.src"} if device == "cuda" else set())
    planner = Planner(Program(graph))
    least = planner.minimum_bytes(is_thorough=True)
    schedule = PlanMemory(least, time_limit=2).choose(planner).schedule
    assert schedule is not None
    for order in (schedule.computed, *(simulated.order for _, simulated in planner.candidates().candidates)):
        ran = [node.op for node in order if node.op in once and node.region is Region.FORWARD]
        assert sorted(ran) == sorted(once)
    assert len(schedule.computed) > len(graph.operations)
    fitted = bind_program(model, compile_program(schedule, captured.constants), captured.signature)
    for mine, its in zip(steps(fitted, args), steps(original, args), strict=True):
        assert torch.equal(mine, its)
