"""Dataclasses that torch's pytree does not know, as results and as arguments: opened, and made anew."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.torch_cases import Model
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import irc
from irc.backends.torch.compiled_plan import pack_signature, unpack_signature
from irc.frontends.torch import capture
from irc.torch_support.pytree import flatten, flatten_arguments

torch.set_num_threads(1)

Kind = TypeVar("Kind")


@dataclass
class Plain:
    loss: Tensor | None
    parts: list[Any]
    count: int = 3


@dataclass(frozen=True)
class Frozen:
    loss: Tensor
    parts: tuple[Any, ...] = ()


@dataclass(slots=True)
class Slots:
    loss: Tensor
    parts: Any = None


@dataclass(frozen=True, slots=True)
class FrozenBase:
    loss: Tensor
    parts: Any = None


@dataclass(frozen=True, slots=True)
class FrozenSlots(FrozenBase):
    more: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Boxed(Generic[Kind]):
    loss: Kind


@dataclass
class Checked:
    """One whose construction may happen once: it computes, and it does not take what it made."""

    loss: Tensor
    scaled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        assert not hasattr(self, "scaled"), "made twice"
        self.scaled = self.loss * 2
        self.beside = {"half": self.loss / 2}


class Property:
    """Code between the name of a field and what is held under it."""

    def __get__(self, made: Any, kind: type) -> Any:
        return made.__dict__["loss"]

    def __set__(self, made: Any, value: Any) -> None:
        made.__dict__["loss"] = value * 2


@dataclass
class WithCode:
    loss: Any

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[f"_{name}"] = value

    def __getattr__(self, name: str) -> Any:
        return self.__dict__[f"_{name}"]


@dataclass
class Doubled:
    loss: Any


Doubled.loss = Property()


@dataclass
class Failure(ValueError):
    loss: Tensor


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda h: Plain(h.mean(), [h, {"h": h.sum()}]),
    "an absent field": lambda h: (h.mean(), Plain(None, [h.detach()], 7)),
    "frozen": lambda h: Frozen(h.mean(), (h, h.shape)),
    "slots": lambda h: Slots(h.mean(), [h]),
    "frozen slots that inherit": lambda h: FrozenSlots(h.mean(), h.argmax(), {"h": h}),
    "nested": lambda h: [Plain(h.mean(), [Frozen(h.sum(), (Slots(h),))])],
    "generic": lambda h: Boxed[Tensor](h.mean()),
    "computed once": lambda h: Checked(h.mean()),
    "written in a way of its own": lambda h: WithCode(h.mean()),
}


def layer(function: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    return Model(function, lin=nn.Linear(4, 6))


def loss_of(result: Any) -> Tensor:
    tensors = (t for t in flatten(result)[0] if isinstance(t, Tensor) and t.requires_grad)
    return torch.stack([tensor.square().mean() for tensor in tensors]).sum()


def shown(value: Any) -> Any:
    """A value as something that can be compared: classes with all that their objects hold."""
    if isinstance(value, Tensor):
        return value.tolist(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), [shown(each) for each in value]
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        named = {each.name: getattr(value, each.name) for each in fields(value)}
        return type(value), shown(named | getattr(value, "__dict__", {}))
    return value


@pytest.mark.parametrize("name", KINDS)
def test_a_dataclass_is_returned_as_eager_returns_it(name: str) -> None:
    ours = layer(lambda m, x: KINDS[name](torch.tanh(m.lin(x))))
    original, x = copy.deepcopy(ours), torch.randn(8, 4)
    ours = irc.optimize(ours, x, "100%", costs="analytic", time_limit=1, loss=loss_of)
    for _ in range(2):
        results = [model(x) for model in (original, ours)]
        for result in results:
            loss_of(result).backward()
        assert shown(results[1]) == shown(results[0])
        assert torch.equal(ours.lin.weight.grad, original.lin.weight.grad)


@pytest.mark.parametrize("name", KINDS)
def test_a_dataclass_is_taken_as_eager_takes_it(name: str) -> None:
    def forward(m: Any, x: Tensor, given: Any) -> Tensor:
        return torch.tanh(m.lin(x)) * loss_of(given)

    def given(seed: int) -> Any:
        torch.manual_seed(seed)
        return KINDS[name](torch.rand(3, 6, requires_grad=True))

    ours, x = layer(forward), torch.randn(8, 4)
    original = copy.deepcopy(ours)
    ours = irc.optimize(
        ours, (x,), "100%", example_kwargs={"given": given(0)}, costs="analytic", time_limit=1
    )
    for seed in range(3):
        for model in (original, ours):
            model(x, given=given(seed)).sum().backward()
        assert torch.equal(ours.lin.weight.grad, original.lin.weight.grad)
    assert len(ours.irc_plans) == 1


def test_other_numbers_in_a_dataclass_are_another_call() -> None:
    def forward(m: Any, x: Tensor, given: Plain) -> Tensor:
        return m.lin(x) * given.count * given.parts[0].count

    x, given = torch.randn(8, 4), Plain(None, [Plain(None, [], 1)])
    ours = irc.optimize(layer(forward), (x, given), "100%", costs="analytic", time_limit=1)
    for given.count in (3, 4):
        assert torch.equal(ours(x, given), ours.lin(x) * given.count)
    given.parts[0].count = 2
    assert torch.equal(ours(x, given), ours.lin(x) * 4 * 2)
    assert [call.call for call in ours.irc_plans] == [
        "an argument is 2; the plan was made for 1",
        "an argument is 4; the plan was made for 3",
        "the example arguments",
    ]


DEFAULT = Plain(None, [])


def test_a_dataclass_without_tensors_stays_the_very_object() -> None:
    """As an argument, within one that is opened, as a key, and in a result."""

    @dataclass(eq=False)
    class Key:
        sub: Any = None

    key, cfg = Key(), Plain(None, [], 2)
    both = Key(sub=(key, [key]))
    table = {key: 2.0}

    def forward(m: Any, x: Tensor, given: Any, batch: Any, keys: Key) -> Any:
        h = torch.tanh(m.lin(x)) * (3.0 if given is DEFAULT else 1.0) * table[keys.sub[0]]
        h = h * (5.0 if keys.sub[0] is keys.sub[1][0] else 1.0) + batch.loss
        return Plain(h, [m.cfg, batch.parts[0] is DEFAULT]), m.cfg, m.stats

    ours = layer(forward)
    ours.cfg, ours.stats = cfg, Frozen(torch.ones(2))
    original, x = copy.copy(ours), torch.randn(8, 4)
    batches = [Plain(torch.rand(6), [DEFAULT]) for _ in range(2)]
    args = [(x, DEFAULT, batch, both) for batch in batches]
    ours = irc.optimize(ours, args[0], "100%", costs="analytic", time_limit=1, loss=loss_of)
    for each in args:
        result, returned, stats = ours(*each)
        assert shown(result) == shown(original(*each)[0]) and result.parts[1] is True
        assert returned is cfg and result.parts[0] is cfg and stats is original.stats
    assert len(ours.irc_plans) == 1
    with pytest.raises(irc.UsageError, match=r"IRC501.*object of class .*Key") as raised:
        ours(x, DEFAULT, batches[0], Key(both.sub))
    assert raised.value.help is not None and "the very object" in raised.value.help


@pytest.mark.parametrize("place", ["result", "argument"])
def test_a_dataclass_with_tensors_in_two_places_is_refused(place: str) -> None:
    def forward(m: Any, x: Tensor, given: Any = None) -> Any:
        made = Plain(m.lin(x), [])
        return (made, [made]) if place == "result" else made.loss

    x = torch.randn(8, 4)
    given = Plain(x, [])
    code, args = ("IRC342", (x,)) if place == "result" else ("IRC343", (x, [given, {"again": given}]))
    with pytest.raises(irc.UnsupportedError, match=rf"{code}.*one object of class Plain") as raised:
        capture(layer(forward), args)
    assert raised.value.help is not None and "a copy in each place" in raised.value.help


def test_dataclasses_that_refer_to_each_other_are_looked_into_once() -> None:
    """There are more paths through 60 of them than anybody could go."""
    nodes = [Plain(None, [], count) for count in range(60)]
    for node in nodes:
        node.parts = nodes
    x = torch.randn(8, 4)
    started = time.process_time()
    model = layer(lambda m, x, given: m.lin(x) * given.parts[7].count)
    ours = irc.optimize(model, (x, nodes[0]), "100%", costs="analytic", time_limit=1)
    for nodes[7].count in (7, 8):
        assert torch.equal(ours(x, nodes[0]), ours.lin(x) * nodes[7].count)
    with pytest.raises(irc.UsageError, match=r"IRC501.*object of class Plain"):
        ours(x, nodes[1])
    assert time.process_time() - started < 30


def test_what_a_forward_writes_into_a_dataclass_without_tensors_is_taken_back() -> None:
    def forward(m: Any, x: Tensor, given: Plain) -> Tensor:
        given.count += 1
        given.parts.append(given.count)
        return m.lin(x) * given.count

    given = Plain(None, [1])
    with pytest.raises(irc.UnsupportedError, match="IRC556"):
        capture(layer(forward), (torch.randn(8, 4), given))
    assert given == Plain(None, [1])


def test_nothing_is_registered_for_the_user_s_class() -> None:
    result = Frozen(torch.ones(2))
    leaves, tree = flatten({"a": result})
    assert torch.equal(leaves[0], torch.ones(2)) and pytree.tree_leaves(result) == [result]
    assert type(pytree.tree_unflatten(leaves, tree)["a"]) is Frozen


def test_a_signature_with_dataclasses_is_read_as_it_was_written() -> None:
    model = layer(lambda m, x, given: FrozenSlots(m.lin(x), given.parts))
    none = Plain(None, [Plain(None, [])])
    given = Plain(None, [torch.ones(2), none, none])
    signature = capture(model, (torch.randn(8, 4), given)).signature
    assert unpack_signature(pickle.loads(pickle.dumps(pack_signature(signature)))) == signature


@pytest.mark.parametrize("kind", [Doubled, Failure])
def test_what_cannot_be_made_anew_is_refused(kind: Any) -> None:
    model, x = layer(lambda m, x: (m.lin(x), kind(m.lin(x)))), torch.randn(8, 4)
    with pytest.raises(irc.UnsupportedError, match=rf"IRC342.*class {kind.__name__}"):
        capture(model, (x,))
    with pytest.raises(irc.UnsupportedError, match=rf"IRC343.*class {kind.__name__}"):
        capture(layer(lambda m, x, given: m.lin(x)), (x, kind(x)))


def test_a_dataclass_within_itself_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        made = Plain(m.lin(x), [])
        made.parts.append(made)
        return made

    with pytest.raises(irc.UnsupportedError, match=r"IRC342.*class Plain"):
        capture(layer(forward), (torch.randn(8, 4),))


@pytest.mark.parametrize(
    "write",
    [lambda d: d.pop("x"), lambda d: d["more"].append(1), lambda d: d.update(y=d["x"] * 2)],
)
def test_a_forward_that_writes_into_a_dict_or_list_is_refused(
    write: Callable[[dict[str, Any]], object],
) -> None:
    def forward(m: Any, given: dict[str, Any]) -> Tensor:
        made = m.lin(given["x"])
        write(given)
        return made

    example = {"x": torch.randn(8, 4), "more": [3]}
    with pytest.raises(irc.UnsupportedError, match=r"IRC556"):
        capture(layer(forward), (example,))
    assert example.keys() == {"x", "more"} and example["more"] == [3]


def test_a_forward_may_take_keywords_away() -> None:
    def forward(m: Any, x: Tensor, **more: Any) -> Tensor:
        return m.lin(x) * more.pop("scale")

    capture(layer(forward), (torch.randn(8, 4),), {"scale": 2.0})


def test_a_forward_that_assigns_to_its_argument_is_refused() -> None:
    def forward(m: Any, x: Tensor, given: Plain) -> Tensor:
        given.loss = made = m.lin(x)
        return made

    with pytest.raises(irc.UnsupportedError, match=r"IRC556.*writes into its arguments") as raised:
        capture(layer(forward), (torch.randn(8, 4), Plain(None, [torch.ones(2)])))
    assert raised.value.help is not None and "dataclasses.replace" in raised.value.help


class Kept:
    """An argument that is no tree of torch's."""

    def __init__(self) -> None:
        self.items: list[Any] = [1.0]
        self.calls, self.last = 0, None


KEEPS: list[Callable[[Kept, Tensor], object]] = [
    lambda kept, y: kept.items.append(2.0),
    lambda kept, y: setattr(kept, "calls", kept.calls + 1),
    lambda kept, y: setattr(kept, "last", y),
]


@pytest.mark.parametrize("keeps", KEEPS)
def test_a_forward_that_keeps_something_in_an_object_that_it_is_given_is_refused(keeps: Any) -> None:
    def forward(m: Any, x: Tensor, kept: Kept) -> Tensor:
        y = m.lin(x)
        keeps(kept, y)
        return y * len(kept.items)

    example = Kept()
    with pytest.raises(irc.UnsupportedError, match=r"IRC556.*another object"):
        irc.optimize(layer(forward), (torch.randn(8, 4), example), "100%", costs="analytic")
    assert vars(example) == vars(Kept())


_LEAVES = st.sampled_from(
    [None, True, 1, 1.0, "text", b"bytes", 1j, torch.zeros(2), nn.Parameter(torch.ones(1))]
)
_ARGUMENTS = st.one_of(_LEAVES, st.lists(_LEAVES, max_size=2), st.dictionaries(st.text(max_size=1), _LEAVES))


@examples(60)
@given(
    args=st.lists(_ARGUMENTS, max_size=3), kwargs=st.dictionaries(st.text(max_size=2), _ARGUMENTS, max_size=3)
)
def test_arguments_without_dataclasses_nest_as_torch_says(args: list[Any], kwargs: dict[str, Any]) -> None:
    leaves, tree = flatten_arguments((tuple(args), kwargs))
    wanted, nesting = pytree.tree_flatten((tuple(args), kwargs))
    assert tree == nesting
    assert all(a is b for a, b in zip(leaves, wanted, strict=True))
