"""Runs the loop of a program on a module, one step at a time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .programs import Program, arguments

__all__ = [
    "OPTIMIZERS",
    "StepRecord",
    "around",
    "generator_states",
    "keeping_generators",
    "loss_of",
    "run",
]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}


@dataclass
class StepRecord:
    """A record of what a part of a step leaves: copies of tensors, and other values.

    Args:
        where: The step and its part.
        numbers: Outputs, losses, gradients, parameters and buffers by name; None if there is no gradient.
        states: Of generators.
        optimizer: Tensors of the optimizer's state, in order.
    """

    where: str = ""
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    optimizer: list[Tensor] = field(default_factory=list[Tensor])


def loss_of(program: Program) -> Callable[[Any], Tensor]:
    """The loss of a program's loop, from the model's result."""
    way = program.loop.loss

    def loss(result: Any) -> Tensor:
        leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        leaves = [torch.view_as_real(t) if t.is_complex() else t for t in leaves]
        if way == "first":
            leaves = leaves[:1]
        if way == "sums":
            return torch.stack([t.float().sum() * (i + 1) for i, t in enumerate(leaves)]).sum()
        if way == "means":
            return torch.stack([t.float().tanh().mean() * (i + 1) for i, t in enumerate(leaves)]).sum()
        return torch.stack([t.float().square().mean() for t in leaves]).sum()

    return loss


def around(program: Program, *, is_loss: bool = False) -> contextlib.AbstractContextManager[object]:
    """The context of a program's forwards, or of its losses."""
    is_on = program.loop.autocast == "all" or bool(program.loop.autocast and not is_loss)
    return torch.autocast("cpu", torch.bfloat16) if is_on else contextlib.nullcontext()


def generator_states() -> dict[str, Any]:
    """The states of torch's, Python's and numpy's generators."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = str((name, hash(np.asarray(keys).tobytes()), rest))
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy_state}


@contextlib.contextmanager
def keeping_generators() -> Generator[None]:
    """Leaves the generators as they are: a program runs once more between the parts of another run's step."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def run(
    program: Program, module: nn.Module, *, applies: bool = True
) -> Generator[StepRecord, StepRecord | None]:
    """Takes the steps of a program's loop, and yields what each part of a step leaves.

    The parts are each backward with its forwards, then what the loop makes of the gradients, then forwards
    beside training. `run` may be sent what the same part of another run left: its numbers are the module's
    before the next part, so that roundings do not add up, and what eager computes from them has equal bits.

    Args:
        program: The program.
        module: Its model, or the fitted one.
        applies: Whether the loop has the optimizer that the options name for backward.
    """
    loop, named = program.loop, program.options.get("optimizer_in_backward") if applies else None
    optimizer = None
    if named or (loop.optimizer and not program.options.get("optimizer_in_backward")):
        optimizer = OPTIMIZERS[named or loop.optimizer]([p for p in module.parameters() if p.requires_grad])
    number = 0
    for step in range(loop.steps):
        _seed(program.seed + step)
        if step == 1 and loop.freezes:
            next(module.parameters()).requires_grad_(False)
        _zero(module, loop.zeroing, is_forced=named is not None)
        for backward in range(loop.accumulated):
            record = StepRecord(f"step {step}, backward {backward}")
            inputs = [arguments(program, number + i) for i in range(loop.in_flight)]
            number += loop.in_flight
            _forwards_and_backward(program, module, inputs, record)
            if not program.options.get("optimizer_in_backward"):
                _note_gradients(record, "gradient", module)
            _restore((yield _ended(record, module)), module, optimizer)
        record = StepRecord(f"step {step}, update")
        if loop.clips:
            record.numbers["norm"] = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1).clone()
            _note_gradients(record, "clipped gradient", module)
        if optimizer is not None:
            optimizer.step()
            record.optimizer = [tensor.clone() for tensor in _tensors_of(optimizer)]
        record.numbers |= {f"parameter {name}": _copied(p) for name, p in module.named_parameters()}
        _restore((yield _ended(record, module)), module, optimizer)
        record = StepRecord(f"step {step}, forwards beside it")
        if loop.evaluates:
            _evaluate(module, program, record)
        if loop.looks:
            with torch.no_grad(), around(program):
                _note(record, f"look {step}", module(*arguments(program, 50)))
        if loop.evaluates or loop.looks:
            _restore((yield _ended(record, module)), module, optimizer)


def _ended(record: StepRecord, module: nn.Module) -> StepRecord:
    """The record, with what each part of a step may change."""
    record.numbers |= {f"buffer {name}": _copied(buffer) for name, buffer in module.named_buffers()}
    record.states = generator_states()
    return record


def _note_gradients(record: StepRecord, kind: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        record.numbers[f"{kind} of {name}"] = _copied(parameter.grad)


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _copied(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor.to_dense().clone() if tensor.layout != torch.strided else tensor.clone()


def _zero(module: nn.Module, way: str, *, is_forced: bool) -> None:
    if way != "never" or is_forced:
        module.zero_grad(set_to_none=way == "none" or is_forced)


def _note(record: StepRecord, name: str, result: Any) -> None:
    leaves, tree = pytree.tree_flatten(result)
    record.numbers[f"{name}, structure"] = str(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    record.numbers[f"{name}, other results"] = str([leaf for leaf in leaves if not isinstance(leaf, Tensor)])
    for index, tensor in enumerate(tensors):
        record.numbers[f"{name}, output {index}"] = _copied(tensor)
        record.numbers[f"{name}, output {index}, requires_grad"] = tensor.requires_grad


def _forwards_and_backward(program: Program, module: nn.Module, inputs: Any, record: StepRecord) -> None:
    loop, results, losses = program.loop, list[Any](), list[Tensor]()
    place = sum(name.endswith("structure") for name in record.numbers)
    for index, given in enumerate(inputs):
        with around(program):
            results.append(module(*given))
        _note(record, f"forward {place + index}", results[-1])
        with around(program, is_loss=True):
            losses.append(loss_of(program)(results[-1]))
    if loop.drops:
        results.clear()
    total = torch.stack(losses).sum()
    if loop.penalizes:
        total = total + 1e-3 * sum(
            (p.square().sum().float() for p in module.parameters() if p.requires_grad), torch.zeros(())
        )
    record.numbers[f"loss {place}"] = total.detach().clone()
    if loop.retains:
        total.backward(retain_graph=True)
    _backward(program, module, total, results)
    for index, given in enumerate(inputs):
        for tensor in given:
            record.numbers[f"gradient of input {place + index}"] = _copied(tensor.grad)
            record.numbers[f"input {place + index}"] = _copied(tensor)


def _backward(program: Program, module: nn.Module, total: Tensor, results: list[Any]) -> None:
    """Takes gradients in the way that the loop says."""
    first = next((leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)), None)
    match program.loop.gradient:
        case "grad":
            parameters = [p for p in module.parameters() if p.requires_grad]
            gradients: Any = torch.autograd.grad(total, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is not None and gradient is not None:
                    gradient = parameter.grad + gradient
                parameter.grad = gradient
        case "given" if first is not None and first.dim() == 3 and first.requires_grad:
            numbers = torch.linspace(-1, 1, first.numel()).view(first.shape[::-1])
            permuted = numbers.to(first.dtype).permute(2, 1, 0)
            torch.autograd.backward([total, first], [None, permuted])
        case _:
            total.backward()


def _evaluate(module: nn.Module, program: Program, record: StepRecord) -> None:
    was_training = module.training
    module.eval()
    with torch.no_grad():
        _note(record, "evaluation", module(*arguments(program, 51)))
    module.train(was_training)


def _restore(record: StepRecord | None, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Sets a module's numbers, and its optimizer's, to those of another run, if there is one."""
    if record is None:
        return
    tensors: Mapping[str, Any] = {
        **{f"parameter {name}": p for name, p in module.named_parameters()},
        **{f"buffer {name}": b for name, b in module.named_buffers()},
        **{f"gradient of {name}": p.grad for name, p in module.named_parameters()},
        **{f"clipped gradient of {name}": p.grad for name, p in module.named_parameters()},
    }
    with torch.no_grad():
        for name, tensor in tensors.items():
            value = record.numbers.get(name)
            if tensor is not None and value is not None and tensor.layout == torch.strided:
                tensor.detach().copy_(value)
        if optimizer is not None and record.optimizer:
            for one, other in zip(_tensors_of(optimizer), record.optimizer, strict=True):
                one.copy_(other)
