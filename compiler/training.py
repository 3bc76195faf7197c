"""Trains a few steps, measures memory and time, and compares with the original model."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..ir import Gradients, Plan, UsageError
from ..passes.costs.allocations import peak_bytes
from ..passes.costs.optimizer_costs import OptimizerFactory, optimizer_of
from ..torch_support.allocated import allocated_bytes, cuda_devices, dense_parts
from ..torch_support.pytree import flatten, tensors_of
from ..torch_support.without_data import lacks_data
from .compare import TOLERANCE, Differences, Numbers, Outcome, difference, differing, numbers_of
from .model_source import training_loss

__all__ = [
    "Comparison",
    "Differences",
    "Step",
    "check_measurable",
    "compare",
    "compare_step",
    "measured_peak_bytes",
    "measured_step",
    "optimizer_of_all",
    "train",
]

Result = TypeVar("Result")

_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Args:
        loss: Value of the loss.
        seconds: Time of forward, loss and backward, and of the optimizer if one is named: processor
            seconds on CPU, else seconds of the clock; those also if copies to tiers are waited for.
    """

    loss: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Steps of two modules side by side, from the same weights, on the same inputs.

    Args:
        original: The original's steps.
        fitted: The fitted module's steps.
        numbers: The numbers of each step, against the original's.
        parameters: If an optimizer takes the steps: how far parameters were apart after them; the
            gradients are then those of inputs. None if both take steps of plain SGD.
    """

    original: tuple[Step, ...]
    fitted: tuple[Step, ...]
    numbers: tuple[Numbers, ...]
    parameters: Differences | None = None

    @property
    def loss_difference(self) -> float:
        """Largest absolute difference of a step's loss."""
        pairs = zip(self.original, self.fitted, strict=True)
        return max(difference(torch.tensor(a.loss), torch.tensor(b.loss)) for a, b in pairs)

    @property
    def output_difference(self) -> float:
        """Largest absolute difference of an output's element, over all steps."""
        return max(numbers.outputs for numbers in self.numbers)

    @property
    def gradient_difference(self) -> float:
        """Largest absolute difference of a gradient's element, over all steps."""
        return max(numbers.gradients for numbers in self.numbers)

    @property
    def gradient_scale(self) -> float:
        """Largest absolute element of a gradient of the original."""
        return max(numbers.gradient_scale for numbers in self.numbers)

    @property
    def buffer_difference(self) -> float:
        """Largest absolute difference of a buffer's element, over all steps."""
        return max(numbers.buffers for numbers in self.numbers)

    @property
    def same_gradients(self) -> bool:
        """Whether the same parameters and inputs had gradients."""
        return all(numbers.same_gradients for numbers in self.numbers)

    @property
    def same_generator(self) -> bool:
        """Whether the random generators were in the same state after each step."""
        return all(numbers.same_generator for numbers in self.numbers)

    @property
    def agrees(self) -> bool:
        """Whether the numbers are the same up to rounding, tensor by tensor for gradients and parameters."""
        losses = max((abs(step.loss) for step in self.original if math.isfinite(step.loss)), default=0.0)
        close = self.parameters is None or self.parameters.worst <= 1
        close &= self.loss_difference <= TOLERANCE * losses
        return close and all(numbers.agrees for numbers in self.numbers)

    @property
    def is_equal(self) -> bool:
        """Whether losses, outputs, gradients or parameters, and buffers are the same bit for bit."""
        moved = 0.0 if self.parameters is None else self.parameters.largest
        equal = self.loss_difference == moved == 0 and all(numbers.bit_equal for numbers in self.numbers)
        return self.agrees and equal

    @property
    def time_ratio(self) -> float:
        """Best step of the fitted module over best step of the original, interleaved."""
        best = min(s.seconds for s in self.original)
        return min(s.seconds for s in self.fitted) / max(best, 1e-9)


def train(module: nn.Module, inputs: Sequence[Any], steps: int) -> list[Step]:
    """Trains `steps` steps on the same inputs: of plain SGD, if no optimizer runs within backward."""
    found: list[Step] = []
    for _ in range(steps):
        found.append(_step(module, inputs, _clock(module))[0])
        _update(module)
    return found


def check_measurable(module: nn.Module) -> None:
    """Refuses to measure a model without data.

    Raises:
        UsageError: IRC403.
    """
    if any(map(lacks_data, (*module.parameters(), *module.buffers()))):
        raise UsageError(
            "IRC403", "a model without data cannot be measured", help="leave out measure (--measure)"
        )


def measured_peak_bytes(
    module: nn.Module,
    inputs: Sequence[Any],
    static_bytes: int | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] = training_loss,
    forwards: int = 1,
    with_gradients: bool = False,
    optimizer: Optimizer | None = None,
    is_given_up: bool = False,
) -> int:
    """Measures the peak of one training step, from allocator events, with what exists before it, in bytes.

    The module's numbers are as before afterwards: parameters, buffers, the state of optimizers in backward
    and the generator are put back, gradients cleared. A module that releases its gradients takes a step
    before the one that is measured, so that what its plan reserves (`.grad`, optimizer state) is there.

    Args:
        module: A module that has run at least once (kernels choose their workspaces on the first run).
        inputs: Arguments of the step.
        static_bytes: Bytes of parameters, buffers and inputs, which the events do not show; for a module that
            releases its gradients with the reserved bytes, and if several forwards are in flight with the
            inputs of each of them. None takes those of the plan of this call, or counts parameters,
            buffers and inputs of a module without a plan.
        keywords: Keyword arguments of the step.
        loss: A function from the result to a scalar; the result is held until backward ends.
        forwards: How many are in flight: all run, then their losses, then one backward for all, which is the
            order that takes most.
        with_gradients: Leave the gradients of a step before, and count them: the ones of this step are added.
        optimizer: Takes its step after backward, and frees the gradients, within what is measured; its state
            is there, as after a step before, and is not counted. It is as before afterwards.
        is_given_up: Leave the module's numbers as they are then.
    """
    _clear_gradients(module, inputs)
    there_bytes = 0
    calls = [tuple(inputs), *(_copied(inputs) for _ in range(1, forwards))]
    kept = contextlib.nullcontext() if is_given_up else _restored(module, optimizer)
    with torch.random.fork_rng(), kept:
        device = next(iter(_cuda_devices(module, inputs)), "cpu")
        if forwards > 1:
            run = _forwards_backward(module, calls, keywords, loss)
        else:
            run = _forward_backward(module, inputs, keywords, loss)
        if optimizer is not None:
            run = _with_step(run, optimizer)
        if _releases_gradients(module) or with_gradients or optimizer is not None:
            run()
            for call in calls:
                _clear_input_gradients(call)
        if with_gradients and not _releases_gradients(module):
            gradients = {id(p): p.grad for p in module.parameters() if p.grad is not None}
            there_bytes = sum(map(allocated_bytes, gradients.values()))
        peak = peak_bytes(run, device)
        if static_bytes is None:
            static_bytes = _static_bytes(module, (inputs, keywords))
    _clear_gradients(module, inputs)
    return peak + static_bytes + there_bytes


def measured_step(module: nn.Module, step: Callable[[], Result], inputs: Any = ()) -> tuple[Result, int]:
    """Takes a step of your own loop, such as a trainer's, and measures its peak from allocator events.

    Args:
        module: The module that trains, fitted or not.
        step: Runs forward and backward.
        inputs: The batch, nested in any way; only for a module without a plan, whose plan would count it.

    Returns:
        What the step returns, and its peak in bytes, with all that exists before it: parameters, buffers,
        inputs, and gradients that are there. A call that is planned within it is measured with its planning.
    """
    results: list[Result] = []
    gradients = () if _releases_gradients(module) else (p.grad for p in module.parameters())
    there_bytes = sum(allocated_bytes(gradient) for gradient in gradients if gradient is not None)
    device = next(iter(_cuda_devices(module, [inputs])), "cpu")
    peak = peak_bytes(lambda: results.append(step()), device)
    return results[0], peak + _static_bytes(module, inputs) + there_bytes


def _static_bytes(module: nn.Module, arguments: Any) -> int:
    """Returns the static bytes of the plan that ran last, or those of parameters, buffers and arguments."""
    calls = getattr(module, "irc_plans", None) or [(None, getattr(module, "plan", None))]
    plan = calls[0][1]
    if isinstance(plan, Plan):
        return plan.static_bytes
    storages = {
        tensor.untyped_storage().data_ptr(): allocated_bytes(tensor)
        for tensor in (*module.parameters(), *module.buffers(), *tensors_of(arguments))
    }
    return sum(storages.values())


def _copied(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The same arguments in memory of their own."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return copy.deepcopy(leaf.detach()).requires_grad_(leaf.requires_grad)

    leaves, tree = flatten(tuple(inputs))
    return pytree.tree_unflatten(map(copied, leaves), tree)


def _forwards_backward(
    module: nn.Module,
    calls: Sequence[Sequence[Any]],
    keywords: Mapping[str, Any] | None,
    loss: Callable[[Any], Tensor],
) -> Callable[[], object]:
    """A step for each of the inputs: all forwards, all losses, and one backward."""

    def run() -> None:
        outputs = [module(*inputs, **(keywords or {})) for inputs in calls]
        torch.autograd.backward([loss(output) for output in outputs])

    return run


def _with_step(run: Callable[[], object], optimizer: Optimizer) -> Callable[[], object]:
    """A step of an ordinary loop: what runs, the optimizer, and no gradients left."""

    def stepped() -> None:
        run()
        optimizer.step()
        optimizer.zero_grad()

    return stepped


def _plan_of(module: nn.Module) -> Plan | None:
    plans: tuple[object, ...] = getattr(module, "irc_plan", None), getattr(module, "plan", None)
    return next((plan for plan in plans if isinstance(plan, Plan)), None)


def _releases_gradients(module: nn.Module) -> bool:
    plan = _plan_of(module)
    return plan is not None and plan.gradients != Gradients.RETURNED.value


@contextlib.contextmanager
def _restored(module: nn.Module, optimizer: Optimizer | None = None) -> Generator[None]:
    """Afterwards, buffers are as before, and parameters that are written, and the state of optimizers."""
    optimizers: dict[str, Optimizer] = dict(getattr(module, "irc_optimizers", {}))
    if optimizer is not None:
        optimizers[""] = optimizer
    states = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in optimizers.items()}
    written = module.parameters() if optimizers else getattr(module, "irc_written", ())
    tensors = [*module.buffers(), *written]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(states[name])


def compare(
    original: nn.Module,
    fitted: nn.Module,
    inputs: Sequence[Any],
    steps: int,
    *,
    original_inputs: Sequence[Any] | None = None,
    keywords: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] = training_loss,
    optimizer: OptimizerFactory | None = None,
) -> Comparison:
    """Trains both side by side, one step of the one and one of the other.

    Without an optimizer both take steps of plain SGD, and their gradients are compared. With one, the
    original has it in an ordinary loop, and the parameters are compared after each step.

    Args:
        original: The original; its weights and buffers must equal the fitted module's.
        fitted: The fitted module, with its own weights.
        inputs: Arguments of each step.
        steps: How many.
        original_inputs: The same numbers as the original takes them, if it takes them otherwise.
        keywords: Keyword arguments of each step.
        loss: A function from the result to a scalar.
        optimizer: Makes the optimizers that the fitted module has within backward.
    """
    given = inputs if original_inputs is None else original_inputs
    one = None if optimizer is None else optimizer_of_all(optimizer, original)
    clock = _clock(fitted)
    of_original: list[Step] = []
    of_fitted: list[Step] = []
    numbers: list[Numbers] = []
    parameters = Differences()
    for _ in range(steps):
        before = _generator_states()
        step, expected = _step(original, given, clock, one, keywords, loss)
        of_original.append(step)
        _restore_generators(before)
        step, found = _step(fitted, inputs, clock, None, keywords, loss)
        of_fitted.append(step)
        same_parameters, moved = True, dict[str, float]()
        if one is not None:
            there = dict(fitted.named_parameters())
            trained = {
                name: p
                for name, p in original.named_parameters()
                if name in there or name in expected.gradients
            }
            same_parameters = trained.keys() <= there.keys()
            parameters.add((p.detach(), there[name].detach()) for name, p in trained.items() if name in there)
            moved = differing({n: (p.detach(), there[n].detach()) for n, p in trained.items() if n in there})
            others = {name: g for name, g in expected.gradients.items() if name not in trained}
            expected = replace(expected, gradients=others)
        seen = numbers_of(expected, found)
        same = seen.same_gradients and same_parameters
        numbers.append(replace(seen, same_gradients=same, off={**seen.off, **moved}))
        if one is None:
            _update(original)
            _update(fitted)
    compared = None if one is None else parameters
    return Comparison(tuple(of_original), tuple(of_fitted), tuple(numbers), compared)


def compare_step(original: nn.Module, other: nn.Module, inputs: Sequence[Any], seed: int = 0) -> Numbers:
    """One forward and backward of both from the same generator, and how far they are apart.

    Buffers and the generators' states are as before afterwards; there are no gradients.

    Args:
        original: The reference.
        other: A module with equal weights and buffers under the same names; the weights may be the same
            tensors.
        inputs: Arguments of the step.
        seed: Of the generator before each of the two steps.
    """
    with torch.random.fork_rng(), _restored(original), _restored(other):
        outcomes: list[Outcome] = []
        for module in (original, other):
            torch.manual_seed(seed)
            outcomes.append(_step(module, inputs, _clock(module))[1])
            _clear_gradients(module, inputs)
        return numbers_of(*outcomes)


def optimizer_of_all(factory: OptimizerFactory, module: nn.Module) -> Optimizer:
    """The one optimizer of all that a module trains, as an ordinary loop has it.

    Raises:
        UsageError: IRC508 when the factory fails.
    """
    return optimizer_of(factory, [p for p in module.parameters() if p.requires_grad])


def _gradients(module: nn.Module, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The gradients that a step left, of parameters by name and of inputs by position."""
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors |= {f"input {index}": leaf for index, leaf in enumerate(_tensors(inputs))}
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.grad is not None:
            *indices, dense[name] = dense_parts(tensor.grad)
            dense.update((f"indices of {name}", part) for part in indices)
    return dense


def _tensors(inputs: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in flatten(tuple(inputs))[0] if isinstance(leaf, Tensor)]


def _clear_gradients(module: nn.Module, inputs: Sequence[Any]) -> None:
    module.zero_grad(set_to_none=True)
    _clear_input_gradients(inputs)


def _clear_input_gradients(inputs: Sequence[Any]) -> None:
    for tensor in _tensors(inputs):
        tensor.grad = None


def _generator_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def _restore_generators(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _cuda_devices(module: nn.Module, inputs: Sequence[Any]) -> list[torch.device]:
    return cuda_devices((*module.parameters(), *module.buffers(), *_tensors(inputs)))


def _synchronize(devices: Sequence[torch.device]) -> None:
    """Waits until GPUs have nothing left to do."""
    for device in devices:
        torch.cuda.synchronize(device)


def _clock(module: nn.Module) -> Callable[[], float]:
    """Seconds, see `Step`."""
    plan = _plan_of(module)
    waits = _cuda_devices(module, ()) or (plan is not None and plan.tiers)
    return time.perf_counter if waits else time.process_time


def _step(
    module: nn.Module,
    inputs: Sequence[Any],
    clock: Callable[[], float],
    optimizer: Optimizer | None = None,
    keywords: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] = training_loss,
) -> tuple[Step, Outcome]:
    """A step, with the optimizer's if there is one, and what it leaves."""
    outputs: list[Tensor] = []

    def noted(result: Any) -> Tensor:
        outputs.extend(leaf.detach() for leaf in flatten(result)[0] if isinstance(leaf, Tensor))
        return loss(result)

    _clear_gradients(module, inputs)
    devices = _cuda_devices(module, inputs)
    _synchronize(devices)
    start = clock()
    value = _forward_backward(module, inputs, keywords, noted)()
    if optimizer is not None:
        optimizer.step()
    _synchronize(devices)
    step = Step(value.item(), clock() - start)
    buffers = dict(module.named_buffers())
    return step, Outcome(outputs, _gradients(module, inputs), buffers, _generator_states())


def _forward_backward(
    module: nn.Module,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] = training_loss,
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        result = module(*inputs, **(keywords or {}))
        value = loss(result)
        value.backward()
        return value.detach()

    return run


def _update(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=_RATE)
