"""Containers, objects, functions and tensors in globals that code reads are compared in each call."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc
from irc.torch_support.code_names import GlobalTable


class Config:
    def __init__(self) -> None:
        self.scale, self.step, self.inner = 1.0, 0, types.SimpleNamespace(scale=1.0)

    @property
    def doubled(self) -> float:
        return 2 * self.scale


def with_default(x: Tensor, scales: Any = [1.0], *, by_keyword: Any = {"scale": 1.0}) -> Tensor:  # noqa: B006
    return x * scales[0] * by_keyword["scale"]


def scaling(scale: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def scaled(x: Tensor) -> Tensor:
        return x * scale

    def change(to: float) -> None:
        nonlocal scale
        scale = to

    return scaled, change


def as_it_is(x: Tensor) -> Tensor:
    return x * 1.0


def tripled(x: Tensor) -> Tensor:
    return x * 3.0


class Helper:
    def apply(self, x: Tensor) -> Tensor:
        return as_it_is(x)


def cached(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * CACHE["scale"] if "scale" in CACHE else m.lin(x)


class Lookup:
    def __get__(self, owner: object, kind: type) -> float:
        return SCALES[1][0]  # pyright: ignore


class HasLookup:
    scale = Lookup()


@torch.no_grad()  # torch's function, which closes over this one
def without_gradients() -> float:
    return settings["scale"]


def imported(x: Tensor) -> Tensor:
    from irc_tests_package import settings  # pyright: ignore

    return x * settings.scale  # pyright: ignore


config, HELPER, HAS_LOOKUP = Config(), Helper(), HasLookup()
settings: dict[str, Any] = {"scale": 1.0, "nested": {"scales": [1.0]}, "step": 0}
SCALES = [1.0, [1.0]]
ARRAY = np.ones(2)
CACHE: dict[str, float] = {}
TENSORS = {"scale": torch.ones(4)}
scale_of_all = torch.ones(4)
ALL_SCALES = [torch.ones(4)]
scaled, change_scaled = scaling(1.0)
helper: Callable[[Tensor], Tensor] = as_it_is
bound: Any = functools.partial(with_default, scales=[1.0])
package = types.ModuleType("irc_tests_package")
package.settings = types.ModuleType("irc_tests_package.settings")  # pyright: ignore[reportAttributeAccessIssue]


def apply_there(x: Tensor) -> Tensor:
    return x * there_scales["scale"]  # pyright: ignore  # noqa: F821


elsewhere = types.ModuleType("irc_tests_elsewhere")
there = types.FunctionType(apply_there.__code__, vars(elsewhere), "apply_there")
vars(elsewhere)["there_scales"] = {"scale": 1.0}
farther = types.ModuleType("irc_tests_farther")
vars(farther)["there_scales"] = {"scale": 3.0}
in_one_of_two = there
for each in (package, package.settings, elsewhere, farther):
    sys.modules[each.__name__] = each


def set_scale(scale: float) -> None:
    global helper, scale_of_all, bound, in_one_of_two
    any_package: Any = package
    config.scale = config.inner.scale = settings["scale"] = settings["nested"]["scales"][0] = scale
    SCALES[1][0] = ARRAY[0] = any_package.settings.scale = scale  # pyright: ignore
    with_default.__defaults__[0][0] = scale  # pyright: ignore
    change_scaled(scale)
    helper = as_it_is if scale == 1.0 else tripled
    Helper.apply = lambda self, x: helper(x)
    CACHE.clear()
    CACHE.update({} if scale == 1.0 else {"scale": scale})
    bound = functools.partial(with_default, scales=[scale])
    TENSORS["scale"] = scale_of_all = ALL_SCALES[0] = torch.full((4,), scale)
    vars(elsewhere)["there_scales"] = {"scale": scale}
    in_one_of_two = types.FunctionType(there.__code__, vars(elsewhere if scale == 1.0 else farther))


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "item": lambda m, x: m.lin(x) * settings["scale"],
    "item of an item": lambda m, x: m.lin(x) * settings["nested"]["scales"][0],
    "items": lambda m, x: m.lin(x) * [v for k, v in settings.items() if k == "scale"][0],  # noqa: RUF015
    "get": lambda m, x: m.lin(x) * settings.get("scale", 5.0),
    "list": lambda m, x: m.lin(x) * SCALES[1][0],  # pyright: ignore
    "array": lambda m, x: m.lin(x) * float(ARRAY[0]),
    "attribute": lambda m, x: m.lin(x) * config.scale,
    "attribute of an attribute": lambda m, x: m.lin(x) * config.inner.scale,
    "property": lambda m, x: m.lin(x) * config.doubled,
    "default": lambda m, x: with_default(m.lin(x)),
    "partial": lambda m, x: bound(m.lin(x)),
    "closure": lambda m, x: scaled(m.lin(x)),
    "another function": lambda m, x: helper(m.lin(x)),
    "another method": lambda m, x: HELPER.apply(m.lin(x)),
    "cache": cached,
    "file of a file": lambda m, x: m.lin(x) * package.settings.scale,  # pyright: ignore
    "function of another file": lambda m, x: there(m.lin(x)),
    "the same function in another file": lambda m, x: in_one_of_two(m.lin(x)),
    "descriptor": lambda m, x: m.lin(x) * HAS_LOOKUP.scale,
    "within no_grad()": lambda m, x: m.lin(x) * without_gradients(),
    "imported by the function": lambda m, x: imported(m.lin(x)),
    "tensor": lambda m, x: m.lin(x) * scale_of_all,
    "tensor in a dict": lambda m, x: m.lin(x) * TENSORS["scale"],
    "tensor in a list": lambda m, x: m.lin(x) * ALL_SCALES[0],
}


@pytest.fixture(autouse=True)
def _ones() -> None:  # pyright: ignore[reportUnusedFunction]
    torch.manual_seed(0)
    set_scale(1.0)


def model(function: Callable[[Any, Tensor], Tensor]) -> tuple[Any, nn.Module]:
    module = Model(function, lin=nn.Linear(4, 4))
    return irc.optimize(copy.deepcopy(module), (torch.ones(2, 4),), "1MiB", costs="analytic"), module


def assert_follows(ours: nn.Module, module: nn.Module) -> None:
    x = torch.randn(2, 4)
    for scale in (1.0, 3.0, 1.0):
        set_scale(scale)
        assert torch.equal(ours(x), module(x))


@pytest.mark.parametrize("function", READS.values(), ids=READS)
def test_what_code_reads_through_globals_is_compared(function: Callable[[Any, Tensor], Tensor]) -> None:
    ours, module = model(function)
    assert_follows(ours, module)
    again = len(ours.irc_plans)
    assert again > 1
    ours(torch.randn(2, 4))
    assert len(ours.irc_plans) == again
    replanned = [each.call for each in ours.irc_plans if each.call != "the example arguments"]
    assert all("which the forward's code names, has changed since the plan: " in each for each in replanned)


@pytest.mark.parametrize("name", ["item", "attribute", "tensor in a dict", "attribute of an attribute"])
def test_what_code_does_not_read_beside_it_asks_for_no_plan(name: str) -> None:
    ours, module = model(READS[name])
    x = torch.randn(2, 4)
    for step in range(3):
        config.step = settings["step"] = step
        settings[f"loss {step}"] = TENSORS[f"mean {step}"] = torch.ones(2)
        setattr(config.inner, f"loss_{step}", step)
        assert torch.equal(ours(x), module(x))
    assert len(ours.irc_plans) == 1


def test_what_is_replaced_by_its_equal_asks_for_no_plan() -> None:
    global config, settings, scaled, change_scaled
    for name in ("item", "attribute", "property", "closure", "default"):
        ours, module = model(READS[name])
        config, settings = Config(), copy.deepcopy(settings)
        scaled, change_scaled = scaling(1.0)
        with_default.__defaults__ = ([1.0],)
        assert_follows(ours, module)
        assert len(ours.irc_plans) == 2, name


def _scaled_if_asked(m: Any, x: Tensor) -> Tensor:
    try:
        return m.lin(x) * ASKED  # type: ignore[name-defined]  # pyright: ignore
    except NameError:
        return m.lin(x)


def test_a_global_that_comes_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Model(_scaled_if_asked, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    ours = irc.optimize(module, (x,), "1GiB", costs="analytic")
    assert torch.equal(ours(x), module(x))
    monkeypatch.setitem(globals(), "ASKED", 2.0)
    result = ours(x)
    assert torch.equal(result, module(x)) and len(ours.irc_plans) == 2


TABLES = {
    "globals()": "globals()['scale']",
    "computed": "globals()['sc' + str('ale')]",
    "sys.modules": "vars(sys.modules[__name__])['scale']",
    "by a function": "vars(here())['scale']",
    "by a global": "vars(sys.modules[NAME])['scale']",
    "of a function": "vars(sys.modules[read.__module__])['scale']",
    "in a list": "vars(HELD[0])['scale']",
}


@pytest.mark.parametrize("read", TABLES.values(), ids=TABLES)
def test_a_file_may_be_read_as_a_table(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = types.ModuleType("irc_tests_table")
    monkeypatch.setitem(sys.modules, file.__name__, file)
    source = f"""
import sys
def here(): return sys.modules[__name__]
def read(m, x): return m.lin(x) * {read}
NAME, HELD, scale = __name__, [here()], 1.0
"""
    exec(source, vars(file))
    ours, module = model(vars(file)["read"])
    x = torch.randn(2, 4)
    for scale in (1.0, 3.0, 1.0):
        vars(file)["scale"] = scale
        assert torch.equal(ours(x), module(x))


def test_a_tensor_in_a_global_may_be_written_into() -> None:
    ours, module = model(READS["tensor"])
    x = torch.randn(2, 4)
    for scale in (1.0, 3.0):
        scale_of_all.fill_(scale)
        assert torch.equal(ours(x), module(x))
    assert len(ours.irc_plans) == 1


def test_the_cure_that_is_named_trains_by_one_plan() -> None:
    module = Model(lambda m, x: m.lin(x) * m.scale, lin=nn.Linear(4, 4))
    module.register_buffer("scale", torch.ones(()))
    ours = irc.optimize(copy.deepcopy(module), (torch.ones(2, 4),), "1MiB", costs="analytic")
    x = torch.randn(2, 4)
    for scale in (1.0, 3.0, 1.0):
        for each in (ours, module):
            each.scale.fill_(scale)  # pyright: ignore
        assert torch.equal(ours(x), module(x))
    assert len(ours.irc_plans) == 1


@pytest.mark.parametrize("name", ["closure", "default", "tensor"])
def test_copies_and_pickles_compare_it_too(name: str) -> None:
    ours = irc.optimize(Named(name), (torch.ones(2, 4),), "1MiB", costs="analytic")
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        set_scale(1.0)
        assert len(twin.irc_plans) == 1
        assert_follows(twin, Named(name, ours.lin))
        assert len(twin.irc_plans) > 1


def test_a_tensor_that_is_another_one_when_a_pickle_is_read_makes_another_plan() -> None:
    set_scale(1.0)
    ours = irc.optimize(Named("tensor"), (torch.ones(2, 4),), "1MiB", costs="analytic")
    data, x = pickle.dumps(ours), torch.randn(2, 4)
    for scale, count in ((1.0, 1), (3.0, 2)):
        set_scale(scale)
        twin = pickle.loads(data)
        assert torch.equal(twin(x), Named("tensor", ours.lin)(x))
        assert len(twin.irc_plans) == count


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        pair = Pair(self.lin(x), x)
        return pair.first + pair.second


def test_pickles_carry_plans_of_code_that_a_module_holds() -> None:
    ours = irc.optimize(Paired(), (torch.ones(2, 4),), "1MiB", costs="analytic")
    assert len(pickle.loads(pickle.dumps(ours)).irc_plans) == 1  # the code of named tuples is in none
    with pytest.raises(pickle.PicklingError, match="no module holds the globals of <run_path>"):
        pickle.dumps(GlobalTable("<run_path>", {"scale": 1.0}))


class Named(nn.Module):
    """Computes by one of `READS`, which it names, so that it pickles."""

    def __init__(self, name: str, lin: Any = None) -> None:
        super().__init__()
        self.lin, self.name = lin or nn.Linear(4, 4), name

    def forward(self, x: Tensor) -> Tensor:
        return READS[self.name](self, x)


NOTEBOOK = """
import torch
class Settings:
    scale = {scale}
def helper(x):
    return x * {scale}
class Notebook(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
    def forward(self, x):
        return helper(self.lin(x)) * Settings.scale
"""


def test_cells_of_a_notebook_that_run_again_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = types.ModuleType("irc_tests_notebook")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    space = vars(notebook)
    exec(compile(NOTEBOOK.format(scale=1.0), "<cell 1>", "exec"), space)
    module = space["Notebook"]()
    ours = irc.optimize(copy.deepcopy(module), (torch.ones(2, 4),), "1MiB", costs="analytic")
    x = torch.randn(2, 4)
    helpers, _, tail = NOTEBOOK.partition("class Notebook")
    for cell, scale in ((2, 1.0), (3, 3.0)):
        exec(compile(helpers.format(scale=scale), f"<cell {cell}>", "exec"), space)
        space[f"_{cell}"] = tail
        assert torch.equal(ours(x), module(x))
    reloaded: dict[str, Any] = {}
    exec(compile(helpers.format(scale=5.0), "<cell 4>", "exec"), reloaded)
    space["helper"].__code__ = reloaded["helper"].__code__  # as autoreload does
    assert torch.equal(ours(x), module(x))
    space["Notebook"].forward = lambda self, x: self.lin(x)
    assert torch.equal(ours(x), module(x))


def test_threads_may_fill_a_dict_of_which_code_reads_an_item() -> None:
    ours, module = model(lambda m, x: m.lin(x) * FILLED["one"])
    ended = threading.Event()

    def fill() -> None:
        while not ended.is_set():
            FILLED.update({str(place): 1.0 for place in range(50)})
            for place in range(50):
                del FILLED[str(place)]

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        x = torch.randn(2, 4)
        for _ in range(5):
            assert torch.equal(ours(x), module(x))
        assert len(ours.irc_plans) == 1
    finally:
        ended.set()
        thread.join()


FILLED = {"one": 1.0}
