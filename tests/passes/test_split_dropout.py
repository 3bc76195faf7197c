"""Dropout taken apart: the same numbers, and backward can do with the mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from irc.backends.torch import bind_program, compile_program
from irc.frontends.torch import Captured, capture
from irc.ir import RUN_ONCE, Schedule, verify_graph
from irc.passes import Cost, PassManager, PlanMemory, Program, SplitDropout
from irc.passes.subgraphs.footprint import saved_by


def _model(rate: float, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 32), nn.GELU(), nn.Dropout(rate), nn.Linear(32, 6), nn.Dropout(rate))
    return nn.Sequential(*layers).to(dtype), torch.randn(16, 6, dtype=dtype)


def _planned(captured: Captured, strategy: str, *, is_split: bool) -> Program:
    program = Program(captured.graph)
    if is_split:
        program = replace(SplitDropout().run(program), original=None)
    return PassManager([Cost(profile="cpu"), PlanMemory(2**30, strategy)]).run(program)


def _trained(model: nn.Module, captured: Captured, schedule: Schedule, x: Tensor) -> list[Tensor | None]:
    """The result and all gradients, from one state of the random numbers."""
    ours = bind_program(model, compile_program(schedule, captured.constants), captured.signature)
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    result = ours(x)
    model.zero_grad()
    result.square().sum().backward()
    return [result.detach(), x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.default
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 0.0])
def test_all_numbers_are_those_of_the_whole_dropout(rate: float, dtype: torch.dtype) -> None:
    model, x = _model(rate, dtype)
    captured = capture(model, (x.clone().requires_grad_(),))
    for strategy in ("keep-all", "keep-none"):
        found: list[list[Tensor | None]] = []
        for is_split in (False, True):
            program = _planned(captured, strategy, is_split=is_split)
            assert program.schedule is not None
            found.append(_trained(model, captured, program.schedule, x))
        for whole, split in zip(*found, strict=True):
            assert whole is not None and split is not None
            assert torch.equal(whole, split) and whole.stride() == split.stride()


def _held_bytes(program: Program) -> int:
    """What forward leaves for backward beside the outputs."""
    assert program.schedule is not None
    return sum(storage.nbytes for storage in saved_by(program.schedule))


def test_backward_gets_by_with_the_masks() -> None:
    model, x = _model(0.25)
    captured = capture(model, (x,))
    whole, split = (_planned(captured, "keep-none", is_split=is_split) for is_split in (False, True))
    masks = 16 * 32 + 16 * 6
    assert _held_bytes(split) == masks
    assert _held_bytes(whole) == masks + 16 * 32 * 4  # and the output that the second layer reads


def test_the_parts() -> None:
    model, x = _model(0.25)
    before = Program(capture(model, (x,)).graph)
    after = SplitDropout().run(before)
    verify_graph(after.graph)
    assert after.original is before.graph
    assert SplitDropout().run(after) is after
    parts = [node for node in after.graph.nodes if node.name.startswith("native_dropout")]
    names = ["native_dropout_mask", "native_dropout_masked", "native_dropout"]
    assert [node.name for node in parts if node.region.value == "forward"][:3] == names
    assert [bool(node.traits & RUN_ONCE) for node in parts[:3]] == [True, False, False]
    assert parts[2].arguments[1] == pytest.approx(4 / 3)


def test_what_is_no_dropout_in_training_stays() -> None:
    model, x = _model(0.25)
    evaluated = Program(capture(model.eval(), (x,)).graph)
    assert SplitDropout().run(evaluated) is evaluated
    model, x = _model(1.0)
    nothing = Program(capture(model, (x,)).graph)
    assert SplitDropout().run(nothing) is nothing
