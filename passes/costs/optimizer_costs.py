"""Measures an optimizer's step for one parameter on made-up tensors: state, workspace, time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
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

_OFF_LINE = 0.01
"""A cost is off the line if it is further from it than by this part."""


def extrapolated_step_costs(
    factory: OptimizerFactory, types: Iterable[TensorType]
) -> dict[TensorType, StepCost]:
    """Estimates the costs of steps for parameters that may be too large to be made up.

    A large one is measured at three sizes of its longest dimension. Its state, workspace and time are on the
    line through two of them, if the third one's bytes are: they are for steps element by element, and for
    states that are factored. Else it is made up.

    Raises:
        IrcError: As `step_costs`.
    """
    return {type: _extrapolated(factory, type) for type in dict.fromkeys(types)}


def _extrapolated(factory: OptimizerFactory, type: TensorType) -> StepCost:
    length = max(type.shape, default=1)
    at = type.shape.index(length) if type.shape else 0
    few = max(_LARGE_BYTES // 3 // max(type.nbytes // max(length, 1), 1), 1)
    if type.nbytes > _LARGE_BYTES and 3 * few < length:
        shapes = [(*type.shape[:at], few * k, *type.shape[at + 1 :]) for k in (1, 2, 3)]
        low, middle, high = _costs_of(
            factory, [TensorType.contiguous(shape, type.dtype, type.device) for shape in shapes]
        )
        if _is_near(_between(low, high, 0.5), middle):
            return _between(low, high, (length - few) / (2 * few))
    return _costs_of(factory, [type])[0]


def _costs_of(factory: OptimizerFactory, types: Sequence[TensorType]) -> list[StepCost]:
    values = [Value("parameter", type, Storage("parameter", type.nbytes, type.device)) for type in types]
    return list(step_costs(factory, values).values())


def _between(low: StepCost, high: StepCost, part: float) -> StepCost:
    """The cost on the line through two others, at this part of the way."""
    state, workspace, seconds, moving = (
        first + (last - first) * part for first, last in zip(astuple(low), astuple(high), strict=True)
    )
    return StepCost(math.ceil(state), math.ceil(workspace), seconds, math.ceil(moving))


def _is_near(guessed: StepCost, known: StepCost) -> bool:
    pairs = (guessed.state_bytes, known.state_bytes), (guessed.workspace_bytes, known.workspace_bytes)
    return all(abs(a - b) <= max(_OFF_LINE * b, _SLACK_BYTES) for a, b in pairs)


_SLACK_BYTES = 1024
"""The bytes that rounding takes a cost off the line by."""


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
