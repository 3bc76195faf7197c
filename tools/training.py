"""Trains a few steps, measures memory and time, and compares with the original model."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..ir import Gradients, Plan
from ..ir.nesting import flatten
from ..passes.allocations import peak_bytes
from .loading import training_loss

__all__ = ["Comparison", "Step", "compare", "measured_peak_bytes", "train"]

_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Args:
        loss: Value of the loss.
        seconds: Time of forward, loss and backward: processor seconds on CPU, else seconds of the clock.
    """

    loss: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Steps of two modules side by side, from the same weights, on the same inputs.

    Args:
        original: The original's steps.
        fitted: The fitted module's steps.
        gradient_difference: Largest absolute difference of a gradient's element, over all steps; infinite
            where one of them is not a number and the other is.
        gradient_scale: Largest absolute element of a gradient of the original.
        worst_gradient: Largest difference of a gradient as a multiple of what is allowed: 1e-4 of its own
            largest element and 1e-6 of the largest of all.
        buffer_difference: Largest absolute difference of a buffer's element, over all steps.
        same_gradients: Whether the same parameters and inputs had gradients.
        same_generator: Whether the random generator was in the same state after each step.
    """

    original: tuple[Step, ...]
    fitted: tuple[Step, ...]
    gradient_difference: float
    gradient_scale: float
    worst_gradient: float
    buffer_difference: float
    same_gradients: bool
    same_generator: bool

    @property
    def loss_difference(self) -> float:
        """Largest absolute difference of a step's loss."""
        pairs = zip(self.original, self.fitted, strict=True)
        return max(_difference(torch.tensor(a.loss), torch.tensor(b.loss)) for a, b in pairs)

    @property
    def agrees(self) -> bool:
        """Whether the numbers are the same, gradient by gradient, up to rounding."""
        losses = max((abs(step.loss) for step in self.original if math.isfinite(step.loss)), default=0.0)
        close = self.worst_gradient <= 1
        close &= self.loss_difference <= 1e-5 * losses and self.buffer_difference <= 1e-5
        return close and self.same_gradients and self.same_generator

    @property
    def is_equal(self) -> bool:
        """Whether losses, gradients and buffers are the same bit for bit."""
        largest = max(self.loss_difference, self.gradient_difference, self.buffer_difference)
        return self.agrees and largest == 0

    @property
    def time_ratio(self) -> float:
        """Best step of the fitted module over best step of the original, interleaved."""
        best = min(s.seconds for s in self.original)
        return min(s.seconds for s in self.fitted) / max(best, 1e-9)


def train(module: nn.Module, inputs: Sequence[Any], steps: int) -> list[Step]:
    """Trains `steps` steps of plain SGD on the same inputs."""
    return [_step(module, inputs) for _ in range(steps)]


def measured_peak_bytes(
    module: nn.Module,
    inputs: Sequence[Any],
    static_bytes: int,
    *,
    keywords: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] = training_loss,
    forwards: int = 1,
    with_gradients: bool = False,
) -> int:
    """The peak of one training step, from allocator events, with what exists before it, in bytes.

    The module's numbers are as before afterwards: parameters, buffers, the state of optimizers in backward
    and the generator are put back, gradients cleared. A module that releases its gradients takes a step
    before the one that is measured, so that what its plan reserves (`.grad`, optimizer state) is there.

    Args:
        module: A module that has run at least once (kernels choose their workspaces on the first run).
        inputs: Arguments of the step.
        static_bytes: Bytes of parameters, buffers and inputs, which the events do not show; for a module that
            releases its gradients with the reserved bytes, and where several forwards are in flight with the
            inputs of each of them.
        keywords: Keyword arguments of the step.
        loss: A function from the result to a scalar; the result is held until backward ends.
        forwards: How many are in flight: all run, then their losses, then one backward for all, which is the
            order that takes most.
        with_gradients: Leave the gradients of a step before, and count them: the ones of this step are added.
    """
    _clear_gradients(module, inputs)
    there_bytes = 0
    calls = [tuple(inputs), *(_copied(inputs) for _ in range(1, forwards))]
    with torch.random.fork_rng(), _restored(module):
        on_cuda = any(parameter.is_cuda for parameter in module.parameters())
        if forwards > 1:
            run = _forwards_backward(module, calls, keywords, loss)
        else:
            run = _forward_backward(module, inputs, keywords, loss)
        if _releases_gradients(module) or with_gradients:
            run()
            for call in calls:
                _clear_input_gradients(call)
        if with_gradients and not _releases_gradients(module):
            gradients = {id(p): p.grad for p in module.parameters() if p.grad is not None}
            there_bytes = sum(gradient.untyped_storage().nbytes() for gradient in gradients.values())
        peak = _cuda_peak_bytes(run) if on_cuda else peak_bytes(run)
    _clear_gradients(module, inputs)
    return peak + static_bytes + there_bytes


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


def _releases_gradients(module: nn.Module) -> bool:
    plans: tuple[object, ...] = getattr(module, "irc_plan", None), getattr(module, "plan", None)
    found = (plan.gradients for plan in plans if isinstance(plan, Plan))
    return next(found, Gradients.RETURNED.value) != Gradients.RETURNED.value


@contextlib.contextmanager
def _restored(module: nn.Module) -> Generator[None]:
    """Afterwards, buffers are as before, and where optimizers run in backward, parameters and their state."""
    optimizers: dict[str, Optimizer] = getattr(module, "irc_optimizers", {})
    states = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in optimizers.items()}
    tensors = [*module.buffers(), *(module.parameters() if optimizers else ())]
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
) -> Comparison:
    """Trains both side by side, one step of the one and one of the other.

    Args:
        original: The original; its weights and buffers must equal the fitted module's.
        fitted: The fitted module, with its own weights.
        inputs: Arguments of each step.
        steps: How many.
        original_inputs: The same numbers as the original takes them, where it takes them otherwise.
    """
    given = inputs if original_inputs is None else original_inputs
    of_original: list[Step] = []
    of_fitted: list[Step] = []
    difference = scale = worst = buffer_difference = 0.0
    same_gradients = same_generator = True
    for _ in range(steps):
        before = _generator_states()
        of_original.append(_step(original, given, update=False))
        after = _generator_states()
        _restore_generators(before)
        of_fitted.append(_step(fitted, inputs, update=False))
        same_generator &= all(map(torch.equal, after, _generator_states()))
        found = _gradients(fitted, inputs)
        differences: dict[str, tuple[float, float]] = {}
        for name, expected in _gradients(original, given).items():
            if (mine := found.pop(name, None)) is None:
                same_gradients = False
                continue
            differences[name] = _difference(expected, mine), _largest(expected)
        difference = max([difference, *(d for d, _ in differences.values())])
        scale = max([scale, *(s for _, s in differences.values())])
        allowed = ((d, 1e-4 * own + 1e-6 * scale) for d, own in differences.values())
        worst = max([worst, *(0.0 if d == 0 else d / limit if limit else math.inf for d, limit in allowed)])
        same_gradients &= not found
        buffers = dict(fitted.named_buffers())
        for name, value in original.named_buffers():
            if name in buffers:
                buffer_difference = max(buffer_difference, _difference(value, buffers[name]))
        _update(original)
        _update(fitted)
    return Comparison(
        tuple(of_original),
        tuple(of_fitted),
        difference,
        scale,
        worst,
        buffer_difference,
        same_gradients,
        same_generator,
    )


def _gradients(module: nn.Module, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The gradients that a step left, of parameters by name and of inputs by position."""
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors |= {f"input {index}": leaf for index, leaf in enumerate(_tensors(inputs))}
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


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


def _step(module: nn.Module, inputs: Sequence[Any], *, update: bool = True) -> Step:
    _clear_gradients(module, inputs)
    on_cuda = any(parameter.is_cuda for parameter in module.parameters())
    clock = time.perf_counter if on_cuda else time.process_time
    start = clock()
    loss = _forward_backward(module, inputs)()
    if on_cuda:
        torch.cuda.synchronize()
    seconds = clock() - start
    if update:
        _update(module)
    return Step(loss.item(), seconds)


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


def _largest(tensor: Tensor) -> float:
    """The largest absolute finite element."""
    elements = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(elements.double().nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


def _difference(expected: Tensor, found: Tensor) -> float:
    """The largest absolute difference of two elements; none where both are nan, or equal infinities."""
    if torch.equal(expected, found):
        return 0.0
    if expected.shape != found.shape:
        return math.inf
    pair = (torch.view_as_real(t) if t.is_complex() else t for t in (expected, found))
    a, b = (t.detach().double() for t in pair)
    differences = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(differences.nan_to_num(math.inf).max())


def _cuda_peak_bytes(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
