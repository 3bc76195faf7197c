"""What a forward returns besides plain tensors: sizes as they are, and no tensor out of sight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import irc
from irc.frontends.torch import capture
from irc.ir import UnsupportedError


class _Returns(nn.Module):
    """Returns what `wrap` makes of a linear layer's result."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.lin(x))


class _Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class _Dict(dict[str, Any]):
    pass


@dataclass
class _Failed(Exception):
    scores: Tensor


@dataclass
class _Registered:
    scores: Tensor
    count: int


def test_sizes_stay_sizes() -> None:
    model, x = _Returns(lambda y: (y, y.shape, y.dtype)), torch.randn(8, 4)
    fitted = irc.optimize(model, x, "100%", costs="analytic")
    _, size, dtype = fitted(x)
    assert type(size) is torch.Size and size == (8, 6) and dtype is torch.float32


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: _Failed(y),
        lambda y: (y, _Dict(h=y.mean())),
        lambda y: (y, SimpleNamespace(deep=[_Slotted({"h": y})])),
    ],
)
def test_a_tensor_that_nobody_could_find_is_refused(wrap: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"IRC342.*object of class (_Failed|_Dict|SimpleNamespace)"):
        capture(_Returns(wrap), (torch.randn(8, 4),))


def test_a_cache_that_is_returned_is_refused_with_the_option_that_leaves_it_out() -> None:
    class Cache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    class DynamicCache(Cache):
        pass

    class TwoCaches(DynamicCache):
        pass

    for kind in (Cache, DynamicCache, TwoCaches):
        with pytest.raises(UnsupportedError, match="IRC342") as raised:
            capture(_Returns(lambda y, kind=kind: (y, kind(y))), (torch.randn(8, 4),))
        assert "use_cache=False" in str(raised.value.help)


def test_an_object_without_tensors_and_a_registered_class_are_returned() -> None:
    pytree.register_dataclass(_Registered)
    plain = SimpleNamespace(name="a", parts=[1, {"b": 2.0}])
    model, x = _Returns(lambda y: (_Registered(y, 3), plain)), torch.randn(8, 4)
    fitted = irc.optimize(model, x, "100%", costs="analytic")
    found, other = fitted(x)
    assert isinstance(found, _Registered) and found.count == 3 and other is plain
    found.scores.sum().backward()
    assert model.lin.weight.grad is not None


def test_an_argument_that_holds_a_tensor_out_of_sight_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 6)

        def forward(self, given: Any) -> Tensor:
            return self.lin(given.x)

    with pytest.raises(UnsupportedError, match=r"IRC343.*class SimpleNamespace"):
        capture(Scaled(), (SimpleNamespace(x=torch.randn(8, 4)),))
