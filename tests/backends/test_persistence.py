"""Copies, pickles and checkpoints of fitted modules: they train as the original, with the plan they had."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from support.torch_cases import assert_same, fitted, image, keep_all, net, outcome, recompute_some
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import irc
from irc.backends.torch import StandaloneModule, unfitted
from irc.ir import Graph, Schedule

torch.set_num_threads(1)


def recomputing(graph: Graph) -> Schedule:
    return recompute_some(graph, 3)


def by_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def by_file(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": by_pickle,
    "torch.save": by_file,
    "deepcopy": copy.deepcopy,
}


class Tied(nn.Module):
    """Tied weights, a buffer that is not saved, a constant, an attribute, and state hooks of its own."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)
        self.note = ["kept"]
        self.loaded = 0
        self.register_load_state_dict_pre_hook(Tied._count)

    @staticmethod
    def _count(module: Any, *_: Any) -> None:
        module.loaded += 1

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.drop(self.norm(torch.tanh(self.embedding(tokens)) + self.shift))
        return self.head(h * torch.arange(4.0))


class Guarded(nn.Module):
    """Holds what no pickle holds, and says itself how it is written and read."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.stream: Any = (item for item in ())
        self.read = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "stream"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.stream = iter(())
        self.read = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


def tokens() -> tuple[Tensor, ...]:
    return (torch.tensor([1, 4, 4, 7, 9]),)


def _graph_module() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def _parametrized() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(4, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "convolutions": (net, image),
    "tied": (Tied, tokens),
    "own state": (Guarded, lambda: (torch.randn(3, 4),)),
    "fx": (_graph_module, lambda: (torch.randn(3, 4),)),
    "parametrized": (_parametrized, lambda: (torch.randn(3, 4),)),
}


def three_steps(module: nn.Module, args: Any, factory: Any) -> Iterator[dict[str, Any]]:
    optimizer = factory(module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        yield outcome(module, args, {})
        optimizer.step()


PAIRS = [(name, way) for name in CASES for way in WAYS if name != "parametrized" or way == "deepcopy"]
"""torch itself refuses to pickle parametrized modules."""


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_a_copy_trains_as_the_original_and_leaves_it_alone(name: str, way: str) -> None:
    torch.manual_seed(0)
    make, arguments = CASES[name]
    module, args = make(), arguments()
    original = copy.deepcopy(module) if name != "own state" else by_pickle(module)
    ours = fitted(module, *args, schedule=recomputing)
    twin = WAYS[way](ours)
    assert repr(twin).startswith("Fitted") and isinstance(twin, irc_base(ours))
    assert name == "fx" or isinstance(twin, type(module))
    assert program_of(twin).source == program_of(ours).source
    before = copy.deepcopy(module.state_dict())
    for factory in (lambda p: torch.optim.SGD(p, lr=0.1), torch.optim.AdamW):
        for mine, its in zip(
            three_steps(twin, args, factory), three_steps(original, args, factory), strict=True
        ):
            assert_same(mine, its)
    assert twin(*args).grad_fn.name() == "_StepBackward"
    assert_same(dict(module.state_dict()), dict(before))
    assert all(parameter.grad is None for parameter in module.parameters())
    ours(*args).sum().backward()


def program_of(module: Any) -> Any:
    (compiled,) = module.__dict__["_irc"].compiled_plans
    return compiled.program


def irc_base(module: Any) -> type:
    """What all fitted modules have in common."""
    return next(kind for kind in type(module).__mro__ if kind.__name__ == "Persistent")


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_the_plan_the_attributes_and_the_modes(way: str) -> None:
    torch.manual_seed(0)
    module = Tied()
    ours = irc.optimize(module, tokens(), "100%", costs="analytic", time_limit=1)
    ours.later = {"set on": "the fitted one"}
    ours.note.append("shared")
    del ours.loaded
    ours.eval()
    twin = WAYS[way](ours)
    assert twin.plan == ours.plan and twin.later == ours.later and twin.note == ["kept", "shared"]
    assert not hasattr(twin, "loaded") and module.loaded == 0
    assert not twin.training and not twin.drop.training and module.training
    assert twin.head.weight is twin.embedding.weight and twin.head.weight is not ours.head.weight
    assert [n for n, _ in twin.named_modules()] == [n for n, _ in module.named_modules()]
    assert twin.get_submodule("norm") is twin.norm
    again = WAYS[way](twin)
    assert torch.equal(again(*tokens()), ours(*tokens()))


@pytest.mark.parametrize("way", [by_pickle, by_file, copy.deepcopy])
def test_what_is_shared_stays_shared_within_a_copy(way: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    ours = fitted(module, x)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    saved = {
        "plain": module,
        "fitted": ours,
        "again": ours,
        "list": list(ours.parameters()),
        "opt": optimizer,
    }
    read = way(saved)
    assert read["fitted"] is read["again"]
    assert all(a is b for a, b in zip(read["fitted"].parameters(), read["plain"].parameters(), strict=True))
    assert all(a is b for a, b in zip(read["fitted"].parameters(), read["list"], strict=True))
    before = read["plain"][0].weight.detach().clone()
    read["fitted"](x).sum().backward()
    read["opt"].step()
    assert not torch.equal(read["plain"][0].weight, before)
    read["fitted"][0].bias = nn.Parameter(torch.full((4,), 9.0))
    assert torch.equal(read["plain"](x), read["fitted"](x))


def test_a_module_that_holds_the_fitted_one_comes_back_as_a_cycle() -> None:
    x = torch.randn(3, 4)
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module[1].owner = []
    ours = fitted(module, x)
    module[1].owner.append(ours)
    for way in WAYS.values():
        twin = way(ours)
        assert twin[1].owner[0] is twin
        twin(x).sum().backward()


def test_a_shallow_copy_shares_everything_but_its_own_attributes() -> None:
    x = torch.randn(3, 4)
    ours = fitted(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x)
    twin: Any = copy.copy(ours)
    assert type(twin) is type(ours) and twin[0] is ours[0]  # pyright: ignore[reportIndexIssue]
    twin.training = False
    assert ours.training and ours(x).grad_fn.name() == "_StepBackward"
    assert twin(x).grad_fn.name() != "_StepBackward"
    twin.training = True
    twin(x).sum().backward()
    assert ours[0].weight.grad is not None  # pyright: ignore[reportIndexIssue]


def test_an_average_of_weights_is_kept_of_a_fitted_module() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    original = copy.deepcopy(module)
    averages: list[AveragedModel] = []
    for model in (original, fitted(module, x)):
        averages.append(AveragedModel(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            averages[-1].update_parameters(model)
    assert_same(dict(averages[1].state_dict()), dict(averages[0].state_dict()))


# ---------------------------------------------------------------------- released gradients


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"optimizer_in_backward": momentum}, {"accumulate_gradients": True}])
def test_a_copy_goes_on_with_the_optimizers_it_had(way: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, x = Guarded(), torch.randn(3, 4)
    ours = irc.optimize(module, x, "100%", costs="analytic", time_limit=1, **options)
    ours(x).square().sum().backward()
    ours.zero_grad()
    twin = WAYS[way](ours)
    for model in (ours, twin):
        model(x).square().sum().backward()
    assert_same(dict(twin.state_dict()), dict(ours.state_dict()))
    assert twin.lin.weight is not ours.lin.weight
    if "optimizer_in_backward" in options:
        for name, optimizer in twin.irc_optimizers.items():
            assert optimizer is not ours.irc_optimizers[name]
            assert optimizer.param_groups[0]["params"][0] is twin.get_parameter(name)
        with pytest.raises(irc.UnsupportedError, match="IRC512"):
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    else:
        assert torch.equal(twin.lin.weight.grad, ours.lin.weight.grad)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_without_its_model_is_copied_too(way: str) -> None:
    module, x = Guarded(), torch.randn(3, 4)
    ours = irc.optimize(module, x, "100%", costs="analytic", time_limit=1, accumulate_gradients=True)
    (compiled,) = ours.__dict__["_irc"].compiled_plans
    alone = StandaloneModule(
        compiled.program, dict(module.state_dict()), compiled.signature.deliveries, ours.plan
    )
    twin = WAYS[way](alone)
    assert_same(outcome(twin, (x,), {}), outcome(alone, (x,), {}))


# ---------------------------------------------------------------------- state_dict


def test_the_state_is_the_original_s_and_loads_strictly_both_ways() -> None:
    torch.manual_seed(0)
    original, ours = Tied(), cast(Any, fitted(Tied(), *tokens()))
    mine, its = ours.state_dict(), original.state_dict()
    assert list(mine) == list(its) and [t.shape for t in mine.values()] == [t.shape for t in its.values()]
    assert not ours.load_state_dict(its).missing_keys
    assert_same(outcome(ours, tokens(), {}), outcome(original, tokens(), {}))
    with torch.no_grad():
        ours.norm.weight.mul_(2.0)
    assert not original.load_state_dict(ours.state_dict()).unexpected_keys
    assert_same(outcome(original, tokens(), {}), outcome(ours, tokens(), {}))
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.bias"):
        ours.load_state_dict({k: v for k, v in its.items() if k != "norm.bias"})
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    original.load_state_dict(torch.load(file, weights_only=True))


def test_assigned_state_is_what_the_next_step_trains() -> None:
    torch.manual_seed(0)
    original, ours = Tied(), irc.optimize(Tied(), tokens(), "200%", costs="analytic", time_limit=1)
    state = {
        name: torch.rand_like(t) if t.is_floating_point() else t for name, t in ours.state_dict().items()
    }
    for model in (original, ours):
        model.load_state_dict(copy.deepcopy(state), assign=True)  # which unties, as torch documents
    assert ours.get_parameter("head.weight") is not ours.get_parameter("embedding.weight")
    assert_same(outcome(ours, tokens(), {}), outcome(original, tokens(), {}))


def test_state_hooks_run_as_the_original_s_also_when_the_original_is_gone() -> None:
    ours = fitted(Tied(), *tokens())
    gc.collect()
    ours.load_state_dict(Tied().state_dict())
    twins = [way(ours) for way in WAYS.values()]
    gc.collect()
    for twin in twins:
        twin.load_state_dict(ours.state_dict())
    seen: list[str] = []
    ours.register_state_dict_post_hook(lambda module, state, *_: state.update(extra=torch.ones(1)))
    ours.register_state_dict_pre_hook(lambda module, *_: seen.append(type(module).__name__))
    ours.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    state = ours.state_dict()
    assert "extra" in state
    del state["extra"]
    ours.load_state_dict(state)
    assert seen == ["Tied", "loaded"]


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_was_changed_is_copied_and_refused_at_its_step_as_before(way: str) -> None:
    x = torch.randn(3, 4)
    ours: Any = fitted(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), x)
    ours[1].p = 0.25
    twin = WAYS[way](ours)
    for model in (ours, twin):
        assert torch.equal(model.eval()(x), ours.eval()(x))
        with pytest.raises(irc.UsageError, match="IRC507"):
            model.train()(x)
    ours[1].p = 0.5
    WAYS[way](ours)(x).sum().backward()


def test_a_pickle_of_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    written = pickle.dumps(fitted(nn.Linear(4, 4), torch.randn(3, 4)))
    monkeypatch.setattr("irc.backends.torch.persistence._FORMAT", 4)
    with pytest.raises(irc.UsageError, match=r"IRC530.*format 3; this version of irc reads 4") as raised:
        pickle.loads(written)
    assert raised.value.help is not None and "state_dict" in raised.value.help


def test_a_module_whose_class_was_changed_is_not_copied() -> None:
    ours = fitted(nn.Linear(4, 4), torch.randn(3, 4))
    parametrize.register_parametrization(ours, "weight", nn.Tanh())
    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(irc.UsageError, match=r"IRC530.*class was changed to ParametrizedLinear"):
            way(ours)


def test_a_class_that_no_file_holds_is_refused_as_the_original_s_is() -> None:
    class Local(nn.Linear):
        pass

    ours = fitted(Local(4, 4), torch.randn(3, 4))
    for module in (Local(4, 4), ours):
        with pytest.raises((pickle.PicklingError, AttributeError), match="Local"):
            pickle.dumps(module)


def test_an_edited_graph_module_is_refused() -> None:
    ours: Any = fitted(_graph_module(), torch.randn(3, 4))
    with pytest.raises(irc.UsageError, match=r"IRC507.*GraphModule was edited"):
        ours.recompile()


def test_errors_come_back_from_other_processes() -> None:
    error = irc.BudgetError("IRC204", "too much", minimum_bytes=7, help="more")
    read = by_pickle(error)
    assert type(read) is irc.BudgetError and read.minimum_bytes == 7 and str(read) == str(error)


# ---------------------------------------------------------------------- planning again


def test_a_fitted_module_is_planned_again_from_what_it_was_made_of() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)), torch.randn(3, 4)
    once = irc.optimize(module, x, "100%", costs="analytic", time_limit=1, plans=1)
    once[2].p = 0.25
    once.mark = 7
    with pytest.raises(irc.UsageError, match="IRC507"):
        once(x)
    twice = irc.optimize(once, x, "100%", costs="analytic", time_limit=1)
    assert repr(twice).startswith("FittedSequential(") and twice.mark == 7
    assert_same(outcome(twice, (x,), {}), outcome(module, (x,), {}))
    plain = unfitted(twice)
    assert type(plain) is nn.Sequential and plain[0] is module[0] and unfitted(plain) is plain
    assert by_pickle(twice).mark == 7


def test_the_original_may_be_pruned_afterwards_and_the_copy_knows() -> None:
    x = torch.randn(3, 4)
    ours: Any = fitted(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x, schedule=keep_all)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.spectral_norm(ours[0])
    for model in (ours, by_pickle(ours)):
        with pytest.raises(irc.UsageError, match="IRC507"):
            model(x)
