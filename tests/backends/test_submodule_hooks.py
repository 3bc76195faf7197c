"""Hooks on submodules: traced where they compute, refused where they act, and compared in each call."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import assert_same
from torch import Tensor, nn

import irc
from irc.backends.torch.guards import settings
from irc.backends.torch.guards.hook_state import HookState
from irc.torch_support.module_hooks import HOOKS, HookStandIn

torch.set_num_threads(1)

Calls = list[Any]
_seen: dict[str, Any] = {}


class Pair(nn.Module):
    """Two results that share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return self.left(y), self.right(y)


class Steered:
    """Adds a vector to what a layer returns."""

    def __init__(self) -> None:
        self.scale, self.vector = 2.0, torch.linspace(-1, 1, 4)

    def __call__(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return result * self.scale + self.vector

    def method(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return self(module, args, result)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


def planned(module: nn.Module, *args: Tensor, **options: Any) -> Any:
    return irc.optimize(module, args, "1MiB", costs="analytic", time_limit=1, **options)


def step(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    module.zero_grad()
    x.grad = None
    y = module(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def _scaled(module: nn.Module, args: Any, result: Tensor, by: float = 2.0) -> Tensor:
    return result * by


def _written(module: nn.Module, args: Any, result: Tensor) -> None:
    result.mul_(2)


COMPUTING: dict[str, Callable[[Any], Any]] = {
    "forward": lambda m: m[1].register_forward_hook(_scaled),
    "forward, first": lambda m: (
        m[1].register_forward_hook(lambda module, args, y: y + 1),
        m[1].register_forward_hook(_scaled, prepend=True),
    ),
    "partial": lambda m: m[1].register_forward_hook(functools.partial(_scaled, by=3.0)),
    "object": lambda m: m[1].register_forward_hook(Steered()),
    "method": lambda m: m[1].register_forward_hook(Steered().method),
    "written": lambda m: m[1][0].register_forward_hook(_written),
    "pre": lambda m: m[1][1].register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "keywords": lambda m: m[1].register_forward_hook(lambda module, args, kw, y: y + 0.5, with_kwargs=True),
    "backward": lambda m: m[1][1].register_full_backward_hook(lambda module, g, h: (g[0] * 0.5 + h[0],)),
    "backward pre": lambda m: m[1].register_full_backward_pre_hook(lambda module, g: (g[0].clamp(-1, 1),)),
    "first layer": lambda m: m[0].register_full_backward_hook(lambda module, g, h: (g[0] * 2,)),
    "last layer": lambda m: m[2].register_full_backward_hook(lambda module, g, h: (g[0] + 1,)),
    "random": lambda m: m[1].register_forward_hook(lambda module, args, y: y * torch.rand(4)),
}


@pytest.mark.parametrize("kind", COMPUTING)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_that_compute_give_the_numbers_of_eager(kind: str, when: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    steps: list[list[Any]] = []
    for is_planned in (False, True):
        module = model()
        if when == "before":
            COMPUTING[kind](module)
        if is_planned:
            module = planned(module, x)
        if when == "after":
            COMPUTING[kind](module)
        torch.manual_seed(1)
        steps.append([step(module, x) for _ in range(3)])
        if is_planned:
            assert len(module.irc_plans) == (2 if when == "after" else 1)
            assert not module.irc_plans[0].plan.roundings
    for mine, its in zip(*steps, strict=True):
        assert_same(mine, its)


def test_a_hook_that_is_added_or_removed_is_noticed_each_time() -> None:
    x, original = torch.randn(3, 4), model()
    ours = planned(copy.deepcopy(original), x)
    for count in (2, 2, 2):
        handles = [module[1].register_forward_hook(_scaled) for module in (original, ours)]
        assert_same(step(ours, x), step(original, x))
        for handle in handles:
            handle.remove()
        assert_same(step(ours, x), step(original, x))
        assert len(ours.irc_plans) == count  # the plans are kept


def test_what_a_hook_holds_may_change() -> None:
    x, original, steered = torch.randn(3, 4), model(), Steered()
    original[1].register_forward_hook(steered.method)
    ours = planned(copy.deepcopy(original), x)
    ours[1]._forward_hooks.clear()
    ours[1].register_forward_hook(steered.method)
    assert_same(step(ours, x), step(original, x))
    steered.scale = 3.0
    assert_same(step(ours, x), step(original, x))
    steered.vector.mul_(2)
    assert_same(step(ours, x), step(original, x))
    count = len(ours.irc_plans)
    steered.vector = torch.ones(4)
    assert_same(step(ours, x), step(original, x))
    assert len(ours.irc_plans) == count  # it is looked up
    steered.vector = torch.ones(1)
    assert_same(step(ours, x), step(original, x))


def test_what_a_hook_closes_over_may_change() -> None:
    x, original, scale = torch.randn(3, 4), model(), 2.0
    original[1].register_forward_hook(lambda module, args, y: y * scale)
    ours = planned(copy.deepcopy(original), x)
    for value in (2.0, 3.0, 2.0):
        scale = value
        assert_same(step(ours, x), step(original, x))
    assert len(ours.irc_plans) == 2


class Adapter(nn.Module):
    """A hook that is a module, with settings and a buffer."""

    vector: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = 2.0, nn.Dropout(0.5)
        self.register_buffer("vector", torch.linspace(-1, 1, 4))

    def forward(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return self.drop(result) * self.scale + self.vector


class Slotted:
    """Holds a vector in a slot."""

    __slots__ = ("vector",)

    def __init__(self) -> None:
        self.vector = torch.ones(4)


class Strategy:
    """Multiplies."""

    by = 2.0

    def on(self, y: Tensor) -> Tensor:
        return y * self.by


class Adding(Strategy):
    """Adds."""

    def on(self, y: Tensor) -> Tensor:
        return y + self.by


def _deep(m: Any) -> Callable[[], None]:
    held = types.SimpleNamespace(a={"b": {"c": [2.0]}})
    m[1].register_forward_hook(lambda module, args, y: y * held.a["b"]["c"][0])
    return lambda: held.a["b"]["c"].__setitem__(0, 3.0)


def _deep_tensor(m: Any) -> Callable[[], None]:
    held = types.SimpleNamespace(a=[{"b": [torch.ones(4)]}])
    m[1].register_forward_hook(lambda module, args, y: y + held.a[0]["b"][0])
    return lambda: held.a[0]["b"].__setitem__(0, torch.full((4,), 7.0))


def _slot(m: Any) -> Callable[[], None]:
    held = Slotted()
    m[1].register_forward_hook(lambda module, args, y: y + held.vector)
    return lambda: setattr(held, "vector", torch.full((4,), 7.0))


def _wrapped_twice(m: Any) -> Callable[[], None]:
    held = {"scale": 2.0}

    def wrapped(function: Any) -> Any:
        return functools.wraps(function)(lambda *args: function(*args))

    m[1].register_forward_hook(wrapped(wrapped(lambda module, args, y: y * held["scale"])))
    return lambda: held.update(scale=3.0)


def _of_function(m: Any) -> Callable[[], None]:
    def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y * vars(hook)["scale"]

    vars(hook)["scale"] = 2.0
    m[1].register_forward_hook(hook)
    return lambda: vars(hook).update(scale=3.0)


def _code_of_function(m: Any) -> Callable[[], None]:
    def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y * 2

    def replacement(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y * 3

    m[1].register_forward_hook(hook)
    return lambda: setattr(hook, "__code__", replacement.__code__)


def _keyword_default(m: Any) -> Callable[[], None]:
    def hook(module: nn.Module, args: Any, y: Tensor, *, by: float = 2.0) -> Tensor:
        return y * by

    m[1].register_forward_hook(hook)
    return lambda: setattr(hook, "__kwdefaults__", {"by": 3.0})


def _strategy(m: Any) -> Callable[[], None]:
    held = types.SimpleNamespace(strategy=Strategy())
    m[1].register_forward_hook(lambda module, args, y: held.strategy.on(y))
    return lambda: setattr(held, "strategy", Adding())


def _nesting(m: Any) -> Callable[[], None]:
    held = [[1.0], [2.0, 3.0]]
    m[1].register_forward_hook(lambda module, args, y: y * held[1][0])
    return lambda: held.__setitem__(slice(None), [[1.0, 2.0], [3.0]])


def _module(change: Callable[[Adapter], None], *, is_hook: bool) -> Callable[[Any], Callable[[], None]]:
    def register(m: Any) -> Callable[[], None]:
        adapter = Adapter()
        m[1].register_forward_hook(adapter if is_hook else lambda *args: adapter(*args))
        return lambda: change(adapter)

    return register


def _other_module(m: Any) -> Callable[[], None]:
    held = {"by": nn.Dropout(0.5)}
    m[1].register_forward_hook(lambda module, args, y: held["by"](y))
    return lambda: held.update(by=nn.Dropout(0.25))


def _replace_buffer(adapter: Adapter) -> None:
    adapter.vector = torch.full((4,), 7.0)


def _drop_less(adapter: Adapter) -> None:
    adapter.drop.p = 0.25


def _scale(adapter: Adapter) -> None:
    adapter.scale = 3.0


def _root(m: Any) -> Callable[[], None]:
    m.scale = 2.0
    m[1].register_forward_hook(lambda module, args, y: y * m.scale)
    return lambda: setattr(m, "scale", 3.0)


def _buffer_in_backward(m: Any) -> Callable[[], None]:
    m.register_buffer("q", torch.ones(4))
    m[2].register_full_backward_hook(lambda module, g, h: (g[0] * m.q,))
    return lambda: setattr(m, "q", torch.full((4,), 7.0))


def _loaded_in_backward(m: Any) -> Callable[[], None]:
    m.register_buffer("q", torch.ones(4))
    m[2].register_full_backward_hook(lambda module, g, h: (g[0] * m.q,))
    loaded = {"q": torch.full((4,), 7.0)}
    return lambda: m.load_state_dict({**m.state_dict(), **loaded}, assign=True)


CHANGING: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "deep": _deep,
    "deep tensor": _deep_tensor,
    "slot": _slot,
    "wrapped twice": _wrapped_twice,
    "attribute of a function": _of_function,
    "code of a function": _code_of_function,
    "keyword default": _keyword_default,
    "strategy": _strategy,
    "nesting": _nesting,
    "setting of a module": _module(_scale, is_hook=True),
    "buffer of a module": _module(_replace_buffer, is_hook=True),
    "setting of a module within": _module(_drop_less, is_hook=False),
    "another module": _other_module,
    "attribute of the root": _root,
    "buffer in backward": _buffer_in_backward,
    "buffer in backward, loaded": _loaded_in_backward,
}


@pytest.mark.parametrize("kind", CHANGING)
def test_a_change_of_what_a_hook_holds_is_noticed(kind: str) -> None:
    x = torch.randn(3, 4)
    steps: list[list[Any]] = []
    for is_planned in (False, True):
        module = model()
        change = CHANGING[kind](module)
        ours = planned(module, x) if is_planned else module
        torch.manual_seed(1)
        steps.append([step(ours, x), step(ours, x)])
        if is_planned:
            assert len(ours.irc_plans) == 1
        change()
        steps[-1] += [step(ours, x), step(ours, x)]
    for mine, its in zip(*steps, strict=True):
        assert_same(mine, its)


@pytest.mark.parametrize(
    "held", [list(range(1500)), [[[[[[[2.0]]]]]]], {torch.ones(4)}, torch.distributions.Normal(0.0, 1.0)]
)
def test_a_hook_that_holds_what_cannot_be_compared_is_refused(held: Any) -> None:
    module, x, scale = model(), torch.randn(3, 4), [2.0]

    def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y * scale[0] if held else y

    handle = module[1].register_forward_hook(hook)
    with pytest.raises(irc.UnsupportedError, match=r"(?s)IRC505.*submodule '1'.*hold only numbers"):
        planned(module, x)
    handle.remove()
    ours = planned(module, x)
    module[1].register_forward_hook(hook)
    with pytest.raises(irc.UnsupportedError, match=r"(?s)IRC505.*submodule '1'.*hold only numbers"):
        step(ours, x)


def test_hooks_of_one_controller_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    parts_of = vars(settings)["_all_parts"]

    def counting(value: Any) -> Any:
        opened.append(value)
        return parts_of(value)

    counts: list[int] = []
    monkeypatch.setattr(settings, "_all_parts", counting)
    for size in (8, 16):
        layers = nn.Sequential(*(nn.Identity() for _ in range(size)))
        steered: Any = Steered()
        steered.caches = {place: {"a": 1.0} for place in range(size)}
        for layer in layers:
            layer.register_forward_hook(steered.method)
        opened.clear()
        state = HookState(layers, [str(place) for place in range(size)], list(layers))
        assert state.is_same()
        counts.append(len(opened))
    assert counts[1] < 2.5 * counts[0]


def test_a_hook_that_reads_what_the_forward_writes_is_refused_in_backward() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    norm: Any = module[1]
    handle = module[2].register_full_backward_hook(lambda module, g, h: (g[0] * norm.running_var,))
    with pytest.raises(irc.UnsupportedError, match=r"IRC338.*buffer 1\.running_var in backward"):
        planned(module, torch.randn(3, 4))
    norm.register_buffer("kept", torch.ones(4))
    handle.remove()
    module[2].register_full_backward_hook(lambda module, g, h: (g[0] * norm.kept,))
    original, x = copy.deepcopy(module), torch.randn(3, 4)
    assert_same(step(planned(module, x), x), step(original, x))


def test_a_hook_that_removes_itself_is_refused() -> None:
    module, handles = model(), list[Any]()

    def once(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        handles[0].remove()
        return y * 3

    handles.append(module[1].register_forward_hook(once))
    with pytest.raises(irc.UnsupportedError, match=r"IRC338.*1\._forward_hooks"):
        planned(module, torch.randn(3, 4))
    assert len(module[1]._forward_hooks) == 1


def _keeping(m: Any) -> None:
    kept: dict[str, Tensor] = {}

    def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        kept["y"] = result.detach()
        return result * 2

    m[1].register_forward_hook(hook)


def _counting(m: Any) -> None:
    calls = 0

    def hook(module: nn.Module, gradients: Any, others: Any) -> Any:
        nonlocal calls
        calls += 1
        assert calls <= 3
        return (gradients[0] * 2,)

    m[1].register_full_backward_hook(hook)


def _keeping_gradient(module: nn.Module, gradients: Any, others: Any) -> Any:
    _seen["gradient"] = others[0]
    return (gradients[0] * 2,)


def _assigning(module: Any, gradients: Any, others: Any) -> Any:
    module.kept = others[0]
    return (gradients[0] * 2,)


ACTING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "keeps": (_keeping, r"IRC338.*hook of submodule '1' \(forward hooks.*\) changes .*kept\['y'\]"),
    "counts in backward": (_counting, r"IRC338.*\(backward hooks: .*changes Python state: calls"),
    "keeps in backward": (
        lambda m: m[1].register_full_backward_hook(_keeping_gradient),
        r"IRC338.*_seen\['gradient'\]",
    ),
    "assigns in backward": (
        lambda m: m[1].register_full_backward_hook(_assigning),
        r"IRC338.*an attribute of its module",
    ),
    "acts in backward": (
        lambda m: m[1].register_full_backward_hook(lambda module, g, h: None),
        r"IRC505.*'1' has a hook \(backward hooks: .*\) that returns nothing",
    ),
    "acts before backward": (
        lambda m: m[1].register_full_backward_pre_hook(lambda module, g: None),
        r"IRC505.*\(backward pre hooks: .*\) that returns nothing",
    ),
    "legacy": (lambda m: m[1].register_backward_hook(lambda module, g, h: None), "IRC532.*submodule '1'"),
}


@pytest.mark.parametrize("kind", ACTING)
def test_hooks_that_act_are_refused_by_name_and_changed_nothing(kind: str) -> None:
    module, x = model(), torch.randn(3, 4)
    register, message = ACTING[kind]
    register(module)
    _seen.clear()
    with pytest.raises(irc.UnsupportedError, match=rf"(?s){message}"):
        planned(module, x)
    assert not _seen
    assert not any(
        isinstance(hook, HookStandIn) for table in HOOKS for hook in vars(module[1])[table].values()
    )


class Watching(nn.Module):
    """Keeps what its layers return, by a method and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_forward_hook(self.keep)
        self.second.register_forward_hook(_keep_there)

    def keep(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.kept = result

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def _keep_there(module: Any, args: Any, result: Tensor) -> None:
    module.kept = [result.detach(), result.shape]


def test_what_a_hook_leaves_in_attributes_of_modules_is_there_after_each_step() -> None:
    torch.manual_seed(0)
    original: Any = nn.Sequential(Watching(), nn.Linear(4, 4))
    ours: Any = planned(copy.deepcopy(original), torch.randn(3, 4))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 4)
        left: list[Any] = []
        for trained in (original, ours):
            trained.zero_grad()
            y = trained(x)
            (y.square().sum() + trained[0].kept.square().sum()).backward()
            left.append([*trained[0].second.kept, trained[0].kept.detach(), trained[0].first.weight.grad])
        assert torch.equal(left[0][0], left[1][0]) and left[0][1] == left[1][1]
        assert all(map(torch.equal, left[0][2:], left[1][2:]))


def _one(module: nn.Module, gradients: Any, others: Any) -> Any:
    return (gradients[0] + 1,)


class HookedPair(Pair):
    """The same with a hook on a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        left = self.left(y)
        left.register_hook(lambda gradient: gradient + 1)
        return left, self.right(y)


class TracedPair(Pair):
    """The same with a hook that adds what the forward computes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        left, added = self.left(y), x.detach().mean(0)
        left.register_hook(lambda gradient: gradient + added)
        return left, self.right(y)


PAIRS = {"module": Pair, "tensor": HookedPair, "traced": TracedPair}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_hook_that_eager_would_not_call_is_refused_in_backward(kind: str) -> None:
    torch.manual_seed(0)
    module, x = PAIRS[kind](), torch.randn(3, 4)
    if kind == "module":
        module.left.register_full_backward_hook(_one)
    original = copy.deepcopy(module)
    ours = planned(module, x)
    with pytest.raises(irc.UnsupportedError, match=r"(?s)IRC537.*hook on gradients.*give irc.optimize loss="):
        ours(x)[1].sum().backward()
    right: Any = planned(copy.deepcopy(original), x, loss=lambda pair: pair[1].sum())
    for trained in (original, right):
        trained(x)[1].sum().backward()
    assert_same(*({n: p.grad for n, p in m.named_parameters()} for m in (right, original)))
    for trained in (original, ours):
        trained.zero_grad()
        torch.stack(trained(x)).square().sum().backward()
    assert_same(*({n: p.grad for n, p in m.named_parameters()} for m in (ours, original)))


def test_a_measured_peak_is_the_predicted_one() -> None:
    module, x = model(), torch.randn(64, 4, requires_grad=True)
    for register in COMPUTING.values():
        register(module)
    ours = planned(module, x, loss=lambda y: y.square().sum())
    plan = ours.irc_plan
    ours(x).square().sum().backward()
    peak = irc.measured_peak_bytes(ours, (x,), loss=lambda y: y.square().sum())
    assert peak <= plan.peak_bytes
