"""Settings that change after planning: seen in containers, objects, classes and torch, and planned anew."""

from __future__ import annotations

import collections
import copy
import functools
import logging
import pickle
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.foreign import Lazy
from support.torch_cases import assert_same, outcome
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import irc
from irc.backends.torch.guards.settings import Watch

torch.set_num_threads(1)


@dataclass
class Config:
    """What a model is configured with."""

    scale: float = 1.0
    names: list[str] = field(default_factory=lambda: ["one"])


class Pair:
    """Two numbers in slots."""

    __slots__ = ("first", "second")

    def __init__(self, first: float, second: float) -> None:
        self.first, self.second = first, second

    def total(self) -> float:
        return self.first + self.second


class Settled(nn.Module):
    """Reads settings of every kind."""

    factor = 1.0
    factors: dict[str, float] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.config = Config()
        self.weights = {"a": {"b": 1.0}}
        self.list: Any = [1.0, (2.0, [3.0])]
        self.set = {"one"}
        self.queue = collections.deque([1.0])
        self.array = np.ones(2)
        self.pair = Pair(1.0, 2.0)
        self.total: Any = self.pair.total
        self.act: Any = functools.partial(functional.leaky_relu, negative_slope=0.1)
        self.unread: Any = logging.getLogger("irc.unread")
        self.bias = torch.ones(4)
        self.biases = {"first": [torch.ones(4)]}

    def forward(self, x: Tensor) -> Tensor:
        scale = self.config.scale * len(self.config.names) * self.weights["a"]["b"] * float(self.array[0])
        scale *= self.list[0] * self.list[1][1][0] * len(self.set) * self.queue[0] * self.total()
        scale *= self.factor * self.factors.get("a", 1.0) * torch.get_default_dtype().itemsize
        return self.act(self.lin(x)) * scale + self.bias * self.biases["first"][0]


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    Settled.factor = 1.0
    Settled.factors.clear()
    torch.set_default_dtype(torch.float32)


def planned(module: nn.Module, x: Tensor, **options: Any) -> Any:
    options = {"costs": "analytic", "time_limit": 5, "strategy": "keep-all", "plans": 20, **options}
    return irc.optimize(module, (x,), "1MiB", **options)


def make(is_part: bool) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Settled()) if is_part else Settled()


def pair(is_part: bool, x: Tensor, **options: Any) -> tuple[Any, Any]:
    return planned(make(is_part), x, **options), make(is_part)


def settled(module: Any) -> Any:
    return module[0] if isinstance(module, nn.Sequential) else module


def assert_steps_agree(ours: nn.Module, original: nn.Module, x: Tensor) -> None:
    for module in (ours, original):
        module.zero_grad()
    assert_same(outcome(ours, (x,), {}), outcome(original, (x,), {}))


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute of a dataclass": lambda m: setattr(m.config, "scale", 2.0),
    "list of a dataclass": lambda m: m.config.names.append("two"),
    "another dataclass": lambda m: setattr(m, "config", Config(3.0)),
    "nested dict": lambda m: m.weights["a"].update(b=2.0),
    "list": lambda m: m.list.__setitem__(0, 2.0),
    "list in a tuple": lambda m: m.list[1][1].__setitem__(0, 5.0),
    "another list": lambda m: setattr(m, "list", [1.0, (2.0, [7.0])]),
    "set": lambda m: m.set.add("two"),
    "deque": lambda m: m.queue.appendleft(2.0),
    "array": lambda m: m.array.__setitem__(0, 2.0),
    "slot of a method's object": lambda m: setattr(m.pair, "second", 3.0),
    "another method": lambda m: setattr(m, "total", Pair(4.0, 5.0).total),
    "partial": lambda m: setattr(m, "act", functools.partial(functional.leaky_relu, negative_slope=0.9)),
    "keywords of a partial": lambda m: m.act.keywords.update(negative_slope=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_part", [False, True], ids=["root", "part"])
def test_settings_that_change_in_whatever_holds_them_are_planned_anew(is_part: bool, x: Tensor) -> None:
    ours, original = pair(is_part, x)
    for name, change in CHANGES.items():
        seen = len(ours.irc_plans)
        for module in (ours, original):
            change(settled(module))
        assert_steps_agree(ours, original, x)
        assert len(ours.irc_plans) == seen + 1, name
        assert_steps_agree(ours, original, x)
        assert len(ours.irc_plans) == seen + 1, name
    for module in (ours, original):
        settled(module).act.keywords.update(negative_slope=0.9)  # as it was: its plan is there
    assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == len(CHANGES) + 1


@pytest.mark.parametrize("is_part", [False, True], ids=["root", "part"])
def test_settings_that_are_replaced_by_their_equals_need_no_plan(is_part: bool, x: Tensor) -> None:
    ours, original = pair(is_part, x)
    module = settled(ours)
    old = weakref.ref(module.config)
    module.config, module.list, module.array = Config(), [1.0, (2.0, [3.0])], np.ones(2)
    module.total = Pair(1.0, 2.0).total
    module.unread.handlers.append(logging.NullHandler())
    for _ in range(2):
        assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == 1
    assert old() is None or not is_part, "the original keeps the root's"
    for each in (ours, original):  # what replaced them is looked at from now on
        settled(each).config.scale = 2.0
    assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (CHANGES["attribute of a dataclass"], r"Config\(scale=1\.0\).* is now .*Config\(scale=2\.0\)"),
        (CHANGES["nested dict"], r"dict\(a=dict\(b=1\.0\)\).* is now .*dict\(a=dict\(b=2\.0\)\)"),
        (
            lambda m: setattr(m, "config", None),
            r"Config\(scale=1\.0, names=list\(0='one'\)\).* is now .*None",
        ),
    ],
)
@pytest.mark.parametrize("is_part", [False, True], ids=["root", "part"])
def test_with_one_plan_such_changes_are_refused_by_name(
    change: Callable[[Any], object], message: str, is_part: bool, x: Tensor
) -> None:
    ours, _ = pair(is_part, x, plans=1)
    change(settled(ours))
    where = "setting of submodule '0'" if is_part else "attribute '(config|weights)'"
    with pytest.raises(irc.UsageError, match=f"IRC507.*{where}.*{message}"):
        ours(x)


@pytest.mark.parametrize("is_part", [False, True], ids=["root", "part"])
def test_attributes_of_classes_and_the_default_type_are_planned_anew(is_part: bool, x: Tensor) -> None:
    ours, original = pair(is_part, x)
    Settled.factor = 2.0
    assert_steps_agree(ours, original, x)
    Settled.factors["a"] = 3.0
    assert_steps_agree(ours, original, x)
    torch.set_default_dtype(torch.float64)
    assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == 4
    reasons = [call for call, _ in ours.irc_plans]
    assert "setting of the code" in reasons[0] and "torch.get_default_dtype()': torch.float64" in reasons[0]
    assert "Settled.factor': 2.0" in reasons[2]


# ---------------------------------------------------------------------- tensors that are no buffers


@pytest.mark.parametrize("is_part", [False, True], ids=["root", "part"])
def test_a_tensor_that_is_an_attribute_is_looked_up_in_each_step(is_part: bool, x: Tensor) -> None:
    ours, original = pair(is_part, x)
    changes: list[Callable[[Any], object]] = [
        lambda m: m.bias.mul_(2),
        lambda m: setattr(m, "bias", torch.full((4,), 3.0)),
        lambda m: m.biases["first"].__setitem__(0, torch.full((4,), 4.0)),
        lambda m: m.biases["first"][0].add_(1),
    ]
    for change in changes:
        for module in (ours, original):
            change(settled(module))
        assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == 1
    for module in (ours, original):
        settled(module).bias = torch.full((3, 1), 5.0)
    assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == 2


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("is_part", [False, True], ids=["root", "part"])
def test_a_copy_has_settings_and_tensors_of_its_own(
    way: Callable[[Any], Any], is_part: bool, x: Tensor
) -> None:
    ours, original = pair(is_part, x)
    twin, its = way(ours), copy.deepcopy(original)
    assert_steps_agree(twin, its, x)
    assert len(twin.irc_plans) == 1
    for module in (ours, original):
        settled(module).bias.mul_(2)
        settled(module).biases["first"][0].mul_(3)
    for module in (twin, its):
        settled(module).bias.mul_(5)
        settled(module).config.scale = 2.0
    assert_steps_agree(twin, its, x)
    assert_steps_agree(ours, original, x)
    assert (len(twin.irc_plans), len(ours.irc_plans)) == (2, 1)


class Written(nn.Module):
    """Adds an attribute, or a tensor of the same numbers that its code writes down."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.is_written = False

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + (torch.tensor([1.0, 2.0, 3.0, 4.0]) if self.is_written else self.bias)


def test_what_code_writes_down_is_not_shared_with_an_attribute(x: Tensor) -> None:
    module: Any = nn.Sequential(Written())
    original: Any = copy.deepcopy(module)
    ours = planned(module, x)
    for each in (ours, original):
        each[0].is_written = True
    assert_steps_agree(ours, original, x)
    for each in (ours, original):
        each[0].bias.zero_()
    assert_steps_agree(ours, original, x)


# ---------------------------------------------------------------------- libraries


@pytest.mark.slow
def test_a_configuration_of_transformers_is_looked_into() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=8,
        vocab_size=11,
        n_positions=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    module: Any = GPT2LMHeadModel(config).train()
    tokens = torch.randint(11, (2, 4))
    ours: Any = irc.optimize(
        module, (), "4MiB", example_kwargs={"input_ids": tokens}, costs="analytic", strategy="keep-all"
    )
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
    ours(input_ids=tokens)
    assert len(ours.irc_plans) == 1, "what is written when a model is saved is no setting"
    ours.config.output_hidden_states = True
    assert len(ours(input_ids=tokens).hidden_states) == 2 and len(ours.irc_plans) == 2
    ours.config.output_hidden_states = False
    assert ours(input_ids=tokens).hidden_states is None and len(ours.irc_plans) == 2


def test_what_libraries_write_when_they_save_a_model_is_no_setting(x: Tensor) -> None:
    kinds: list[tuple[str, Any, str]] = [
        ("diffusers", collections.OrderedDict, "_class_name"),
        ("peft", dict, "base_model_name_or_path"),
    ]
    for library, base, name in kinds:
        kind: Any = type("Saved", (base,), {"__module__": f"{library}.configuration"})
        module: Any = nn.Sequential(nn.Linear(4, 4))
        module.config = kind(scale=1.0)
        module.forward = lambda x, module=module: module[0](x) * module.config["scale"]
        ours = irc.optimize(module, (x,), "1MiB", costs="analytic", strategy="keep-all")
        module.config[name] = "written"
        ours(x)
        assert len(ours.irc_plans) == 1
        module.config["scale"] = 2.0
        assert torch.equal(ours(x), module(x)) and len(ours.irc_plans) == 2


def test_parametrized_tensors_that_are_cached_are_refused(x: Tensor) -> None:
    module: Any = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())
    ours, original = planned(module, x), copy.deepcopy(module)
    for refused in (lambda: ours(x), lambda: planned(copy.deepcopy(original), x)):
        with (
            parametrize.cached(),
            pytest.raises(irc.UnsupportedError, match=r"IRC538.*submodule '0'.*cached\(\)") as raised,
        ):
            refused()
        assert "outside of parametrize.cached()" in str(raised.value.help)
    assert_steps_agree(ours, original, x)
    plain = nn.Sequential(nn.Linear(4, 4))
    fitted, its = planned(plain, x), copy.deepcopy(plain)
    with parametrize.cached():
        assert_steps_agree(fitted, its, x)


# ---------------------------------------------------------------------- large tables, and foreign objects


def test_a_list_of_tensors_is_watched_by_its_classes() -> None:
    held: list[Any] = [torch.zeros(1), nn.Parameter(torch.zeros(1)), weakref.ref(nn.Linear(1, 1))]
    watch = Watch([held])
    held[0] = torch.ones(2)
    assert watch.holds(), "a plan looks tensors up"
    for change in (lambda: held.append(torch.zeros(1)), held.reverse, held.clear):
        watch = Watch([held])
        change()
        assert not watch.holds()


def test_large_tables_are_compared_in_little_time() -> None:
    tables = [{i: [i, str(i)] for i in range(900)} for _ in range(20)]
    watch = Watch(tables)
    times = [_seconds(watch.holds) for _ in range(5)]
    assert min(times) < 1.5 * min(_seconds(lambda: _look_at_keys(tables)) for _ in range(5)) + 2e-3
    for change, back in [
        (lambda: tables[19][899].append(1), lambda: tables[19][899].pop()),
        (lambda: tables[0][0].__setitem__(0, True), lambda: tables[0][0].__setitem__(0, 0)),
        (lambda: tables[19].pop(5), lambda: None),
    ]:
        assert watch.holds()
        change()
        assert not watch.holds()
        back()


def _seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def _look_at_keys(tables: list[dict[int, Any]]) -> int:
    return sum(table.get(key) is not None for table in tables for key in table)


class Guarded(dict[Any, Any]):
    """A dict that nobody else may ask."""

    def __len__(self) -> int:
        raise RuntimeError("no")

    get: Any = __len__
    __iter__: Any = __len__


def test_objects_that_refuse_to_be_looked_at_are_settings_like_others(x: Tensor) -> None:
    ours, original = pair(True, x)
    for module in (ours, original):
        settled(module).weights.update(others=[Lazy(), Guarded(a=1.0)])
    for _ in range(2):
        assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == 2
    dict.__setitem__(settled(ours).weights["others"][1], "a", 2.0)
    assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == 3


def test_a_nan_that_is_assigned_anew_is_no_other_setting(x: Tensor) -> None:
    ours, original = pair(True, x)
    for _ in range(3):
        for module in (ours, original):
            settled(module).weights.update(limit=float("nan"))
        assert_steps_agree(ours, original, x)
    assert len(ours.irc_plans) == 2
