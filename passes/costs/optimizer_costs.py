"""Measures an optimizer's step for one parameter on made-up tensors: state, workspace, time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...ir import IrcError, Storage, TensorType, UnsupportedError, UsageError, Value, allocation_bytes
from ...torch_support.optimizer_state import moving_state
from .profiling import allocation_levels, made_up, one_thread, run_seconds
from .table import StepCost

__all__ = ["OptimizerFactory", "extrapolated_step_costs", "optimizer_of", "step_costs"]

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the optimizer of a list of parameters, such as `lambda params: torch.optim.SGD(params, lr=0.1)`."""

_STEPS = 3

_MEMORY_STEPS = 8
"""The number of steps that show what memory is taken: RAdam takes more from its sixth one on."""


def optimizer_of(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> Optimizer:
    """Makes the optimizer of these parameters alone, in whatever groups.

    Raises:
        UsageError: IRC508 when the factory fails, or makes something else.
    """
    advice = "give a function such as lambda params: torch.optim.AdamW(params, lr=1e-3)"
    try:
        made = cast(object, factory(list(parameters)))
    except Exception as error:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in parameters)
        raise UsageError(
            "IRC508",
            f"no optimizer can be made for parameters of shapes {shapes}: {type(error).__name__}: {error}",
            help=advice,
        ) from error
    if not isinstance(made, Optimizer):
        raise UsageError(
            "IRC508", f"the optimizer's factory returns a {type(made).__name__}, no Optimizer", help=advice
        )
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    if sorted(map(id, held)) != sorted(map(id, parameters)):
        raise UsageError(
            "IRC508",
            f"the optimizer holds {len(held)} parameters, not just the {len(parameters)} that it is to have",
            help=f"use the factory's argument; {advice}",
        )
    return made


def step_costs(factory: OptimizerFactory, parameters: Sequence[Value]) -> dict[Value, StepCost]:
    """Measures a step of the factory's optimizer for each parameter by itself.

    Each distinct type of parameter is measured once, on a made-up parameter and gradient. No parameter and
    no optimizer of the user is touched; the generators' states are as before.

    Raises:
        UsageError: IRC508 when the factory fails.
        UnsupportedError: IRC508 when the optimizer needs more than one parameter and its gradient: a closure,
            the other gradients, or random numbers.
    """
    types = list(dict.fromkeys(parameter.type for parameter in parameters))
    if not types:
        return {}
    with torch.random.fork_rng(devices=_cuda_devices(types)):
        _check_separable(factory, types)
        measured = dict(zip(types, _measured(factory, types), strict=True))
    return {parameter: measured[parameter.type] for parameter in parameters}


_LARGE_BYTES = 1 << 24
"""Parameters beyond this size are not made up where costs may be extrapolated."""


def extrapolated_step_costs(
    factory: OptimizerFactory, types: Iterable[TensorType]
) -> dict[TensorType, StepCost]:
    """Estimates the costs of steps for parameters that may be too large to be made up.

    A large one is measured with two numbers of rows of its own size. Its state, workspace and time are
    extrapolated: they are linear in its rows, for factored states too.

    Raises:
        IrcError: As `step_costs`.
    """
    found: dict[TensorType, StepCost] = {}
    for type in dict.fromkeys(types):
        rows = type.shape[0] if type.shape else 1
        few = max(_LARGE_BYTES // 2 // max(type.nbytes // max(rows, 1), 1), 1)
        sizes = (rows,) if type.nbytes <= _LARGE_BYTES or 2 * few >= rows else (few, 2 * few)
        smaller = [TensorType.contiguous((size, *type.shape[1:]), type.dtype, type.device) for size in sizes]
        if not type.shape:
            smaller = [type]
        values = [
            Value("parameter", each, Storage("parameter", each.nbytes, each.device)) for each in smaller
        ]
        measured = list(step_costs(factory, values).values())
        found[type] = _at(rows, sizes, measured)
    return found


def _at(rows: int, sizes: Sequence[int], costs: Sequence[StepCost]) -> StepCost:
    """The cost for a number of rows on the line through the costs for one or two others."""
    low, high = costs[0], costs[-1]
    part = (rows - sizes[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else 0.0

    def on_line(first: float, last: float) -> float:
        return first + (last - first) * part

    return StepCost(
        math.ceil(on_line(low.state_bytes, high.state_bytes)),
        math.ceil(on_line(low.workspace_bytes, high.workspace_bytes)),
        on_line(low.seconds, high.seconds),
        math.ceil(on_line(low.moving_bytes, high.moving_bytes)),
    )


def _check_separable(factory: OptimizerFactory, types: Sequence[TensorType]) -> None:
    """Refuses an optimizer that takes another step for two parameters than for each by itself.

    It is tried on two small parameters of each rank, whose gradients differ much in size. An optimizer is not
    found out if it looks at all gradients only now and then, or only if they are larger than these.
    """
    smallest: dict[int, TensorType] = {}
    for type in sorted(types, key=lambda type: type.nbytes):
        smallest.setdefault(len(type.shape), type)
    together, apart = (
        [_scratch(type, scale) for type in smallest.values() for scale in (1.0, 300.0)] for _ in range(2)
    )
    devices = _cuda_devices(types)
    before = _generator_states(devices)
    _steps(optimizer_of(factory, together))
    for parameter in apart:
        _steps(optimizer_of(factory, [parameter]))
    if not all(map(torch.equal, before, _generator_states(devices))):
        raise _inseparable("it draws random numbers, which would come in another order")
    for mine, its in zip(together, apart, strict=True):
        if not torch.allclose(mine, its, rtol=8 * torch.finfo(mine.dtype).eps, atol=0, equal_nan=True):
            raise _inseparable("its step for a parameter depends on other parameters' gradients")


def _inseparable(why: str) -> UnsupportedError:
    return UnsupportedError(
        "IRC508",
        f"the optimizer cannot take its steps parameter by parameter: {why}",
        help="use it after backward (accumulate_gradients=True, or neither), or another optimizer",
    )


def _scratch(type: TensorType, scale: float = 1.0) -> nn.Parameter:
    """A made-up parameter with a made-up gradient."""
    parameter = nn.Parameter(made_up(type))
    parameter.grad = made_up(type).mul_(scale)
    return parameter


def _steps(optimizer: Optimizer) -> None:
    for _ in range(_STEPS):
        _step(optimizer)


def _step(optimizer: Optimizer) -> None:
    try:
        optimizer.step()
    except IrcError:
        raise
    except Exception as error:
        needs = "it needs a closure" if "closure" in str(error) else f"{type(error).__name__}: {error}"
        raise _inseparable(f"{type(optimizer).__name__}.step() does not run, {needs}") from error


def _cuda_devices(types: Iterable[TensorType]) -> list[str]:
    return sorted({type.device for type in types if type.device.startswith("cuda")})


def _generator_states(devices: Iterable[str]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _measured(factory: OptimizerFactory, types: Sequence[TensorType]) -> list[StepCost]:
    """Measures the costs of steps for each type of parameter; the first step makes the state."""
    with one_thread():
        timed = [_timed(factory, type) for type in types]
    device = next(iter(_cuda_devices(types)), "cpu")
    levels = iter(allocation_levels(_runs(factory, types), device))
    costs: list[StepCost] = []
    for best_seconds, moving_bytes in timed:
        made, *steps = islice(levels, 1 + _MEMORY_STEPS)
        held = list(accumulate((level.left_bytes for level in steps), initial=made.left_bytes))
        state_bytes = max(held)
        peak_bytes = max(before + level.peak_bytes for before, level in zip(held, steps, strict=False))
        costs.append(StepCost(state_bytes, peak_bytes - state_bytes, best_seconds, moving_bytes))
    return costs


def _timed(factory: OptimizerFactory, type: TensorType) -> tuple[float, int]:
    """The time of a step, and the bytes of the state that could live in a tier."""
    parameter = _scratch(type)
    optimizer = optimizer_of(factory, [parameter])
    _steps(optimizer)
    seconds = min(run_seconds(lambda: _step(optimizer), type.device) for _ in range(_STEPS))
    moving = moving_state(optimizer, parameter).values()
    return seconds, sum(allocation_bytes(tensor.nbytes, type.device) for tensor in moving)


def _runs(factory: OptimizerFactory, types: Iterable[TensorType]) -> Iterator[Callable[[], None]]:
    """Makes an optimizer for each type, which may make its state, and takes its first steps."""
    for type in types:
        parameters = [_scratch(type)]
        made: list[Optimizer] = []
        yield lambda made=made, parameters=parameters: made.append(optimizer_of(factory, parameters))
        for _ in range(_MEMORY_STEPS):
            yield partial(_step, made[0])
