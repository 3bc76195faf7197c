"""Draws that run again from a state of the generator: the same numbers, and nothing of them need be kept."""

# The gamma of torch's distributions has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.torch_cases import assert_same, fitted, outcome
from torch import Tensor, nn

from irc.backends.torch import bind_program, compile_program
from irc.frontends.torch import Captured, capture
from irc.ir import (
    GENERATOR_STATE,
    Compute,
    DType,
    Node,
    Schedule,
    Storage,
    TensorType,
    Trait,
    Value,
    VerificationError,
    generator_state_type,
    verify_graph,
)
from irc.passes import Cost, PassManager, PlanMemory, Program, ReplayDraws
from irc.passes.costs.profiling import profile_costs
from irc.passes.subgraphs.footprint import saved_by
from irc.torch_support import draws
from irc.torch_support.draws import draw_again, draw_first, generator_state

STATE_BYTES = 5056


def _model(rate: float, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 128), nn.GELU(), nn.Dropout(rate), nn.Linear(128, 6), nn.Dropout(rate))
    return nn.Sequential(*layers).to(dtype), torch.randn(64, 6, dtype=dtype)


def _planned(captured: Captured, strategy: str, *, is_replayed: bool) -> Program:
    program = Program(captured.graph)
    if is_replayed:
        program = replace(ReplayDraws().run(program), original=None)
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


def _runs(program: Program, op: str) -> int:
    assert program.schedule is not None
    return sum(isinstance(i, Compute) and i.node.op == op for i in program.schedule.instructions)


@pytest.mark.default
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 0.0])
def test_all_numbers_are_those_of_dropout_that_runs_once(rate: float, dtype: torch.dtype) -> None:
    model, x = _model(rate, dtype)
    captured = capture(model, (x.clone().requires_grad_(),))
    for strategy in ("keep-all", "keep-none"):
        found: list[list[Tensor | None]] = []
        for is_replayed in (False, True):
            program = _planned(captured, strategy, is_replayed=is_replayed)
            assert program.schedule is not None
            found.append(_trained(model, captured, program.schedule, x))
        for once, again in zip(*found, strict=True):
            assert once is not None and again is not None
            assert torch.equal(once, again) and once.stride() == again.stride()


def _held_bytes(program: Program) -> int:
    """Lists what forward leaves for backward beside the outputs."""
    assert program.schedule is not None
    return sum(storage.nbytes for storage in saved_by(program.schedule))


def test_backward_gets_by_with_the_states() -> None:
    model, x = _model(0.25)
    captured = capture(model, (x,))
    once, again = (_planned(captured, "keep-none", is_replayed=is_replayed) for is_replayed in (False, True))
    small = 64 * 6  # bytes of a mask that is smaller than a state
    assert _held_bytes(again) == STATE_BYTES + small
    assert _held_bytes(once) == 64 * 128 + small + 64 * 128 * 4  # and the output that the second layer reads
    assert _runs(again, "irc.dropout_mask.default") == 3
    assert _runs(again, GENERATOR_STATE) == 1


def test_the_parts() -> None:
    model, x = _model(0.25)
    before = Program(capture(model, (x,)).graph)
    after = ReplayDraws().run(before)
    verify_graph(after.graph)
    assert after.original is before.graph
    assert ReplayDraws().run(after) is after
    parts = [node for node in after.graph.nodes if node.name.startswith("native_dropout")]
    names = ["native_dropout_mask_state", "native_dropout_mask", "native_dropout"]
    assert [node.name for node in parts][:3] == names
    assert [node.is_recomputable for node in parts[:3]] == [False, True, True]
    assert {node.op for node in after.graph.nodes if "backward" in node.name and "dropout" in node.name} == {
        "irc.dropout_backward.default"
    }


def test_the_parts_take_no_workspace() -> None:
    model, x = _model(0.25)
    graph = ReplayDraws().run(Program(capture(model, (x,)).graph)).graph
    costs = profile_costs(graph)
    ours = [node for node in graph.operations if node.op.startswith("irc.")]
    assert len(ours) == 7
    replayed = {node for node in ours if node.generator_state is not None}
    assert {costs.workspace_bytes[node] for node in replayed} == {STATE_BYTES}
    assert {costs.workspace_bytes[node] for node in ours if node not in replayed} <= set(range(32))


def test_what_is_no_dropout_in_training_stays() -> None:
    model, x = _model(0.25)
    evaluated = Program(capture(model.eval(), (x,)).graph)
    assert ReplayDraws().run(evaluated) is evaluated
    model, x = _model(1.0)
    nothing = Program(capture(model, (x,)).graph)
    assert ReplayDraws().run(nothing) is nothing


def test_draws_of_fewer_bytes_than_a_state_stay() -> None:
    layer, x = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), torch.randn(64, 6)
    graph = ReplayDraws().run(Program(capture(layer, (x,)).graph)).graph
    assert not any(node.op == GENERATOR_STATE for node in graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.77])
def test_the_parts_have_the_bits_of_torchs_kernels(rate: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    data = torch.randn(30, 40).to(dtype).T
    data[::3, ::5], data[1::3, ::7] = -0.0, float("inf")
    state = generator_state("cpu")
    output, mask = torch.native_dropout(data, rate, True)
    torch.set_rng_state(state)
    drawn = draws.dropout_mask(data.shape, data.stride(), rate)
    scale = 1 / (1 - rate)
    gradient = torch.ops.aten.native_dropout_backward(data, mask, scale)
    for expected, found in (
        (mask, drawn),
        (output.view(bits), draws.dropout_product(data, mask, rate).view(bits)),
        (gradient.view(bits), draws.dropout_backward(data, mask, scale).view(bits)),
    ):
        assert torch.equal(expected, found) and expected.stride() == found.stride()


# ---------------------------------------------------------------------- every operation that draws


class _Drawing(nn.Module):
    """Multiplies by what a function draws, so that backward reads it."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer(x) * self.draw(x.detach()).to(x.dtype)).tanh()
        return x


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(3, x.shape),
    "randint from": lambda x: torch.randint(-2, 3, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randperm": lambda x: torch.randperm(x.numel()).view(x.shape),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: torch.empty_like(x).random_(7),
    "poisson": lambda x: torch.poisson(x.abs()),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 16, replacement=True),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 1),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.4),
    "dropout in half precision": lambda x: torch.native_dropout(x.half(), 0.3, True)[0],
    "dropout of a transposed tensor": lambda x: torch.nn.functional.dropout(x.T, 0.4).T,
    "alpha dropout": lambda x: torch.nn.functional.alpha_dropout(x, 0.4, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_runs_again_with_its_bits(name: str) -> None:
    torch.manual_seed(0)
    module, x = _Drawing(DRAWS[name]), torch.randn(512, 16)
    original = copy.deepcopy(module)
    program = _planned(capture(module, (x,)), "keep-none", is_replayed=True)
    schedule = program.schedule
    assert schedule is not None
    runs = Counter(i.node for i in schedule.instructions if isinstance(i, Compute))
    draws = [
        node for node in program.graph.nodes if Trait.RANDOM in node.traits and node.op != GENERATOR_STATE
    ]
    assert draws and all(runs[node] > 1 for node in draws)
    ours = fitted(module, x, schedule=lambda graph: schedule)
    assert_same(outcome(ours, (x,), {}), outcome(original, (x,), {}))


# ---------------------------------------------------------------------- the generator


@pytest.mark.parametrize("draw", [torch.ops.aten.rand.default, torch.ops.aten.native_dropout.default])
def test_the_generator_is_left_as_it_was(draw: Callable[..., Tensor]) -> None:
    arguments = ([100],) if "rand" in str(draw) else (torch.ones(100), 0.5, True)
    torch.manual_seed(3)
    state = generator_state("cpu")
    assert state.nbytes == generator_state_type("cpu").nbytes == STATE_BYTES
    first = draw(*arguments)
    torch.rand(17)
    now = torch.get_rng_state()
    second = draw_again(state, "cpu", draw, *arguments)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(now, torch.get_rng_state())


def _meanwhile(run: Callable[[], object]) -> None:
    """Runs something in another thread, to its end."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_masks_are_the_same_if_another_thread_draws_between_copy_and_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = _model(0.5)
    captured = capture(model, (x.clone().requires_grad_(),))
    program = _planned(captured, "keep-none", is_replayed=True)
    assert program.schedule is not None

    def copied(device: str) -> Tensor:
        state = generator_state(device)
        _meanwhile(lambda: torch.rand(100))
        return state

    undisturbed = _trained(model, captured, program.schedule, x)
    monkeypatch.setattr(draws, "generator_state", copied)
    disturbed = _trained(model, captured, program.schedule, x)
    # every number is of one set of masks, which are those of a run without the thread
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert one is not None and other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("draw", [torch.ops.aten.rand.default, torch.ops.aten.native_dropout.default])
def test_a_draw_ends_where_it_would_without_another_thread(draw: Callable[..., Tensor]) -> None:
    arguments = ([100],) if "rand" in str(draw) else (torch.ones(100), 0.5, True)
    torch.manual_seed(3)
    state = generator_state("cpu")
    expected = draw(*arguments)
    after = torch.get_rng_state()
    _meanwhile(lambda: torch.rand(17))
    for one, other in zip(expected, draw_first(state, "cpu", draw, *arguments), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(after, torch.get_rng_state())


def test_a_draw_from_another_state_is_refused() -> None:
    model, x = _model(0.25)
    graph = ReplayDraws().run(Program(capture(model, (x,)).graph)).graph
    place = next(k for k, node in enumerate(graph.nodes) if node.generator_state is not None)
    made = Value("made", TensorType.contiguous((9,), DType.FLOAT32), Storage("made", 36))
    drawn = Node("drawn", "aten.rand.default", ((9,),), (made,), traits=frozenset({Trait.RANDOM}))
    nodes = (*graph.nodes[:place], drawn, *graph.nodes[place:])
    with pytest.raises(VerificationError, match="is not the state that it begins from") as caught:
        verify_graph(replace(graph, nodes=nodes))
    assert caught.value.code == "IRC142"
    state = graph.nodes[place - 1]
    for copied in (
        replace(state, traits=frozenset()),
        replace(state, arguments=()),
        replace(state, arguments=()).with_generator_state(graph.inputs[0].value),
    ):
        with pytest.raises(VerificationError, match="does not copy the state of a generator"):
            verify_graph(replace(graph, nodes=(*graph.nodes[: place - 1], copied, *graph.nodes[place:])))
    short = TensorType.contiguous((16,), DType.UINT8)
    small = Value("small", short, Storage("small", 16))
    nodes = (*graph.nodes[: place - 1], replace(state, results=(small,)), *graph.nodes[place:])
    with pytest.raises(VerificationError, match="copies a state of 5056 B into %small of 16 B"):
        verify_graph(replace(graph, nodes=nodes))
    empty = replace(graph.nodes[place], results=(None,))
    with pytest.raises(VerificationError):
        verify_graph(replace(graph, nodes=(*graph.nodes[:place], empty, *graph.nodes[place + 1 :])))
