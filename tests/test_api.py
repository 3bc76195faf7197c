"""`import irc`: what the README shows, and that optimizing leaves the user's model as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import irc
from irc.frontends.torch import capture
from irc.passes import Cost, PassManager, PlanMemory, Program

torch.set_num_threads(1)


class Net(nn.Module):
    """Dropout, running statistics, a frozen weight, a keyword, and a gradient that is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, *, gain: Tensor | None = None, power: int = 1) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        x = self.norm(x)
        return x**power if gain is None else x**power * gain


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 32 * 16).reshape(32, 16)


def optimize(model: nn.Module, args: Any = X, budget: Any = "85%", **options: Any) -> Any:
    options.setdefault("time_limit", 1.0)
    return irc.optimize(model, args, budget=budget, **options)


def gradients(module: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    module.zero_grad()
    torch.manual_seed(1)
    module(*args, **kwargs).square().mean().backward()
    return [p.grad if p.grad is None else p.grad.clone() for p in module.parameters()]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_fitted_module_trains_the_same(net: Net) -> None:
    original = copy.deepcopy(net)
    fitted = optimize(net, budget="75%")
    plan: irc.Plan = fitted.plan
    assert isinstance(fitted, Net) and fitted.norm is net.norm
    assert same(gradients(fitted, X), gradients(original, X))
    assert plan.static_bytes < plan.peak_bytes <= plan.budget_bytes == int(0.75 * plan.baseline_peak_bytes)
    assert plan.floor_bytes <= plan.minimum_budget_bytes <= plan.peak_bytes
    assert 0 <= plan.lower_bound_overhead <= plan.overhead and 0 <= plan.gap < 1
    assert "recompute" in plan.explain() and "overhead" in plan.summary()


def test_nothing_of_the_users_model_changes(net: Net) -> None:
    net.layers[1].requires_grad_(False)
    net.dropout.eval()
    net.layers[0].get_parameter("weight").grad = torch.ones(16, 16)
    attributes = {name: dict(vars(child)) for name, child in net.named_modules()}
    state = {key: value.clone() for key, value in net.state_dict().items()}
    versions = [p._version for p in (*net.parameters(), *net.buffers())]
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    x = X.clone()
    fitted = optimize(net, x, costs="measured")
    assert torch.equal(generator, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert torch.equal(x, X) and x.grad is None and torch.is_grad_enabled()
    for name, child in net.named_modules():
        # irc sees by this one that a submodule is called beside the plan
        now = {key: value for key, value in vars(child).items() if key != "_compiled_call_impl"}
        assert now.keys() == attributes[name].keys()
        assert all(now[key] is value for key, value in attributes[name].items())
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert versions == [p._version for p in (*net.parameters(), *net.buffers())]
    grad = net.layers[0].get_parameter("weight").grad
    assert grad is not None and torch.equal(grad, torch.ones(16, 16))
    assert [p.grad is None for p in net.parameters()].count(False) == 1
    assert all(a is b for a, b in zip(fitted.parameters(), net.parameters(), strict=True))


@pytest.mark.slow
def test_keyword_arguments(net: Net) -> None:
    kwargs = {"gain": torch.full((16,), 2.0), "power": 2}
    fitted = optimize(copy.deepcopy(net), (X,), budget="200%", example_kwargs=kwargs)
    for power in (2, 3):
        kwargs["power"] = power
        assert same(gradients(fitted, X, **kwargs), gradients(net, X, **kwargs))
    strict = optimize(copy.deepcopy(net), (X,), example_kwargs=kwargs, plans=1, strategy="eviction")
    with pytest.raises(irc.UsageError, match="IRC501"):
        strict(X, gain=kwargs["gain"], power=2)


def test_a_graph_module() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(16, 16), nn.GELU())))
    traced = fx.symbolic_trace(plain)
    fitted = optimize(traced)
    assert isinstance(fitted, fx.GraphModule)
    assert same(gradients(fitted, X), gradients(plain, X))


@pytest.mark.parametrize(
    ("costs", "source"),
    [
        ("analytic", "analytic:cpu"),
        ("h100", "analytic:h100"),
        ("measured", "profile:"),
        ("thorough", "profile:"),
    ],
)
def test_where_costs_come_from(net: Net, costs: str, source: str) -> None:
    assert optimize(net, budget="100%", costs=costs).plan.costs.startswith(source)


@pytest.mark.slow
def test_kinds_of_budgets(net: Net) -> None:
    plan = optimize(net, budget="100%").plan
    for budget, nbytes in {
        plan.baseline_peak_bytes: plan.baseline_peak_bytes,
        str(plan.baseline_peak_bytes): plan.baseline_peak_bytes,
        "4GB": 4 * 10**9,
        "4GiB": 4 << 30,
        "95%": int(0.95 * plan.baseline_peak_bytes),
    }.items():
        assert optimize(net, budget=budget).plan.budget_bytes == nbytes
    for wrong in ("4Gb", "", "0", 0, -1, 1.5, True, None, "101 potatoes"):
        with pytest.raises(irc.UsageError) as caught:
            optimize(net, budget=wrong)
        assert caught.value.code == "IRC401" and caught.value.help


@pytest.mark.slow
def test_the_minimum_of_a_refusal_is_feasible(net: Net) -> None:
    with pytest.raises(irc.BudgetError) as caught:
        optimize(net, budget=100)
    minimum = caught.value.minimum_bytes
    assert optimize(net, budget=minimum).plan.peak_bytes == minimum
    assert issubclass(irc.BudgetError, irc.IrcError) and str(minimum) in str(caught.value)


def test_plans_are_saved_and_loaded(net: Net, tmp_path: Path) -> None:
    plan: irc.Plan = optimize(net).plan
    plan.save(tmp_path / "plan.json")
    assert irc.Plan.load(tmp_path / "plan.json") == plan and plan.decisions
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["gap"] == plan.gap and [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    data["written_by"] = "someone else"
    assert irc.Plan.from_json(data) == plan
    for damaged in ("", "[]", "{}", json.dumps(data)[:-9], json.dumps({**data, "peak_bytes": True})):
        (tmp_path / "damaged.json").write_text(damaged)
        with pytest.raises(irc.UsageError) as caught:
            irc.Plan.load(tmp_path / "damaged.json")
        assert caught.value.code == "IRC402"
    with pytest.raises(irc.UsageError, match="cannot be read"):
        irc.Plan.load(tmp_path / "missing.json")
    with pytest.raises(irc.UsageError, match="cannot be written"):
        plan.save(tmp_path / "no" / "folder" / "plan.json")


def test_arguments_that_are_wrong(net: Net) -> None:
    not_a_module: Any = Net
    for model, args in ((not_a_module, X), (net, None), (net, {"x": X})):
        with pytest.raises(irc.UsageError) as caught:
            optimize(model, args)
        assert caught.value.code == "IRC406"
    for options in (
        {"strategy": "best"},
        {"time_limit": -1.0},
        {"time_limit": float("nan")},
        {"costs": "tpu"},
    ):
        with pytest.raises(irc.UsageError):
            optimize(net, **options)


def test_a_pipeline_from_python(net: Net) -> None:
    program = Program(capture(net, (X,)).graph)
    done = PassManager([Cost(profile="cpu"), PlanMemory("100%", strategy="keep-all")]).run(program)
    assert done.plan is not None and done.schedule is not None and done.plan.overhead == 0
    assert irc.passes.PassManager is PassManager


def test_an_option_with_a_new_name_is_taken_by_its_old_one_with_a_warning() -> None:
    module, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.warns(DeprecationWarning, match="same_branches= is now specialize_branches=") as caught:
        fitted = irc.optimize(module, x, "100%", costs="analytic", same_branches=True)
    assert caught[0].filename == __file__
    assert torch.equal(fitted(x), module(x))
    with pytest.warns(DeprecationWarning, match="profile=False is now costs='analytic'"):
        assert irc.optimize(module, x, "100%", profile=False).plan.costs.startswith("analytic:cpu")
