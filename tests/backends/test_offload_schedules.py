"""Schedules with random copies, carried out late and over poisoned memory: not one wrong number.

And where one `Wait` is missing, always a wrong one.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any, NamedTuple

import pytest
import torch
from support.fake_tier import FakeTierConfig
from support.random_copies import TIERS, waited_for, waits_that_matter, with_random_copies, without
from support.torch_cases import (
    CASES,
    assert_same,
    captured_case,
    keep_all,
    outcome,
    recompute_some,
    slow_among,
)
from torch import nn

from irc.backends.torch import bind_program, compile_program, emit_source
from irc.frontends.torch import Captured, capture
from irc.ir import (
    Compute,
    Fetch,
    Free,
    Graph,
    Loss,
    Offload,
    Schedule,
    Storage,
    Tier,
    TierError,
    VerificationError,
    Wait,
    verify_schedule,
)
from irc.passes import CheckpointProblem, Costs
from irc.passes.remat.eviction import evict_greedily

torch.set_num_threads(1)

MODELS = (
    "batch-norm and dropout",
    "buffers of the model's own",
    "chains of views",
    "channels last",
    "half and integer types",
    "in-place writes",
    "several random draws",
    "tied weights",
    "transformer layer",
    "values with many readers",
)
EACH = 25
ROOM = 1 << 40


class Original(NamedTuple):
    """A model that was captured, and what a step of it leaves behind."""

    module: nn.Module
    args: Any
    kwargs: dict[str, Any]
    captured: Captured
    wanted: dict[str, Any]


@functools.cache
def original(name: str) -> Original:
    torch.manual_seed(0)
    case = CASES[name]
    module, args, kwargs = case.module(), case.arguments(), case.keywords()
    return Original(module, args, kwargs, captured_case(name), outcome(copy.deepcopy(module), args, kwargs))


def recomputing(graph: Graph, seed: int) -> Schedule:
    """What eviction finds at a random budget; every second one recomputes at random."""
    if seed % 2:
        return recompute_some(graph, seed)
    draw = random.Random(seed)
    seconds = {node: draw.choice((0.01, 1.0, 3.0)) for node in graph.operations}
    problem = CheckpointProblem(graph, Costs(seconds, dict.fromkeys(seconds, 0), "analytic:test"))
    floor, top = problem.floor_bytes, problem.keep_all.peak_bytes
    found = evict_greedily(problem, floor + int((top - floor) * draw.random()), distance_weight=draw.random())
    return keep_all(graph) if found is None else found.schedule


def swapping(graph: Graph, seed: int) -> Schedule:
    return with_random_copies(recomputing(graph, seed), seed)


def fakes(**options: Any) -> tuple[FakeTierConfig, ...]:
    return tuple(FakeTierConfig(tier.name, ROOM, **options) for tier in TIERS)


def after_a_step(known: Original, schedule: Schedule, configs: tuple[FakeTierConfig, ...]) -> dict[str, Any]:
    program = compile_program(schedule, known.captured.constants)
    ours = bind_program(copy.deepcopy(known.module), program, known.captured.signature, tiers=configs)
    return outcome(ours, known.args, known.kwargs)


@pytest.mark.parametrize("name", slow_among(MODELS, "transformer layer", "values with many readers"))
def test_random_schedules_give_the_original_s_bits(name: str) -> None:
    known = original(name)
    copies = 0
    for seed in range(EACH):
        schedule = swapping(known.captured.graph, seed)
        verify_schedule(schedule, {}, tiers=TIERS)
        copies += sum(isinstance(i, Offload) for i in schedule.instructions)
        configs = fakes(seed=seed, is_late=seed % 5 == 0, checks=seed % 3 == 0)
        assert_same(after_a_step(known, schedule, configs), known.wanted)
    assert copies > EACH


# ---------------------------------------------------------------------- a missing Wait


def waits(schedule: Schedule) -> dict[int, Storage]:
    return {k: i.storage for k, i in enumerate(schedule.instructions) if isinstance(i, Wait)}


def is_float(schedule: Schedule, storage: Storage) -> bool:
    """Then poison is not a number. Kernels may read or write anywhere by poisoned whole numbers."""
    return all(value.type.dtype.is_float for value in schedule.graph.producers[storage].values)


@pytest.mark.parametrize("name", slow_among(MODELS, "transformer layer", "values with many readers"))
def test_each_wait_that_is_removed_is_caught(name: str) -> None:
    """By the verifier always. By the numbers where they are used: not those that are never fetched again."""
    known = original(name)
    caught = 0
    for seed in range(3):
        schedule = with_random_copies(recomputing(known.captured.graph, seed), seed, rate=0.3)
        matter = waits_that_matter(schedule)
        for step, storage in waits(schedule).items():
            broken = without(schedule, step)
            with pytest.raises(VerificationError, match=r"IRC13[5-8]"):
                verify_schedule(broken, {}, tiers=TIERS)
            if step in matter and is_float(schedule, storage):
                with pytest.raises((AssertionError, RuntimeError)):
                    assert_same(after_a_step(known, broken, fakes(is_late=True)), known.wanted)
                caught += 1
    assert caught > 3


def test_checksums_see_what_a_missing_wait_leaves() -> None:
    known = original("transformer layer")
    schedule = with_random_copies(keep_all(known.captured.graph), 0, rate=1.0)
    caught = 0
    for step in sorted(waits_that_matter(schedule))[:24]:
        if waited_for(schedule, step) is Offload:
            with pytest.raises(TierError, match=r"IRC574.*came back from tier .* with other bytes"):
                after_a_step(known, without(schedule, step), fakes(is_late=True, checks=True))
            caught += 1
    assert caught > 5


# ---------------------------------------------------------------------- the source


def test_the_emitted_source_says_what_is_copied() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2, bias=False))
    graph = capture(module, (torch.randn(2, 4),)).graph
    plain = keep_all(graph).instructions
    loss = next(k for k, i in enumerate(plain) if isinstance(i, Loss))
    made = next(i for i in plain if isinstance(i, Compute) and i.node.name == "sigmoid")
    (sigmoid,) = graph.allocates(made.node)
    before = plain.index(made) + 1
    away = (Wait(sigmoid), Free(sigmoid), Fetch(sigmoid, "disk"))
    order = (*plain[:before], Offload(sigmoid, "disk"), *plain[before : loss + 1], *away, Wait(sigmoid))
    schedule = Schedule(graph, (*order, *plain[loss + 1 :]))
    verify_schedule(schedule, {}, tiers=(Tier("disk", 24, 1.0, 1.0),))
    assert emit_source(schedule).partition('"""\n\n')[2] == SOURCE


SOURCE = """import torch

aten_t = torch.t
aten_addmm = torch.addmm
aten_sigmoid = torch.sigmoid
aten_mm = torch.mm
aten_sigmoid_backward = torch.ops.aten.sigmoid_backward.default
aten_sum_dim_IntList = torch.sum
aten_view = torch.Tensor.view

# inputs:
#   primals_1: parameter 0.weight
#   primals_2: parameter 0.bias
#   primals_3: parameter 2.weight
#   primals_4: input 0

# copies:
#   0: sigmoid to disk, 24 B


def forward(inputs, copies):
    primals_1 = inputs[0]
    primals_2 = inputs[1]
    primals_3 = inputs[2]
    primals_4 = inputs[3]
    # module 0
    addmm = aten_addmm(primals_2, primals_4, aten_t(primals_1))
    # module 1
    sigmoid = aten_sigmoid(addmm)
    copies.offload(0, sigmoid)
    del addmm
    # module 2
    mm = aten_mm(sigmoid, aten_t(primals_3))
    return [mm], [sigmoid]


def backward(inputs, saved, tangents, copies):
    (sigmoid,) = saved
    saved.clear()
    primals_3 = inputs[2]
    primals_4 = inputs[3]
    tangents_1 = tangents[0]
    copies.wait(0)
    del sigmoid
    sigmoid = copies.fetch(0)
    copies.wait(0)
    copies.drop(0)
    # module 2
    mm_1 = aten_mm(aten_t(tangents_1), sigmoid)
    mm_2 = aten_mm(tangents_1, primals_3)
    # module 1
    sigmoid_backward = aten_sigmoid_backward(mm_2, sigmoid)
    del mm_2
    del sigmoid
    # module 0
    mm_3 = aten_mm(aten_t(sigmoid_backward), primals_4)
    sum_1 = aten_sum_dim_IntList(sigmoid_backward, [0], True)
    del sigmoid_backward
    return [aten_t(aten_t(mm_3)), aten_view(sum_1, [3]), aten_t(aten_t(mm_1))]
"""


def test_without_copies_nothing_of_them_is_emitted() -> None:
    captured = original("batch-norm and dropout").captured
    assert "copies" not in emit_source(keep_all(captured.graph))
