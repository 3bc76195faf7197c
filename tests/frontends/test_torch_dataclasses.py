"""Dataclasses that torch's pytree does not know, as results and as arguments: opened, and made anew."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_cases import Model

import irc
from irc.backends.torch.fitting import pack_signature, unpack_signature
from irc.frontends.torch import capture
from irc.ir.nesting import flatten

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
    ours = irc.optimize(ours, x, "100%", profile=False, time_limit=1, loss=loss_of)
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
    ours = irc.optimize(ours, (x,), "100%", example_kwargs={"given": given(0)}, profile=False, time_limit=1)
    for seed in range(3):
        for model in (original, ours):
            model(x, given=given(seed)).sum().backward()
        assert torch.equal(ours.lin.weight.grad, original.lin.weight.grad)
    assert len(ours.irc_plans) == 1


def test_other_numbers_in_a_dataclass_are_another_call() -> None:
    def forward(m: Any, x: Tensor, given: Plain) -> Tensor:
        return m.lin(x) * given.count

    x = torch.randn(8, 4)
    ours = irc.optimize(layer(forward), (x, Plain(None, [])), "100%", profile=False, time_limit=1)
    for count in (3, 4):
        assert torch.equal(ours(x, Plain(None, [], count)), ours.lin(x) * count)
    assert [call.call for call in ours.irc_plans] == [
        "an argument is 4; the plan was made for 3",
        "the example arguments",
    ]


def test_nothing_is_registered_for_the_user_s_class() -> None:
    result = Frozen(torch.ones(2))
    leaves, tree = flatten({"a": result})
    assert torch.equal(leaves[0], torch.ones(2)) and pytree.tree_leaves(result) == [result]
    assert type(pytree.tree_unflatten(leaves, tree)["a"]) is Frozen


def test_a_signature_with_dataclasses_is_read_as_it_was_written() -> None:
    model = layer(lambda m, x, given: FrozenSlots(m.lin(x), given.parts))
    signature = capture(model, (torch.randn(8, 4), Plain(torch.ones(2), [torch.ones(2)]))).signature
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
