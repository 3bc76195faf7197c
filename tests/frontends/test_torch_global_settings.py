"""Forwards that change torch's global settings: eager's numbers, or a refusal whose cure trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import irc


@pytest.fixture(autouse=True)
def _settings_as_before() -> Generator[None]:
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.use_deterministic_algorithms(False)


def of_double(make: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A forward that makes something while torch's default is double precision."""

    def forward(m: Any, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        made = make(x)
        torch.set_default_dtype(torch.float32)
        return m.lin(x) * made.float()

    return forward


def by_math(m: Any, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH), torch.device("cpu"):
        return F.scaled_dot_product_attention(m.lin(x)[None], x[None], torch.rand_like(x)[None])


def model(function: Callable[[Any, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    return Model(function, lin=nn.Linear(8, 8))


def planned(module: nn.Module) -> Any:
    return irc.optimize(copy.deepcopy(module), (torch.randn(4, 8),), "1MiB", costs="analytic")


def assert_steps_agree(ours: Any, module: Any) -> None:
    x, left = torch.randn(4, 8), list[list[Tensor]]()
    for each in (ours, module):
        torch.manual_seed(1)
        loss = each(x).square().sum()
        loss.backward()
        left.append([loss.detach(), torch.get_rng_state(), each.lin.weight.grad])
    assert all(map(torch.equal, *left))


@pytest.mark.parametrize(
    "function",
    [
        of_double(lambda x: torch.rand(8)),
        of_double(lambda x: torch.full((8,), 1 / 3) + torch.randn(8)),
        of_double(lambda x: torch.linspace(0, 1, 8)),
        of_double(lambda x: torch.rand(8, dtype=torch.float32) + torch.rand_like(x)),
        by_math,
    ],
)
def test_settings_for_some_lines_give_eager_s_bits(function: Callable[[Any, Tensor], Tensor]) -> None:
    module = model(function)
    assert_steps_agree(planned(module), module)


def leaving_double(m: Any, x: Tensor) -> Tensor:
    y = m.lin(x)
    torch.set_default_dtype(torch.float64)
    return y


def leaving_no_gradients(m: Any, x: Tensor) -> Tensor:
    y = m.lin(x)
    torch._C._set_grad_enabled(False)  # pyright: ignore[reportPrivateUsage]
    return y


def deterministic(m: Any, x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    y = m.lin(x)
    torch.use_deterministic_algorithms(False)
    return y


def of_medium_precision(m: Any, x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("medium")
    y = m.lin(x)
    torch.set_float32_matmul_precision("highest")
    return y


def plain(m: Any, x: Tensor) -> Tensor:
    return m.lin(x)


REFUSED: list[tuple[Any, str, Callable[[], object]]] = [
    (leaving_double, "leaves torch with.*default dtype is torch.float64", lambda: None),
    (leaving_no_gradients, "leaves torch with.*gradients is False", lambda: None),
    (deterministic, "deterministic algorithms", lambda: torch.use_deterministic_algorithms(True)),
    (of_medium_precision, "precision of", lambda: torch.set_float32_matmul_precision("medium")),
]


@pytest.mark.parametrize(("function", "message", "cure"), REFUSED)
def test_other_settings_are_refused_and_set_before_they_train(
    function: Any, message: str, cure: Callable[[], object]
) -> None:
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with pytest.raises(irc.UnsupportedError, match=rf"(?s)IRC338.*{message}.*take that out of the forward"):
        planned(model(function))
    assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == before
    assert torch.is_grad_enabled() and not torch.are_deterministic_algorithms_enabled()
    cure()
    module = model(plain)
    assert_steps_agree(planned(module), module)


def test_the_dtype_of_whole_numbers_is_named_as_the_cure_says() -> None:
    with pytest.raises(irc.UnsupportedError, match=r"(?s)IRC338.*default dtype.*name the dtype"):
        planned(model(of_double(lambda x: (x > 0) / 3)))
    module = model(lambda m, x: m.lin(x) * ((x > 0).double() / 3).float())
    assert_steps_agree(planned(module), module)


def test_calls_under_deterministic_algorithms_have_a_plan_of_their_own() -> None:
    module = model(lambda m, x: m.lin(x) * (2 if torch.are_deterministic_algorithms_enabled() else 3))
    ours = planned(module)
    for is_on in (True, False):
        torch.use_deterministic_algorithms(is_on)
        x = torch.randn(4, 8)
        assert torch.equal(ours(x), module(x))
    assert len(ours.irc_plans) == 2
