"""What a forward changes beyond its module's numbers: refused by name, and put back as it was."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.foreign import Lazy
from support.torch_cases import Model, assert_same, fitted, outcome
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from irc.frontends.torch import capture
from irc.ir import IrcError, UnsupportedError
from irc.torch_support.containers import copied

torch.set_num_threads(1)


class Schedule:
    """Counts its steps."""

    def __init__(self) -> None:
        self.count = 0
        self.last: Any = None
        self.table: dict[str, Any] = {"steps": [0]}

    def step(self) -> float:
        self.count += 1
        return min(1.0, self.count / 10)


class Slotted:
    """Counts in a slot."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Counting(nn.Module):
    """Counts in its class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.lin(x) * self.calls


calls = 0
DRAWS = random.Random(3)
MASKS: dict[int, Tensor] = {}
LOADED: list[int] = []
LOADER = Schedule()
NOTED: list[Any] = []
PAIR = [1, 2]
ROWS: list[list[int]] = []


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4)


def model(function: Callable[..., Any], **attributes: Any) -> Any:
    module = Model(function, lin=nn.Linear(4, 4))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def refusal(module: nn.Module, x: Tensor) -> str:
    with pytest.raises(UnsupportedError) as raised:
        capture(module, (x,))
    assert raised.value.code == "IRC338" and raised.value.help
    return raised.value.message


def assert_trains_the_same(module: nn.Module, x: Tensor) -> None:
    original = copy.deepcopy(module)
    assert_same(outcome(fitted(module, x), (x,), {}), outcome(original, (x,), {}))


# ---------------------------------------------------------------------- numbers


def _steps(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * m.part.step()


def _notes(m: Any, x: Tensor) -> Tensor:
    m.part.table["steps"][0] += 1
    return m.lin(x)


def _fills_slot(m: Any, x: Tensor) -> Tensor:
    m.part.count += 1
    return m.lin(x)


def _turns(m: Any, x: Tensor) -> Tensor:
    m.part.rotate()
    return m.lin(x) * m.part[0]


def _exchanges(m: Any, x: Tensor) -> Tensor:
    m.part = (m.part[1], m.part[0])
    return m.lin(x) * m.part[0]


def _forgets(m: Any, x: Tensor) -> Tensor:
    m.part = None if m.part else True
    return m.lin(x)


def _adds(m: Any, x: Tensor) -> Tensor:
    m.part = [*m.part, 1]
    return m.lin(x) * len(m.part)


def _scales_array(m: Any, x: Tensor) -> Tensor:
    m.part *= 2.0
    return m.lin(x) * float(m.part[0])


def _calls(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * m.part()


@pytest.mark.parametrize(
    ("function", "part", "path"),
    [
        (_steps, Schedule(), "part.count"),
        (_notes, Schedule(), r"part.table['steps'][0]"),
        (_fills_slot, Slotted(), "part.count"),
        (_turns, collections.deque([1.0, 2.0]), "part[0]"),
        (_exchanges, (1.0, 2.0), "part"),
        (_forgets, True, "part"),
        (_adds, [1], "part"),
        (_scales_array, np.ones(2), "part"),
        (
            _calls,
            functools.partial(Schedule.step, Schedule()),
            "part.args[0].count",
        ),
        (_calls, Schedule().step, "part.count"),
    ],
)
def test_state_that_attributes_lead_to_is_refused_and_put_back(
    function: Callable[..., Any], part: Any, path: str, x: Tensor
) -> None:
    module = model(function, part=part)
    before = copy.deepcopy(part)
    assert f"changes Python state: {path} (" in refusal(module, x)
    assert module.part is part
    if isinstance(part, np.ndarray):
        assert np.array_equal(part, before)
    elif isinstance(part, Schedule):
        assert vars(part) == vars(before)
    elif isinstance(part, Slotted):
        assert part.count == 0
    elif callable(part):
        assert part() == 0.1
    else:
        assert part == before


def test_counters_that_code_leads_to_are_refused_and_put_back(x: Tensor) -> None:
    def of_file(m: Any, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return m.lin(x) * calls

    number = 0

    def of_function(m: Any, x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return m.lin(x) * number

    assert f"{__name__.rpartition('.')[2]}.calls (1 such)" in refusal(model(of_file), x)
    assert "state: function.number (" in refusal(model(of_function), x)
    assert "state: Counting.calls (1 such)" in refusal(Counting(), x)
    assert (calls, number, Counting.calls) == (0, 0, 0)


def test_a_hook_of_torchs_excuses_what_it_computes_and_nothing_else(x: Tensor) -> None:
    class Normed(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    class Counted(Normed):
        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input) * self.calls

    with pytest.warns(FutureWarning):
        plain, counted = (nn.Sequential(weight_norm(kind(4, 4))) for kind in (Normed, Counted))
    assert_same(outcome(fitted(plain, x), (x,), {}), outcome(plain, (x,), {}))
    assert "changes Python state: 0.calls (" in refusal(counted, x)


def test_what_an_object_learns_in_its_first_call_stays(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if m.part.last is None:
            m.part.last = "regression"
        return m.lin(x)

    module = model(forward, part=Schedule())
    assert_trains_the_same(module, x)
    assert module.part.last == "regression"


# ---------------------------------------------------------------------- generators and iterators


@pytest.mark.parametrize(
    "make", [lambda: random.Random(0), lambda: np.random.default_rng(0), lambda: np.random.RandomState(0)]
)
def test_a_generator_of_its_own_is_refused_and_put_back(make: Callable[[], Any], x: Tensor) -> None:
    module = model(lambda m, x: m.lin(x) * m.part["draws"].random(), part={"draws": make()})
    assert "draws from the generator part['draws']" in refusal(module, x)
    assert module.part["draws"].random() == make().random()

    held = model(lambda m, x: m.lin(x), part={"draws": make()})
    assert_trains_the_same(held, x)


def test_a_generator_of_the_file_is_refused_and_put_back(x: Tensor) -> None:
    state = DRAWS.getstate()
    message = refusal(model(lambda m, x: m.lin(x) * DRAWS.random()), x)
    assert message.endswith(".DRAWS; a plan would freeze what it drew") and DRAWS.getstate() == state


def _numbers() -> Iterator[int]:
    yield from (1, 2, 3)


ITERATORS = {
    "count": lambda: itertools.count(1),
    "cycle": lambda: itertools.cycle([1, 2]),
    "list": lambda: iter([1, 2, 3]),
    "generator": _numbers,
    "zip": lambda: map(abs, [1, 2, 3]),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_is_refused_where_it_is_drawn_from_and_is_not_advanced(name: str, x: Tensor) -> None:
    make = ITERATORS[name]
    for attributes, path in (({"part": make()}, "part"), ({"part": {"next": [make()]}}, "part['next'][0]")):
        module = model(
            lambda m, x: m.lin(x) * next(m.part["next"][0] if isinstance(m.part, dict) else m.part),
            **attributes,
        )
        assert f"draws from the iterator {path};" in refusal(module, x)
        iterator = module.part["next"][0] if isinstance(module.part, dict) else module.part
        assert type(iterator) is type(make()) and next(iterator) == 1


def test_an_iterator_that_is_only_held_is_no_reason(x: Tensor) -> None:
    held = iter([1, 2])
    module = model(lambda m, x: m.lin(x) if m.part is not None else x, part=held)
    expected = outcome(module, (x,), {})
    module.zero_grad()
    assert_same(outcome(fitted(module, x), (x,), {}), expected)
    assert module.part is held and next(held) == 1


def test_a_branch_is_looked_for_without_drawing_from_an_iterator(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x) * next(m.part) if x.sum() < 1e9 else x

    module = model(forward, part=itertools.count(1))
    with pytest.raises(UnsupportedError, match=r"IRC338.*iterator part"):
        capture(module, (x,), specialize_branches=True)
    assert next(module.part) == 1


# ---------------------------------------------------------------------- tensors that a run leaves


class Filling(nn.Module):
    """Keeps a mask for each size somewhere."""

    masks: dict[int, Tensor] = {}  # noqa: RUF012

    def __init__(self, where: str, fails: bool = False) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.nested: dict[str, dict[int, Tensor]] = {"masks": {}}
        self.helper = Schedule()
        self.made: Any = None
        self.where, self.fails = where, fails

    def table(self) -> dict[Any, Any]:
        if self.where == "built":
            if self.made is None:
                self.made = Schedule()
            return self.made.table
        tables = {"class": self.masks, "file": MASKS, "nested": self.nested["masks"]}
        return tables.get(self.where, self.helper.table)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table()
        if 4 not in table:
            table[4] = torch.ones(4, 4).tril()
        if self.fails:
            raise ValueError("not this time")
        return self.lin(x) @ table[4]


PLACES = {
    "class": "Filling.masks[4]",
    "file": ".MASKS[4]",
    "nested": "nested['masks'][4]",
    "helper": "helper.table[4]",
    "built": "made",
}


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    MASKS.clear()
    Filling.masks.clear()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_no_traced_tensor_is_left_anywhere(where: str, fails: bool, x: Tensor) -> None:
    module = Filling(where, fails)
    with pytest.raises(IrcError) as raised:
        capture(module, (x,))
    assert raised.value.code == ("IRC349" if fails else "IRC338")
    if not fails:
        assert PLACES[where] in raised.value.message and "call the module once" in str(raised.value.help)
    assert module.made is None
    left = module.table().get(4)  # of the run without a trace, if there was one
    assert left is None or (fails and type(left) is Tensor)
    module.made, module.fails = None, False
    expected = copy.deepcopy(module)(x)  # would fail on a tensor without data
    assert torch.equal(module(x), expected)
    assert_trains_the_same(module, x)  # the mask is there now


# ---------------------------------------------------------------------- what others do meanwhile


def _load(i: int) -> None:
    LOADED.append(i)
    LOADER.count = i


def test_what_another_thread_does_to_globals_of_the_file_is_none_of_the_forwards(x: Tensor) -> None:
    ends, loaded = threading.Event(), 0

    def load() -> None:
        nonlocal loaded
        while not ends.is_set():
            loaded += 1
            _load(loaded)
            NOTED.append(loaded)
            time.sleep(1e-4)

    def reads(m: Any, x: Tensor) -> Tensor:
        return m.lin(x) * float(bool(NOTED.append))

    NOTED.clear()
    thread = threading.Thread(target=load)
    thread.start()
    try:
        capture(model(reads), (x,))
    finally:
        ends.set()
        thread.join()
    assert LOADED == NOTED == list(range(1, loaded + 1)) and LOADER.count == loaded


def test_of_a_list_of_the_file_only_what_the_forward_changed_is_put_back(x: Tensor) -> None:
    def notes(m: Any, x: Tensor) -> Tensor:
        hidden = m.lin(x)
        NOTED.extend((7, hidden))
        return hidden

    def turns(m: Any, x: Tensor) -> Tensor:
        PAIR.reverse()
        return m.lin(x) * PAIR[0]

    NOTED[:] = ["kept"]
    assert ".NOTED[2]" in refusal(model(notes), x)
    assert NOTED[0] == "kept" and set(NOTED[1:]) == {7}
    assert ".PAIR[0] (" in refusal(model(turns), x) and PAIR == [1, 2]

    def takes(m: Any, x: Tensor) -> Tensor:
        return m.lin(x) * PAIR.pop()

    assert ".PAIR[0] (" in refusal(model(takes), x) and PAIR == [1, 2]


def _helps() -> int:
    return _counts()


def _counts() -> int:
    LOADER.count += 1
    return 1


def test_globals_count_where_the_forward_reaches_the_function_that_names_them(x: Tensor) -> None:
    LOADER.count = 0
    assert ".LOADER.count (1 such)" in refusal(model(lambda m, x: m.lin(x) * _helps()), x)
    assert LOADER.count == 0


def test_large_data_is_no_burden(x: Tensor) -> None:
    ROWS.extend(list(range(200)) for _ in range(5000))
    start = time.process_time()
    capture(model(lambda m, x: m.lin(x)), (x,))
    small = time.process_time() - start
    for module in (model(lambda m, x: m.lin(x) * len(ROWS)), model(lambda m, x: m.lin(x), data=[*ROWS] * 3)):
        start = time.process_time()
        capture(module, (x,))
        assert time.process_time() - start < small + 2.0
    ROWS.clear()


@pytest.mark.parametrize("make", [list, lambda items: dict(enumerate(items))])
def test_large_containers_of_the_module_are_compared_and_put_back(
    make: Callable[[Any], Any], x: Tensor
) -> None:
    def counts(m: Any, x: Tensor) -> Tensor:
        m.data[0] += 1
        return m.lin(x) * m.data[0]

    module = model(counts, data=make([0] * 30_000))
    assert "changes Python state: data[0] (1 such)" in refusal(module, x)
    assert module.data[0] == 0 and len(module.data) == 30_000


# ---------------------------------------------------------------------- objects that refuse to be looked at


class Guarded(dict[Any, Any]):
    """A dict that nobody else may ask."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("no")

    get: Any = _refuse
    __setitem__: Any = _refuse
    __delitem__: Any = _refuse
    update: Any = _refuse


class Sealed(list[Any]):
    """A list that nobody else may ask."""

    def __len__(self) -> int:
        raise RuntimeError("no")

    __iter__: Any = __len__


LAZY: Any = Lazy()
GUARDED: Any = Guarded(a=1)


class Making(collections.OrderedDict[Any, Any]):
    """A dict whose items are made anew for each reader, as the activations of transformers."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError(f"{key} is asked for")


class Listing(dict[Any, Any]):
    """A dict that lists other keys than it has."""

    def __iter__(self) -> Any:
        return iter(["other"])


def test_a_copy_of_a_dict_has_what_it_holds_in_its_order() -> None:
    making, listing = Making(a=1, b=2), Listing(a=1)
    making.move_to_end("a")
    assert copied(making) == {"a": 1, "b": 2} and list(copied(making)) == ["b", "a"]
    assert copied(listing) == copied({"a": 1}) == {"a": 1}


def test_objects_that_refuse_to_be_looked_at_are_no_reason_to_fail(x: Tensor) -> None:
    held = iter([1, 2])

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x) if LAZY is not None and GUARDED is not None else x

    module = model(forward, part=[Lazy()], table=Guarded(it=held, n=Lazy()), sealed=Sealed([1, [held]]))
    capture(module, (x,))
    assert dict(module.table)["it"] is held and list.__getitem__(module.sealed, 1) == [held]

    def counts(m: Any, x: Tensor) -> Tensor:
        dict.__setitem__(m.table, "n", dict.__getitem__(m.table, "n") + 1)
        return m.lin(x)

    module = model(counts, table=Guarded(n=1))
    assert "table['n'] (1 such)" in refusal(module, x) and dict(module.table) == {"n": 1}
