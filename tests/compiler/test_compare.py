"""Two steps are equal, or the difference is seen, however small its share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from irc.compiler.training import compare_step


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2))
            for _ in range(3)
        ]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def pair() -> tuple[Tiny, Tiny, tuple[Tensor]]:
    """Two modules with the same numbers, and the arguments of a step."""
    torch.manual_seed(0)
    module, other = Tiny(), Tiny()
    other.load_state_dict(module.state_dict())
    return module, other, (torch.randn(4, 8, 8, 8),)


def test_equal_modules_agree_bit_for_bit_and_stay_as_they_are() -> None:
    module, other, args = pair()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = torch.get_rng_state()
    numbers = compare_step(module, other, args)
    assert numbers.agrees and numbers.bit_equal and str(numbers) == "bit-equal"
    assert numbers.gradient_scale > 0 and numbers.buffer_scale > 0
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_wrong_module_is_seen() -> None:
    module, other, args = pair()
    with torch.no_grad():
        next(iter(other.parameters())).mul_(1.01)
    numbers = compare_step(module, other, args)
    assert not numbers.agrees and not numbers.bit_equal and numbers.gradients > 0
    assert "gradients" in str(numbers)


@dataclass
class Result:
    loss: Tensor
    beside: float | Tensor


class Returning(nn.Module):
    def __init__(self, beside: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.beside = beside

    def forward(self, x: Tensor) -> Result:
        return Result((x * self.weight).sum(), (x + self.beside).detach())


def test_tensors_within_dataclasses_are_compared() -> None:
    args = (torch.ones(3),)
    assert compare_step(Returning(1.0), Returning(1.0), args).bit_equal
    assert not compare_step(Returning(1.0), Returning(2.0), args).bit_equal


def test_nan_is_no_agreement() -> None:
    module, other, args = pair()
    with torch.no_grad():
        next(iter(other.parameters())).fill_(float("nan"))
    assert not compare_step(module, other, args).agrees


def test_frozen_parameters_and_draws_are_seen() -> None:
    module, frozen, args = pair()
    next(iter(frozen.parameters())).requires_grad_(False)
    assert not compare_step(module, frozen, args).same_gradients
    module, still, args = pair()
    next(child for child in still.modules() if isinstance(child, nn.Dropout)).eval()
    numbers = compare_step(module, still, args)
    assert not numbers.same_generator and "generator differs" in str(numbers)


class Scales(nn.Module):
    """Two weights whose gradients differ by a factor; a scaled gradient is a wrong one."""

    def __init__(self, small: float, wrong: float = 1.0) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(3))
        self.little = nn.Parameter(torch.ones(3))
        self.small, self.wrong = small, wrong

    def forward(self, x: Tensor) -> Tensor:
        little = self.little
        if self.wrong != 1.0:
            little = little * self.wrong + (little * (1 - self.wrong)).detach()
        return (x * self.large + self.small * x * little).sum()


@given(st.integers(0, 4), st.floats(0.05, 0.5))
def test_a_wrong_gradient_is_seen_beside_a_larger_one(exponent: int, share: float) -> None:
    small = 10.0**-exponent
    args = (torch.tensor([1.0, 2.0, 3.0]),)
    numbers = compare_step(Scales(small), Scales(small, 1 - share), args)
    assert not numbers.agrees and numbers.worst_gradient > 1
    assert compare_step(Scales(small), Scales(small), args).agrees
