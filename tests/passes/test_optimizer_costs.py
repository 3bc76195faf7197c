"""What optimizers take for one parameter, and which of them cannot take it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from irc.ir import DType, Storage, TensorType, UnsupportedError, UsageError, Value
from irc.passes.costs import allocations
from irc.passes.costs.optimizer_costs import OptimizerFactory, optimizer_of, step_costs

torch.set_num_threads(1)


def parameter(*shape: int, dtype: DType = DType.FLOAT32) -> Value:
    type = TensorType.contiguous(shape, dtype)
    name = "x".join(map(str, shape)) or "scalar"
    return Value(name, type, Storage(name, type.nbytes))


MATRIX, VECTOR = parameter(40, 30), parameter(40)

STEPS: dict[str, tuple[OptimizerFactory, int, int]] = {
    # state and workspace in copies of the parameter; scalars of the state beside them
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
    "SGD with decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), 0, 1),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0),
    "AdamW": (lambda p: torch.optim.AdamW(p), 2, 2),
    "AdamW with the largest squares": (lambda p: torch.optim.AdamW(p, amsgrad=True), 3, 2),
    "Adagrad": (lambda p: torch.optim.Adagrad(p), 1, 1),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, momentum=0.1), 2, 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_state_and_workspace_are_those_of_the_optimizer(name: str) -> None:
    factory, state, workspace = STEPS[name]
    for value, cost in step_costs(factory, [MATRIX, VECTOR]).items():
        assert 0 <= cost.state_bytes - state * value.type.nbytes <= 8
        assert 0 <= cost.workspace_bytes - workspace * value.type.nbytes <= 32
        assert cost.seconds > 0


@pytest.mark.parametrize("name", STEPS)
def test_a_later_step_takes_from_the_allocator_what_was_measured(name: str) -> None:
    factory = STEPS[name][0]
    trained = nn.Parameter(torch.randn(40, 30))
    trained.grad = torch.randn(40, 30)
    optimizer = factory([trained])
    optimizer.step()
    held = [t for t in optimizer.state[trained].values() if isinstance(t, torch.Tensor)]
    measured = step_costs(factory, [MATRIX])[MATRIX]
    assert allocations.peak_bytes(optimizer.step) == measured.workspace_bytes
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == measured.state_bytes


def test_memory_that_only_later_steps_take_is_seen() -> None:
    def radam(params: list[nn.Parameter]) -> Optimizer:
        return torch.optim.RAdam(params)

    trained = nn.Parameter(torch.randn(40, 30))
    trained.grad = torch.randn(40, 30)
    optimizer = radam([trained])
    peaks = [allocations.peak_bytes(optimizer.step) for _ in range(9)]
    state_bytes = 2 * trained.nbytes  # the first step makes it
    assert max(peaks[1:]) > max(peaks[1:3])
    assert step_costs(radam, [MATRIX])[MATRIX].workspace_bytes >= max(peaks[1:]) > 0
    assert step_costs(radam, [MATRIX])[MATRIX].state_bytes >= state_bytes


def test_each_type_is_measured_once_and_nothing_else_is_touched() -> None:
    made: list[list[nn.Parameter]] = []

    def factory(params: list[nn.Parameter]) -> Optimizer:
        made.append(params)
        return torch.optim.SGD(params, lr=0.1)

    twin = parameter(40, 30)
    before = torch.get_rng_state()
    costs = step_costs(factory, [MATRIX, twin, VECTOR])
    assert costs[twin] is costs[MATRIX] and set(costs) == {MATRIX, twin, VECTOR}
    alone = [tuple(params[0].shape) for params in made if len(params) == 1]
    assert alone.count(MATRIX.type.shape) == alone.count(VECTOR.type.shape) == 4
    assert torch.equal(torch.get_rng_state(), before)
    assert step_costs(factory, []) == {}


class Clipping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(params, 1.0)
        super().step()


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter))
        super().step()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), r"LBFGS\.step\(\) does not run, it needs a closure"),
        (lambda p: torch.optim.SparseAdam(p), r"SparseAdam\.step\(\) does not run, RuntimeError"),
        (lambda p: Clipping(p, lr=0.1), "depends on other parameters' gradients"),
        (lambda p: Noisy(p, lr=0.1), "draws random numbers"),
    ],
)
def test_an_optimizer_that_needs_more_than_one_gradient_is_refused(
    factory: OptimizerFactory, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"IRC508.*{message}") as caught:
        step_costs(factory, [MATRIX, VECTOR])
    assert caught.value.help is not None and "after backward" in caught.value.help


def nothing(params: list[nn.Parameter]) -> Any:
    return None


OTHERS = [nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=-1.0), "ValueError: Invalid learning rate: -1.0"),
        (nothing, "returns a NoneType, no Optimizer"),
        (lambda p: torch.optim.SGD(OTHERS), "holds 1 parameters, not just the 2 that it is to have"),
        (lambda p: torch.optim.Muon(p), "Muon only supports 2D parameters"),
    ],
)
def test_a_factory_that_makes_no_optimizer_of_these_parameters_is_refused(
    factory: OptimizerFactory, message: str
) -> None:
    with pytest.raises(UsageError, match=f"IRC508.*{message}") as caught:
        step_costs(factory, [VECTOR])
    assert caught.value.help is not None and "lambda params" in caught.value.help


def test_an_optimizer_of_one_parameter_holds_that_one() -> None:
    trained = nn.Parameter(torch.zeros(2))
    optimizer = optimizer_of(lambda p: torch.optim.SGD([{"params": p, "lr": 0.5}]), [trained])
    assert optimizer.param_groups[0]["params"][0] is trained
    with pytest.raises(UsageError, match="IRC508"):
        optimizer_of(lambda _: torch.optim.SGD(OTHERS), [trained])
