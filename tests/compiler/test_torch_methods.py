"""PyTorch's methods save memory on copies that keep the names and, where PyTorch is right, the numbers."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import Original
from irc.compiler.comparison.torch_methods import (
    FAMILIES,
    Method,
    NotApplicableError,
    compiler,
    methods,
    segment_counts,
)


@pytest.fixture(autouse=True)
def quiet_compiler() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """torch's compiler warns about itself."""
    with warnings.catch_warnings(), compiler():
        warnings.simplefilter("ignore")
        yield


class Sequence(nn.Module):
    """A Sequential of blocks, as a ResNet."""

    def __init__(self, dropout: float = 0.0, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 1), nn.Dropout(dropout)
                )
                for _ in range(depth)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Layers(nn.Module):
    """A Sequential of plain layers that work in place, as a VGG."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Loop(nn.Module):
    """A ModuleList whose members are called in a loop, with a second argument that is the same for all.

    Args:
        skip: Adds what came in before the loop to each argument, so that the members are no chain.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * scale

    def __init__(self, *, skip: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean()
        before = x
        for block in self.blocks:
            x = block(x + before if self.skip else x, scale)
        return x.square().mean()


class Stem(nn.Module):
    """Plain layers before and after blocks, as a ResNet; an in-place layer follows a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        stem = [nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 8, 1), nn.GELU(), nn.MaxPool2d(2)]
        block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU())
        self.layers = nn.Sequential(*stem, block, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2048, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def images(side: int = 32) -> tuple[Tensor]:
    return (torch.randn(4, 8, side, side, generator=torch.Generator().manual_seed(0)),)


def vectors() -> tuple[Tensor]:
    return (torch.randn(512, 16, generator=torch.Generator().manual_seed(0)),)


def applied(original: Original, method: Method) -> nn.Module:
    module = original.copy()
    method.apply(module)
    original.warm_up(module)
    return module


def by_name(original: Original, *families: str, settings: tuple[float, ...] = ()) -> dict[str, Method]:
    asked = methods(original.module, original.args, families, settings)
    return {method.name: method for method in asked}


@pytest.mark.parametrize(
    ("module", "args"),
    [(Sequence(), images()), (Layers(), images(16)), (Stem(), images()), (Loop(), vectors())],
    ids=["sequence", "layers", "stem", "loop"],
)
def test_checkpointing_keeps_names_and_numbers(module: nn.Module, args: tuple[Tensor]) -> None:
    original = Original(module, args)
    found = by_name(original, "sequential", "blocks", "selective")
    assert "checkpoint per block" in found and "checkpoint_sequential 2" in found
    for method in found.values():
        other = applied(original, method)
        names = [name for name, _ in module.named_parameters()]
        assert [name for name, _ in other.named_parameters()] == names
        numbers = original.numbers(other)
        assert numbers.agrees and numbers.gradient_scale > 0
    assert original.peak_of(module) == original.step_bytes  # the original is as it was


def test_checkpointing_takes_less_memory_and_selecting_takes_less_of_the_gain() -> None:
    original = Original(Sequence(), images())
    found = by_name(original, "sequential", "blocks", "selective")
    assert list(found)[:2] == ["checkpoint_sequential 2", "checkpoint_sequential 3"]
    peaks = {name: original.peak_of(applied(original, method)) for name, method in found.items()}
    assert peaks["checkpoint_sequential 3"] < peaks["checkpoint_sequential 2"] < original.step_bytes
    assert peaks["checkpoint per block"] < peaks["selective checkpoint per block"] < original.step_bytes


class Convolutions(TorchDispatchMode):
    """Counts the convolutions of forward and of recomputation."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


def test_the_stem_is_a_block() -> None:
    original = Original(Stem(), images())
    other = applied(original, by_name(original, "blocks")["checkpoint per block"])
    with Convolutions() as once:
        original.warm_up(original.module)
    with Convolutions() as twice:
        original.warm_up(other)
    assert (once.count, twice.count) == (3, 6)  # two in the stem


def test_recomputed_statistics_are_counted_as_wrong_numbers() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    original = Original(nn.Sequential(block, nn.Sequential(nn.Conv2d(8, 8, 1), nn.GELU())), images())
    numbers = original.numbers(applied(original, by_name(original, "blocks")["checkpoint per block"]))
    assert numbers.gradients == 0 and numbers.buffers > 0 and not numbers.agrees


@pytest.mark.parametrize("family", ["sequential", "blocks", "selective"])
def test_a_model_without_blocks_is_not_applicable(family: str) -> None:
    original = Original(nn.Linear(16, 16), vectors())
    for method in by_name(original, family).values():
        with pytest.raises(NotApplicableError, match="Sequential or ModuleList"):
            applied(original, method)


def test_a_module_in_two_blocks_is_not_applicable() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    (method,) = methods(nn.Sequential(block, block), (torch.randn(2, 4),), ("blocks",), ())
    with pytest.raises(NotApplicableError, match="in two blocks"):
        method.apply(nn.Sequential(block, block))


def test_segments_need_a_chain() -> None:
    original = Original(Loop(skip=True), vectors())
    assert original.numbers(applied(original, by_name(original, "blocks")["checkpoint per block"])).bit_equal
    with pytest.raises(NotApplicableError, match="chain of 2"):
        applied(original, by_name(original, "sequential")["checkpoint_sequential 2"])


def test_segment_counts_are_about_the_square_root() -> None:
    assert segment_counts(23) == [2, 5, 10, 11]
    assert segment_counts(6) == [2, 3, 4]
    assert segment_counts(2) == [2] and segment_counts(1) == []


def test_compiled_modules_live_side_by_side() -> None:
    original = Original(Sequence(depth=3), images())
    settings = tuple(step / 8 for step in range(9))  # more than torch compiles one forward by default
    found = by_name(original, "budget", settings=settings)
    assert len(found) == len(settings)
    modules = {name: applied(original, method) for name, method in found.items()}
    peaks = {name: original.peak_of(module) for name, module in modules.items()}
    again = {name: original.peak_of(module) for name, module in modules.items()}
    assert peaks == again
    assert min(peaks.values()) < 0.9 * original.step_bytes
    assert all(original.numbers(module).agrees for module in modules.values())


def test_budgets_of_the_compiler_draw_dropout_again() -> None:
    original = Original(Sequence(dropout=0.3), images())
    found = by_name(original, "budget", settings=(1.0, 0.0))
    assert original.numbers(applied(original, found["activation_memory_budget 1"])).agrees
    assert not original.numbers(applied(original, found["activation_memory_budget 0"])).agrees


def test_all_families_are_known() -> None:
    original = Original(Sequence(), images())
    asked = methods(original.module, original.args, FAMILIES, (0.5,))
    assert [method.name for method in asked] == [
        "checkpoint_sequential 2",
        "checkpoint_sequential 3",
        "checkpoint_sequential 4",
        "checkpoint per block",
        "selective checkpoint per block",
        "activation_memory_budget 0.5",
        "save_on_cpu",
    ]


def test_saving_on_the_cpu_copies_what_backward_needs() -> None:
    original = Original(Sequence(), images())
    (method,) = methods(original.module, original.args, ["save_on_cpu"], ())
    saving = original.copy()
    method.apply(saving)
    taken: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (taken.append(x), x)[1], lambda x: x):
        saving(*original.args)
    assert not taken  # by the hooks outside: the method's own are nearer
    assert original.numbers(saving).bit_equal
