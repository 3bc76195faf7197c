"""The class of a fitted module: a subclass that texts and files cannot tell from the original's."""

from __future__ import annotations

import copy
import pickle
import types
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.torch_cases import fitted
from torch import Tensor, nn

import irc

torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def optimized(model: nn.Module, x: Tensor) -> Any:
    return irc.optimize(model, x, "100%", costs="analytic", time_limit=1)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_save_pretrained_writes_what_the_original_writes(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=8,
        vocab_size=32,
        n_positions=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    original, tokens = transformers.GPT2LMHeadModel(config).eval(), torch.randint(0, 32, (2, 6))
    named = {"input_ids": tokens, "labels": tokens}
    ours = irc.optimize(
        copy.deepcopy(original), (), "100%", example_kwargs=named, costs="analytic", time_limit=1
    )
    ours(**named).loss.backward()
    for name, model in {"original": original, "ours": ours, "read": pickle.loads(pickle.dumps(ours))}.items():
        model.save_pretrained(tmp_path / name)
    assert files(tmp_path / "ours") == files(tmp_path / "read") == files(tmp_path / "original")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is transformers.GPT2LMHeadModel and torch.equal(
        again(tokens).logits, original(tokens).logits
    )


def test_a_fitted_module_says_so_in_its_text_alone() -> None:
    ours = fitted(Layer(), torch.randn(3, 4))
    kind = type(ours)
    assert repr(ours) == "Fitted" + repr(Layer())
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Layer", "Layer", __name__)
    assert kind is not Layer and isinstance(ours, Layer)


class Tagged(nn.Module):
    """Its subclasses have to say a tag, and are kept in a list."""

    known: ClassVar[list[type]] = []
    tag: str

    def __init_subclass__(cls, *, tag: str, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.tag = tag
        Tagged.known.append(cls)


class One(Tagged, tag="one"):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * len(self.tag)


def test_classes_that_look_after_their_subclasses_hear_of_no_more() -> None:
    x, known = torch.randn(3, 4), list(Tagged.known)
    ours = optimized(One(), x)
    twin = pickle.loads(pickle.dumps(ours))
    twin(x[:2]).sum().backward()
    assert Tagged.known == known == [One]
    assert ours.tag == twin.tag == "one" and torch.equal(ours(x), ours.lin(x) * 3)

    later: Any = types.new_class("Later", (type(ours),), {"tag": "two"})
    assert Tagged.known == [One, later] and later.tag == "two"
    Tagged.known.remove(later)


class Abstract(nn.Module, ABC):
    @abstractmethod
    def scale(self) -> float: ...

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() * self.scale()


class Concrete(Abstract):
    def scale(self) -> float:
        return 2.0


def test_abstract_classes_know_fitted_modules() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    ours, other = fitted(Concrete(), x), fitted(Layer(), x)
    assert isinstance(ours, Abstract) and isinstance(ours, Concrete) and not isinstance(other, Abstract)
    assert not isinstance(Concrete(), type(ours)) and torch.equal(ours(x), x.relu() * 2)


class Sealing(type):
    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        if any(isinstance(base, Sealing) for base in bases):
            raise TypeError(f"nobody may inherit from {bases[-1].__name__}")
        return super().__new__(cls, name, bases, members)


class Sealed(Layer, metaclass=Sealing):
    pass


def test_a_class_that_lets_nobody_inherit_is_refused() -> None:
    with pytest.raises(irc.UnsupportedError, match=r"IRC555.*Sealed.*nobody may inherit") as raised:
        optimized(Sealed(), torch.randn(3, 4))
    assert raised.value.help is not None and "Sealing" in raised.value.help
    wrapped = optimized(nn.Sequential(Sealed()), torch.randn(3, 4))
    wrapped(torch.randn(3, 4)).sum().backward()


class _Registering(type):
    """Keeps the last class of each name, as registries of model classes do."""

    known: ClassVar[dict[str, type]] = {}

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        made = super().__new__(cls, name, bases, members)
        cls.known[name] = cls.known[made.__qualname__] = made
        return made


class Registered(Layer, metaclass=_Registering):
    pass


def test_a_metaclass_that_keeps_classes_by_name_keeps_the_users() -> None:
    x = torch.randn(2, 4)
    ours = optimized(Registered(), x)
    ours(x).sum().backward()
    assert _Registering.known["Registered"] is Registered
    assert type(ours).__name__ == type(ours).__qualname__ == "Registered"


def test_another_module_of_the_fitted_class_runs_its_forward() -> None:
    x = torch.randn(2, 4)
    other = type(optimized(Layer(), x))()
    assert torch.equal(other(x), other.lin(x))
