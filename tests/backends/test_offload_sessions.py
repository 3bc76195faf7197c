"""What calls hold in tiers: several calls, backwards and threads, copies of modules, and after errors."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_tier import FakeTierConfig
from support.random_copies import TIERS, away_at_the_loss, with_random_copies
from support.swap_cases import (
    DISK,
    assert_next_step_is_right,
    away,
    captured,
    deep,
    held_bytes,
    left_by,
    scratch_of,
    step,
    swapping,
    tiers_of,
)
from support.torch_cases import Model, keep_all, recompute_some
from torch import Tensor, nn

from irc.backends.torch import (
    DiskTierConfig,
    PendingBackward,
    StandaloneModule,
    TierConfig,
    Tiers,
    bind_program,
    compile_program,
    run_step,
)
from irc.frontends.torch import capture
from irc.ir import Schedule, TierError, verify_schedule
from irc.passes import Program, ReleaseGradients

torch.set_num_threads(1)

RANDOM = [lambda graph, k=k: with_random_copies(recompute_some(graph, k), k, [DISK]) for k in range(4)]


def late(module: nn.Module, schedule: Callable[[Any], Schedule] = away, **options: Any) -> nn.Module:
    """As `swapping`, over a tier in which every copy is late and poison is everywhere else."""
    chosen = schedule(captured().graph)
    verify_schedule(chosen, {}, tiers=[DISK])
    config = FakeTierConfig("disk", 1 << 30, is_late=True, **options)
    return bind_program(module, compile_program(chosen, {}), captured().signature, tiers=[config])


@pytest.fixture(params=["disk", "fake"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., nn.Module]:
    if request.param == "disk":
        return lambda module, **options: swapping(module, tmp_path, checks=True, **options)
    return late


# ---------------------------------------------------------------------- several backwards


@pytest.mark.parametrize("schedule", [away, *RANDOM])
def test_gradients_double_when_the_graph_is_retained(make: Any, schedule: Any) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = make(module, schedule=schedule)
    for each in (ours, original):
        each.zero_grad()
        loss = each(*args)
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
    assert all(map(torch.equal, left_by(ours), left_by(original)))
    assert held_bytes(ours) == 0, "while the graph still exists"


def test_what_a_retained_graph_holds_goes_with_it(make: Any) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = make(module)
    loss = ours(*args)
    there = held_bytes(ours)
    loss.backward(retain_graph=True)
    assert held_bytes(ours) == there > 0
    with pytest.raises(RuntimeError, match="another"):
        loss.register_hook(_raise)
        loss.backward()
    del loss
    assert_next_step_is_right(ours, original, args)


def _raise(_: Any) -> None:
    raise RuntimeError("another")


# ---------------------------------------------------------------------- several calls


def test_forwards_in_flight_hold_their_own_copies(make: Any) -> None:
    module, _ = deep()
    plain = compile_program(keep_all(captured().graph), {})
    original = bind_program(
        copy.deepcopy(module), plain, captured().signature
    )  # one backward adds in the same order
    ours = make(module)
    inputs = [torch.randn(256, 48, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    for each in (ours, original):
        losses = [each(x) for x in inputs]
        there = held_bytes(ours)
        assert (there > 0) == (each is ours)
        losses[1].backward()
        assert held_bytes(ours) * 3 == there * 2
        torch.autograd.backward([losses[2], losses[0]])
        del losses
    assert all(map(torch.equal, left_by(ours), left_by(original)))
    assert held_bytes(ours) == 0


def test_a_forward_without_a_backward_holds_nothing_once_it_is_let_go_of(make: Any) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = make(module)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            loss = ours(*args)
            assert held_bytes(ours) > 0
            del loss
            if isinstance(tiers_of(ours).configs[0], FakeTierConfig):
                assert held_bytes(ours) == 0
    finally:
        gc.enable()
    drain(ours)
    assert_next_step_is_right(ours, original, args)


def drain(ours: nn.Module) -> None:
    """Until the copies that had begun when nobody wanted them any more have ended."""
    if isinstance(tiers_of(ours).configs[0], FakeTierConfig):
        return
    lanes: Any = vars(tiers_of(ours))["_running"]["disk"]
    for lane in (vars(lanes)["_out"], vars(lanes)["_in"]):
        lane.close()


@pytest.mark.parametrize("config", [FakeTierConfig("disk", 1 << 30, seed=3), DiskTierConfig("disk", 1 << 30)])
def test_threads_train_copies_and_the_same_module_at_once(config: TierConfig) -> None:
    module, args = deep()
    module.eval()  # the statistics of batch norm are of the order of calls else
    own = capture(module, args, loss=lambda result: result)
    chosen = away_at_the_loss(keep_all(own.graph), "disk")
    ours = bind_program(module, compile_program(chosen, own.constants), own.signature, tiers=[config])
    wanted = torch.autograd.grad(module(*args), list(module.parameters()))
    found: list[Any] = []

    def train(each: nn.Module) -> None:
        for _ in range(5):
            gradients = torch.autograd.grad(each(*args), list(each.parameters()))
            found.append(all(map(torch.equal, gradients, wanted)))

    modules = [ours, ours, ours, copy.deepcopy(ours)]
    threads = [threading.Thread(target=train, args=(each,)) for each in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20
    assert all(held_bytes(each) == 0 for each in modules)


# ---------------------------------------------------------------------- errors


@torch.library.custom_op("irc_tests::fragile", mutates_args=())
def fragile(x: Tensor, weight: Tensor) -> Tensor:
    """Fails if it finds a number that is not finite."""
    if not bool(x.isfinite().all()):
        raise ArithmeticError("not finite")
    return x * weight


@fragile.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x * weight)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return fragile(gradient, weight), (x * gradient).sum(0)


fragile.register_autograd(_backward, setup_context=_setup)


@pytest.mark.parametrize("seed", range(3))
def test_an_operation_that_fails_in_forward_or_in_backward(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        h = torch.tanh(m.second(fragile(h, m.weight)))
        return torch.tanh(m.third(h)) * h

    module: Any = Model(forward, **{k: nn.Linear(32, 32) for k in ("first", "second", "third")})
    module.weight = nn.Parameter(torch.rand(32))
    x = torch.randn(64, 32)
    original = copy.deepcopy(module)
    found = capture(module, (x,))
    chosen = with_random_copies(keep_all(found.graph), seed, [DISK], rate=1.0)
    ours = bind_program(
        module,
        compile_program(chosen, found.constants),
        found.signature,
        tiers=[FakeTierConfig("disk", 1 << 30, seed=seed)],
    )
    bad = torch.full_like(x, torch.nan)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="not finite"):
            ours(bad)
        assert held_bytes(ours) == 0
        out = ours(x)
        with pytest.raises(ArithmeticError, match="not finite"):
            out.backward(bad)
        assert held_bytes(ours) == 0, "while the graph still exists"
    for each in (ours, original):
        each.zero_grad()
        each(x).square().sum().backward()
    assert all(map(torch.equal, left_by(ours), left_by(original)))


def test_an_error_of_a_user_s_hook_in_backward(make: Any) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = make(module)
    for _ in range(2):
        x = args[0].clone().requires_grad_()
        loss = original(x) * ours(*args)
        handle = loss.register_hook(_raise)
        with pytest.raises(RuntimeError, match="another"):
            loss.backward()
        del loss, handle
        gc.collect()
    drain(ours)
    assert_next_step_is_right(ours, original, args)


def test_an_optimizer_that_fails_within_backward() -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    graph = ReleaseGradients("apply", Fails).run(Program(captured().graph)).graph
    chosen = away_at_the_loss(keep_all(graph), "disk")
    program = compile_program(chosen, {})
    optimizers = {name: Fails([module.get_parameter(name)]) for name in program.released}
    configs = [FakeTierConfig("disk", 1 << 30, is_late=True)]
    ours = bind_program(module, program, captured().signature, None, optimizers, configs)
    loss = ours(*args)
    assert held_bytes(ours) > 0
    list(optimizers.values())[3].fails = True
    with pytest.raises(ArithmeticError, match="no step"):
        loss.backward()
    assert held_bytes(ours) == 0, "while the graph still exists"
    list(optimizers.values())[3].fails = False
    ours.load_state_dict(original.state_dict())
    step(ours, args)
    step(original, args)
    torch.optim.SGD(original.parameters(), lr=0.01).step()
    assert all(map(torch.equal, ours.parameters(), original.parameters()))


class Fails(torch.optim.SGD):
    """Fails when it is told to."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("no step")
        return super().step(closure)


# ---------------------------------------------------------------------- copies of the module


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_module_open_tiers_of_their_own(way: str, tmp_path: Path) -> None:
    module, args = _picklable()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path, checks=True)
    step(ours, args)
    waiting = ours(*args)
    if way == "deepcopy":
        copied = copy.deepcopy(ours)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(ours))
    else:
        torch.save(ours, written := io.BytesIO())
        written.seek(0)
        copied = torch.load(written, weights_only=False)
    assert tiers_of(copied).configs == tiers_of(ours).configs
    assert tiers_of(copied).held_bytes == {}, "nothing is opened yet"
    assert_next_step_is_right(copied, copy.deepcopy(original), args)
    assert scratch_of(copied).number != scratch_of(ours).number
    waiting.backward()
    assert_next_step_is_right(ours, original, args)


class _Deep(nn.Module):
    """`deep`, of a class that a pickle can name."""

    def __init__(self, parts: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm = parts.layers, parts.norm

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + torch.tanh(self.norm(layer(x))) * torch.sigmoid(x)  # pyright: ignore[reportCallIssue]
        return x.square().mean()


def _picklable() -> tuple[nn.Module, tuple[Tensor, ...]]:
    module, args = deep()
    return _Deep(module), args


def test_another_process_after_a_fork_opens_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    ours = swapping(module, tmp_path)
    step(ours, args)
    before, parent = scratch_of(ours), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert_next_step_is_right(ours, original, args)
    assert scratch_of(ours) is not before


def test_a_module_of_its_program_alone_swaps_too(tmp_path: Path) -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    program = compile_program(away(captured().graph), {})
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plan: Any = None
    tiers = [FakeTierConfig("disk", 1 << 30, is_late=True)]
    alone = StandaloneModule(program, state, captured().signature.deliveries, plan, tiers)
    copied = pickle.loads(pickle.dumps(alone))
    for each in (alone, copied, original):
        each.zero_grad()
        step(each, args)
    assert all(map(torch.equal, left_by(alone), left_by(original)))
    assert all(map(torch.equal, left_by(copied), left_by(original)))
    assert alone.tiers.held_bytes == {"disk": 0}
    with pytest.raises(TierError, match="IRC576"):
        StandaloneModule(program, state, captured().signature.deliveries, plan)


# ---------------------------------------------------------------------- with all else


def test_gradients_are_released_within_a_swapped_backward() -> None:
    module, args = deep()
    original = copy.deepcopy(module)
    graph = ReleaseGradients().run(Program(captured().graph)).graph
    for seed in range(4):
        chosen = with_random_copies(recompute_some(graph, seed), seed)
        verify_schedule(chosen, {}, tiers=TIERS)
        configs = [FakeTierConfig(tier.name, 1 << 30, seed=seed, is_late=bool(seed % 2)) for tier in TIERS]
        program = compile_program(chosen, {})
        assert "def backward(inputs, saved, tangents, release, copies):" in program.source
        ours = bind_program(copy.deepcopy(module), program, captured().signature, tiers=configs)
        assert_next_step_is_right(ours, copy.deepcopy(original), args)


def test_a_waiting_step_that_swaps_keeps_its_program() -> None:
    module, args = deep()
    program = compile_program(away(captured().graph), {})
    plain = compile_program(keep_all(captured().graph), {})
    assert not plain.copies and program.copies
    inputs = [
        {**dict(module.named_parameters()), **dict(module.named_buffers())}.get(static.target, args[0])
        for static in program.statics
    ]
    tiers = Tiers([FakeTierConfig("disk", 1 << 30)])
    outputs = run_step(program, inputs, tiers=tiers)
    waiting = PendingBackward(program, inputs, outputs)
    assert waiting.is_pending and not waiting.change(plain, [])
    outputs[0].backward()
    assert tiers.held_bytes == {"disk": 0}
