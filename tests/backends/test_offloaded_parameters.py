"""Parameters and optimizer states that live in a tier: the ordinary loop's numbers, whatever happens."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_tier import FakeTierConfig
from support.offloaded_parameters import FAR, offload_schedule
from support.random_copies import waited_for, without
from support.torch_cases import CASES, assert_same, captured_case, outcome
from torch import Tensor, nn
from torch.optim import Optimizer

import irc
from irc.backends.torch import (
    DiskTierConfig,
    HostTierConfig,
    TierConfig,
    bind_program,
    compile_program,
    emit_source,
)
from irc.backends.torch.offload.scratch import ScratchFile
from irc.backends.torch.original import FITTED
from irc.frontends.torch import Captured, capture
from irc.ir import Fetch, Offload, Schedule, TierError, VerificationError, Wait, verify_schedule
from irc.passes import Program, ReleaseGradients
from irc.passes.costs.optimizer_costs import OptimizerFactory, optimizer_of

torch.set_num_threads(1)

ROOM = 1 << 40


@pytest.fixture(autouse=True)
def _all_state_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irc.torch_support.optimizer_state._LEAST_BYTES", 1)


def adamw(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


@functools.cache
def releasing(name: str, factory: OptimizerFactory | None = None, accumulates: bool = False) -> Captured:
    """The captured step of a case or of `perceptron`, with gradients applied, accumulated or returned."""
    captured = captured_case(name) if name in CASES else _captured_perceptron()
    if not accumulates and factory is None:
        return captured
    release = ReleaseGradients("accumulate" if accumulates else "apply", factory)
    return replace(captured, graph=release.run(Program(captured.graph)).graph)


def living_elsewhere(
    module: nn.Module,
    captured: Captured,
    *,
    seed: int,
    factory: OptimizerFactory | None,
    place: TierConfig,
    broken: Callable[[Schedule], Schedule] | None = None,
) -> Any:
    """The fitted module, some of whose parameters and states live in a tier and move at random times."""
    schedule = offload_schedule(captured.graph, seed, at_once=broken is not None)
    verify_schedule(schedule, {}, tiers=[FAR])
    program = compile_program(schedule if broken is None else broken(schedule), captured.constants)
    optimizers = {
        name: optimizer_of(factory, [module.get_parameter(name)])
        for name in (program.released if factory is not None else ())
        if factory is not None
    }
    return bind_program(module, program, captured.signature, None, optimizers, [place])


def after_a_step(module: nn.Module, args: Any, kwargs: Any, optimizer: Optimizer | None) -> dict[str, Any]:
    """What an ordinary step leaves; without an optimizer its parameters are updated within backward."""
    if optimizer is not None:
        optimizer.zero_grad()
    found = outcome(module, args, kwargs)
    if optimizer is not None:
        optimizer.step()
    found = {what: value for what, value in found.items() if not what.startswith("parameter ")}
    return found | {what: value.clone() for what, value in module.state_dict().items()}


def states(module: nn.Module, optimizers: dict[str, Optimizer]) -> dict[str, Tensor]:
    return {
        f"{name} {key}": torch.as_tensor(value).clone()
        for name, optimizer in sorted(optimizers.items())
        for key, value in optimizer.state[module.get_parameter(name)].items()
        if value is not None
    }


MODELS = (
    "batch-norm and dropout",
    "buffers of the model's own",
    "chains of views",
    "several random draws",
    "tied weights",
    "transformer layer",
    "values with many readers",
)


@pytest.mark.parametrize("factory", [adamw, momentum])
@pytest.mark.parametrize("name", MODELS)
def test_random_schedules_train_as_the_ordinary_loop_does(name: str, factory: OptimizerFactory) -> None:
    case = CASES[name]
    fetched = written = 0
    for seed in range(6):
        torch.manual_seed(seed)
        module, args, kwargs = case.module(), case.arguments(), case.keywords()
        original = copy.deepcopy(module)
        place = FakeTierConfig("far", ROOM, seed=seed, is_late=seed % 3 == 0, checks=seed % 2 == 0)
        ours = living_elsewhere(module, releasing(name, factory), seed=seed, factory=factory, place=place)
        trained = {n: p for n, p in original.named_parameters(remove_duplicate=False) if p.requires_grad}
        ordinary = factory(list(dict.fromkeys(trained.values())))
        for _ in range(3):
            wanted = after_a_step(original, args, kwargs, ordinary)
            assert_same(after_a_step(ours, args, kwargs, None), wanted)
            mine = ours.irc_optimizers
            assert_same(states(ours, mine), states(original, dict.fromkeys(mine, ordinary)))
        traffic = ours.irc_traffic.get("far")
        fetched += traffic.in_bytes if traffic else 0
        written += traffic.out_bytes if traffic else 0
    assert fetched > 0 and written > 0


@pytest.mark.parametrize("name", MODELS)
def test_parameters_alone_may_be_trained_by_an_optimizer_outside(name: str) -> None:
    case = CASES[name]
    for seed in range(4):
        torch.manual_seed(seed)
        module, args, kwargs = case.module(), case.arguments(), case.keywords()
        original = copy.deepcopy(module)
        place = FakeTierConfig("far", ROOM, seed=seed, is_late=seed % 2 == 0)
        ours = living_elsewhere(module, releasing(name), seed=seed, factory=None, place=place)
        loops = [momentum([p for p in m.parameters() if p.requires_grad]) for m in (ours, original)]
        for _ in range(2):
            wanted = after_a_step(original, args, kwargs, loops[1])
            assert_same(after_a_step(ours, args, kwargs, loops[0]), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_parameters_that_live_elsewhere_are_accumulated(name: str) -> None:
    case = CASES[name]
    for seed in range(4):
        torch.manual_seed(seed)
        module, args, kwargs = case.module(), case.arguments(), case.keywords()
        original = copy.deepcopy(module)
        place = FakeTierConfig("far", ROOM, seed=seed)
        ours = living_elsewhere(
            module, releasing(name, accumulates=True), seed=seed, factory=None, place=place
        )
        for _ in range(2):
            assert_same(outcome(ours, args, kwargs), outcome(original, args, kwargs))


class Rebinding(Optimizer):
    """Makes its state if it has none, anew in each step, and gives parameters other memory."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter] = {"momentum": torch.zeros_like(parameter), "steps": 0}
                state = self.state[parameter]
                state["steps"] += 1
                state["momentum"] = 0.9 * state["momentum"] + parameter.grad
                if state["steps"] == 3:  # it does not fill its memory any more
                    state["momentum"] = torch.stack([state["momentum"], parameter])[0]
                parameter.data = parameter.data - 0.1 * state["momentum"]


def test_an_optimizer_may_replace_parameters_and_its_state() -> None:
    original, x = perceptron()
    for seed in range(4):
        ours, theirs = copy.deepcopy(original), copy.deepcopy(original)
        place = FakeTierConfig("far", ROOM, seed=seed)
        ours = living_elsewhere(
            ours, releasing("perceptron", Rebinding), seed=seed, factory=Rebinding, place=place
        )
        ordinary = Rebinding(list(theirs.parameters()))
        for _ in range(5):
            wanted = after_a_step(theirs, (x,), {}, ordinary)
            assert_same(after_a_step(ours, (x,), {}, None), wanted)


@pytest.mark.slow
def test_a_wait_that_is_missing_is_refused_and_gives_wrong_numbers() -> None:
    original, x = perceptron()
    args, captured = (x,), releasing("perceptron", adamw)
    ordinary = adamw(list(original.parameters()))
    start = copy.deepcopy(original)
    wanted = [after_a_step(original, args, {}, ordinary) for _ in range(2)]
    caught = 0
    for seed in range(4):
        known: list[Schedule] = []

        def noted(schedule: Schedule, known: list[Schedule] = known) -> Schedule:
            known.append(schedule)
            return schedule

        place = FakeTierConfig("far", ROOM, seed=seed, is_late=True)
        module = copy.deepcopy(start)
        living_elsewhere(module, captured, seed=seed, factory=adamw, place=place, broken=noted)
        for step in [k for k, i in enumerate(known[0].instructions) if isinstance(i, Wait)]:

            def broken(schedule: Schedule, step: int = step) -> Schedule:
                found = without(schedule, step)
                with pytest.raises(VerificationError, match=r"IRC1(21|3[5-8])"):
                    verify_schedule(found, {}, tiers=[FAR])
                return found

            module = copy.deepcopy(start)
            is_read = waited_for(known[0], step) is Fetch
            ours = living_elsewhere(module, captured, seed=seed, factory=adamw, place=place, broken=broken)
            if is_read:  # what is not copied back stays what it is: memory is lost, and no number
                with pytest.raises((AssertionError, RuntimeError)):
                    for mine in wanted:
                        assert_same(after_a_step(ours, args, {}, None), mine)
                caught += 1
    assert caught > 20


# ---------------------------------------------------------------------------- between steps


def perceptron() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(8, 64)


def _captured_perceptron() -> Captured:
    module, x = perceptron()
    return capture(module, (x,))


def on_disk(folder: Path, *, seed: int = 1) -> tuple[Any, nn.Module, Tensor]:
    """A module whose parameters and states live on a disk, its original, and an input."""
    module, x = perceptron()
    original = copy.deepcopy(module)
    place = DiskTierConfig("far", 1 << 30, str(folder), checks=True)
    return (
        living_elsewhere(module, releasing("perceptron", adamw), seed=seed, factory=adamw, place=place),
        original,
        x,
    )


def train(module: nn.Module, x: Tensor, optimizer: Optimizer | None, steps: int = 1) -> None:
    for _ in range(steps):
        module(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def running_of(module: nn.Module) -> Any:
    return vars(module.__dict__[FITTED].tiers)["_running"]["far"]


def same(ours: nn.Module, original: nn.Module) -> None:
    assert_same(dict(ours.state_dict()), dict(original.state_dict()))


def test_parameters_are_tensors_between_steps(tmp_path: Path) -> None:
    ours, original, x = on_disk(tmp_path)
    ordinary = adamw(list(original.parameters()))
    kept = list(ours.parameters())
    train(ours, x, None, 2)
    train(original, x, ordinary, 2)
    assert all(a is b for a, b in zip(ours.parameters(), kept, strict=True))
    same(ours, original)
    with torch.no_grad():
        assert torch.equal(ours(x), original(x))
        for module in (ours, original):
            for parameter in module.parameters():
                parameter.mul_(0.5)
    train(ours, x, None)
    train(original, x, ordinary)
    same(ours, original)
    assert not list(tmp_path.iterdir())


def test_weights_and_state_are_loaded_between_steps(tmp_path: Path) -> None:
    ours, original, x = on_disk(tmp_path)
    ordinary = adamw(list(original.parameters()))
    train(ours, x, None)
    train(original, x, ordinary)
    weights = copy.deepcopy(original.state_dict())
    saved = {name: copy.deepcopy(o.state_dict()) for name, o in ours.irc_optimizers.items()}
    ordinary_state = copy.deepcopy(ordinary.state_dict())
    train(ours, x, None, 2)
    ours.load_state_dict(weights)
    original.load_state_dict(weights)
    ordinary.load_state_dict(ordinary_state)
    for name, optimizer in ours.irc_optimizers.items():
        optimizer.load_state_dict(saved[name])
    train(ours, x, None, 2)
    train(original, x, ordinary, 2)
    same(ours, original)


def test_copies_and_pickles_have_numbers_and_a_tier_of_their_own(tmp_path: Path) -> None:
    ours, original, x = on_disk(tmp_path)
    ordinary = adamw(list(original.parameters()))
    train(ours, x, None)
    twin, read = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    before = copy.deepcopy(dict(ours.state_dict()))
    for module in (twin, read):
        train(module, x, None, 2)
        assert_same(dict(ours.state_dict()), before)
    train(original, x, ordinary, 3)
    same(twin, original)
    same(read, original)
    train(ours, x, None, 2)
    same(ours, original)


def test_parameters_may_go_to_shared_memory(tmp_path: Path) -> None:
    ours, original, x = on_disk(tmp_path)
    ordinary = adamw(list(original.parameters()))
    train(ours, x, None)
    train(original, x, ordinary)
    ours.share_memory()
    for optimizer in ours.irc_optimizers.values():
        for state in optimizer.state.values():
            state["exp_avg"].share_memory_()
    train(ours, x, None, 2)
    train(original, x, ordinary, 2)
    same(ours, original)


def test_parameters_outlive_the_module_and_its_file_goes(tmp_path: Path) -> None:
    ours, original, x = on_disk(tmp_path)
    train(ours, x, None)
    train(original, x, adamw(list(original.parameters())))
    parameters = list(ours.parameters())
    del ours
    gc.collect()
    for mine, its in zip(parameters, original.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_parameter_that_is_written_between_forward_and_backward_is_refused(tmp_path: Path) -> None:
    ours, _, x = on_disk(tmp_path)
    loss = ours(x).square().mean()
    with torch.no_grad():
        next(ours.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match=r"was written in place|modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files are counted as Linux shows them")
def test_what_lives_on_a_disk_keeps_no_file_open_for_each_tensor(tmp_path: Path) -> None:
    files = len(list(Path("/proc/self/fd").iterdir()))
    ours, _, x = on_disk(tmp_path)
    train(ours, x, None, 2)
    assert ours.irc_traffic["far"].out_bytes > 0
    assert len(list(Path("/proc/self/fd").iterdir())) == files + 1


def test_a_tier_that_is_full_takes_a_parameter_that_is_replaced(tmp_path: Path) -> None:
    ours, original, x = on_disk(tmp_path)
    ordinary = adamw(list(original.parameters()))
    train(ours, x, None)
    train(original, x, ordinary)
    room = running_of(ours).room
    room.capacity_bytes = room.held_bytes
    for parameter in ours.parameters():
        parameter.data = parameter.detach().clone()
    for optimizer in ours.irc_optimizers.values():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(ours, x, None)
    train(original, x, ordinary)
    same(ours, original)


def halve(parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Writes parameters in place, and loads other states of their optimizers."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)
    for optimizer in optimizers:
        changed = copy.deepcopy(optimizer.state_dict())
        for state in changed["state"].values():
            state["exp_avg"] *= 0.5
        optimizer.load_state_dict(changed)


def test_what_is_written_between_forward_and_backward_counts(tmp_path: Path) -> None:
    """It may be on the device already; backward itself does not read the first layer's weights."""
    for seed in range(8):
        original, x = perceptron()
        place = DiskTierConfig("far", 1 << 30, str(tmp_path))
        module = copy.deepcopy(original)
        ours = living_elsewhere(
            module,
            releasing("perceptron", adamw),
            seed=seed,
            factory=adamw,
            place=place,
            broken=lambda schedule: schedule,
        )
        ordinary = adamw(list(original.parameters()))
        train(ours, x, None)
        train(original, x, ordinary)
        loss, wanted = ours(x).square().mean(), original(x).square().mean()
        halve([ours.get_parameter("0.weight")], list(ours.irc_optimizers.values()))
        halve([original.get_parameter("0.weight")], [ordinary])
        wanted.backward()
        ordinary.step()
        loss.backward()
        same(ours, original)
        mine = ours.irc_optimizers
        assert_same(states(ours, mine), states(original, dict.fromkeys(mine, ordinary)))


# ---------------------------------------------------------------------------- failures


def test_a_file_that_cannot_be_mapped_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"IRC572.*mapping 0 B in a scratch file"):
        ScratchFile(str(tmp_path)).mapped(0, 0, None)


@pytest.mark.parametrize("method", ["write", "read"])
def test_when_the_disk_fails_nothing_is_lost_and_the_next_step_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    ours, original, x = on_disk(tmp_path)
    ordinary = adamw(list(original.parameters()))
    train(ours, x, None)
    train(original, x, ordinary)
    before = copy.deepcopy(dict(ours.state_dict()))
    real = getattr(ScratchFile, method)
    count = 0

    def failing(self: ScratchFile, data: memoryview, start: int) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.ENOSPC if method == "write" else errno.EIO, "no more")
        real(self, data, start)

    with monkeypatch.context() as patch:
        patch.setattr(ScratchFile, method, failing)
        with pytest.raises(TierError, match=r"IRC57[02]") as caught:
            train(ours, x, None)
    assert caught.value.help
    assert "may have taken this step for some parameters" in "".join(getattr(caught.value, "__notes__", ()))
    after = dict(ours.state_dict())
    train(original, x, ordinary)
    stepped = dict(original.state_dict())
    for name, value in after.items():  # each is as before the step, or as after it
        assert torch.equal(value, before[name]) or torch.equal(value, stepped[name]), name
    weights = copy.deepcopy(original.state_dict())
    ours.load_state_dict(weights)
    named = dict(original.named_parameters())
    for name, optimizer in ours.irc_optimizers.items():
        mine = optimizer.state[ours.get_parameter(name)]
        mine.update(copy.deepcopy(ordinary.state[named[name]]))
    train(ours, x, None, 2)
    train(original, x, ordinary, 2)
    same(ours, original)


def test_an_optimizer_that_fails_leaves_numbers_of_before(tmp_path: Path) -> None:
    ours, _, x = on_disk(tmp_path)
    train(ours, x, None)
    before = copy.deepcopy(dict(ours.state_dict()))
    optimizers = list(ours.irc_optimizers.values())
    real = type(optimizers[0]).step

    def failing(self: Optimizer, *args: Any) -> None:
        raise ValueError("this step fails")

    type(optimizers[0]).step = failing  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with pytest.raises(ValueError, match="this step fails"):
            train(ours, x, None)
    finally:
        type(optimizers[0]).step = real  # pyright: ignore[reportAttributeAccessIssue]
    assert_same(dict(ours.state_dict()), before)
    train(ours, x, None)
    assert all(torch.isfinite(value).all() for value in ours.state_dict().values())


def test_a_tier_without_room_is_refused_before_the_first_step(tmp_path: Path) -> None:
    module, _ = perceptron()
    with pytest.raises(TierError, match="IRC577"):
        place = DiskTierConfig("far", 1000, str(tmp_path))
        living_elsewhere(module, releasing("perceptron", adamw), seed=1, factory=adamw, place=place)
    same(module, perceptron()[0])


def test_pinned_memory_is_refused_for_parameters() -> None:
    module, _ = perceptron()
    captured = releasing("perceptron", adamw)
    program = compile_program(offload_schedule(captured.graph, 1), captured.constants)
    optimizers = {name: adamw([module.get_parameter(name)]) for name in program.released}
    with pytest.raises(TierError, match="IRC575"):
        bind_program(module, program, captured.signature, None, optimizers, [HostTierConfig("far", ROOM)])


def test_a_module_that_torch_shards_is_refused(tmp_path: Path) -> None:
    class FSDPModule:
        pass

    FSDPModule.__module__ = "torch.distributed.fsdp"
    ours, _, x = on_disk(tmp_path)
    ours.__class__ = type("Sharded", (FSDPModule, type(ours)), {})
    with pytest.raises(irc.UnsupportedError, match=r"IRC534.*made by fully_shard, and its parameters are"):
        ours(x)


def test_bytes_that_change_on_the_way_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, x = on_disk(tmp_path)
    train(ours, x, None)
    real = ScratchFile.read

    def flipping(self: ScratchFile, data: memoryview, start: int) -> None:
        real(self, data, start)
        data[0] ^= 1

    monkeypatch.setattr(ScratchFile, "read", flipping)
    with pytest.raises(TierError, match=r"IRC574.*was copied between the device and tier far"):
        train(ours, x, None)


# ---------------------------------------------------------------------------- what is emitted


def test_the_emitted_source_brings_parameter_and_state() -> None:
    module = nn.Linear(4, 3, bias=False)
    graph = ReleaseGradients("apply", adamw).run(Program(capture(module, (torch.randn(2, 4),)).graph)).graph
    seed = next(s for s in range(99) if len(offload_schedule(graph, s).graph.offloaded_parameters) == 2)
    schedule = offload_schedule(graph, seed)
    source = emit_source(schedule)
    assert re.search(r"release\('weight', primals_1, \S+, state_weight\)", source)
    assert "primals_1 = inputs[0]" not in source
    fetches = sum(isinstance(i, Fetch) for i in schedule.instructions)
    assert source.count(" = copies.fetch(") == fetches
    assert source.count("copies.offload(") - source.count("`copies.offload(") == 2
    assert sum(isinstance(i, Offload) for i in schedule.instructions) == 2


@pytest.mark.slow
def test_a_public_plan_keeps_its_promise_below_what_is_static(tmp_path: Path) -> None:
    from irc.compiler.training import measured_peak_bytes

    module, x = perceptron()
    original = copy.deepcopy(module)
    ordinary = adamw(list(original.parameters()))
    static = 3 * sum(p.nbytes for p in module.parameters())
    swap = [f"disk:{tmp_path}:1GiB", "params,optimizer"]
    fitted = irc.optimize(
        module, x, static * 4 // 5, optimizer_in_backward=adamw, swap=swap, costs="analytic", time_limit=5
    )
    plan = fitted.plan
    assert plan.peak_bytes <= static * 4 // 5 and plan.offloaded_bytes > 0
    train(fitted, x, None, 3)
    train(original, x, ordinary, 3)
    same(fitted, original)
    assert measured_peak_bytes(fitted, (x,), plan.static_bytes) <= plan.peak_bytes
    same(fitted, original)
    train(fitted, x[:4].clone(), None)
    train(original, x[:4].clone(), ordinary)
    same(fitted, original)
    assert [call.plan.offloaded_bytes for call in fitted.irc_plans] == [plan.offloaded_bytes] * 2


@pytest.mark.slow
def test_state_that_lives_in_a_tier_takes_nothing_of_another_plan(tmp_path: Path) -> None:
    module, x = perceptron()
    original = copy.deepcopy(module)
    ordinary = adamw(list(original.parameters()))
    budget_bytes = 3 * sum(p.nbytes for p in module.parameters())
    swap = [f"disk:{tmp_path}:1GiB", "params,optimizer"]
    ours = irc.optimize(
        module, x, budget_bytes, optimizer_in_backward=adamw, swap=swap, costs="analytic", time_limit=5
    )
    train(ours, x, None)
    train(original, x, ordinary)
    for trained in (ours, original):
        trained.get_parameter("2.weight").requires_grad_(False)
        trained.get_parameter("2.weight").grad = None
    train(ours, x, None)
    train(original, x, ordinary)
    same(ours, original)
    frozen, first = (call.plan for call in ours.irc_plans)
    state_bytes = 2 * module.get_parameter("2.weight").nbytes + 4  # and the number of steps
    assert first.offloaded_bytes - frozen.offloaded_bytes == state_bytes
    assert frozen.static_bytes == first.static_bytes
