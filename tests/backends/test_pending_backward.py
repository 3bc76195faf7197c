"""What waits for its backward: how it is told apart, what it holds, and that it can go on with less."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from irc.backends.torch import (
    AliveTensors,
    PendingBackward,
    Program,
    compile_program,
    held_by_history,
    run_step,
    saved_values,
    storage_key,
)
from irc.frontends.torch import Captured, capture
from irc.ir import BackwardError, InputRole, Schedule
from irc.passes import CheckpointProblem, analytic_costs
from irc.passes.costs.machines import machine_named

X = torch.linspace(-1, 1, 64).reshape(8, 8)


def programs(module: nn.Module) -> tuple[Captured, list[tuple[Program, Schedule]]]:
    """A module's step that keeps everything, and one that keeps nothing."""
    captured = capture(module, (X,))
    problem = CheckpointProblem(captured.graph, analytic_costs(captured.graph, machine_named("cpu")))
    schedules = [problem.keep_all.schedule, problem.keeping(()).schedule]
    return captured, [(compile_program(schedule, {}), schedule) for schedule in schedules]


def inputs_of(module: nn.Module, captured: Captured) -> list[Tensor]:
    statics = (i for i in captured.graph.inputs if i.role is not InputRole.TANGENT)
    return [module.get_parameter(i.target) if i.role is InputRole.PARAMETER else X for i in statics]


def positions(kept: Schedule, less: Schedule) -> list[int]:
    return [saved_values(kept).index(value) for value in saved_values(less)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def test_a_step_goes_on_by_a_program_that_needs_less() -> None:
    module = model()
    captured, ((keeps, kept), (_, less)) = programs(module)
    program = compile_program(less, {})
    (out,) = run_step(keeps, inputs := inputs_of(module, captured), None)
    waiting = PendingBackward(keeps, inputs, [out])
    node: Any = out.grad_fn
    before = sum(tensor.nbytes for tensor in node.saved)
    assert waiting.is_pending and waiting.change(program, positions(kept, less))
    assert sum(tensor.nbytes for tensor in node.saved) < before
    out.sum().backward()
    assert not waiting.is_pending
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    module(X).sum().backward()
    for a, b in zip(found, module.parameters(), strict=True):
        assert a is not None and b.grad is not None and torch.equal(a, b.grad)


def test_a_write_into_what_would_be_read_again_stops_the_change_and_one_after_it_raises() -> None:
    module = model()
    captured, ((keeps, kept), (program, less)) = programs(module)
    inputs = inputs_of(module, captured)
    (out,) = run_step(keeps, inputs, None)
    waiting = PendingBackward(keeps, inputs, [out])
    with torch.no_grad():
        module.get_parameter("0.bias").add_(1)  # backward does not read it, computing again would
    assert not waiting.change(program, positions(kept, less))
    out.sum().backward()
    (out,) = run_step(keeps, inputs, None)
    assert PendingBackward(keeps, inputs, [out]).change(program, positions(kept, less))
    with torch.no_grad():
        module.get_parameter("0.bias").add_(1)
    with pytest.raises(BackwardError, match=r"IRC524.*parameter 0\.bias"):
        out.sum().backward()


def test_what_was_dropped_waits_no_more() -> None:
    module = model()
    captured, ((program, schedule), _) = programs(module)
    inputs = inputs_of(module, captured)
    (out,) = run_step(program, inputs, None)
    waiting = PendingBackward(program, inputs, [out])
    assert waiting.is_behind(out.grad_fn) and not waiting.is_behind(None)
    assert not waiting.is_behind((out * 2).grad_fn)
    del out
    gc.collect()
    assert not waiting.is_pending and not waiting.change(program, positions(schedule, schedule))


def test_tensors_count_once_and_as_long_as_they_are_alive() -> None:
    alive = AliveTensors()
    a, parameter = torch.zeros(100), nn.Parameter(torch.zeros(10))
    alive.note((a, a[10:], parameter))
    key = storage_key(a)
    assert alive.alive_bytes() == 440 and alive.bytes_of([key, key]) == 400
    view = a[5:]
    del a
    assert alive.alive_bytes() == 440
    parameter.grad = torch.zeros(10)
    assert alive.alive_bytes() == 480
    del view
    assert alive.alive_bytes() == 80 and alive.bytes_of([key]) == 0
    parts = torch.zeros(1, 3).long(), torch.zeros(3)
    parameter.grad = torch.sparse_coo_tensor(*parts, (10,), check_invariants=True)
    del parts
    assert alive.alive_bytes() == 40 + 24 + 12
    parameter.grad = None
    assert alive.alive_bytes() == 40


def test_history_holds_what_its_operations_saved_up_to_what_is_known() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    middle = first(X).tanh()
    result = second(middle).exp()
    saved, leaves = held_by_history([result], lambda node: node is middle.grad_fn)
    assert {storage_key(tensor) for tensor in saved} == {
        storage_key(tensor) for tensor in (result, middle, second.weight)
    }
    assert {id(leaf) for leaf in leaves} == {id(second.weight), id(second.bias)}
    _, all_leaves = held_by_history([result], lambda _: False)
    assert len(all_leaves) == 4
    assert held_by_history([X, second.weight], lambda _: False) == ([], [])
