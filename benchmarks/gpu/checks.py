"""The checks: each takes a path on a device, and says what it found and which promise was broken."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import irc
from irc.compiler.model_source import training_loss
from irc.compiler.training import compare, compare_step, measured_peak_bytes
from irc.frontends.torch import capture
from irc.ir import BudgetError, Plan, format_bytes
from irc.passes.costs.allocations import allocation_events
from irc.passes.costs.this_machine import measure_machine

from . import models
from .models import Example

__all__ = ["CHECKS", "Check", "Found", "deterministic"]

_STEPS = 3
_UNWAITED = 8
"""Steps that follow one another while the device is still at work."""
_HOST = "host:1GiB"


@dataclass(frozen=True)
class Found:
    """Findings of a check.

    Args:
        figures: Bytes, rates and what was compared, for the table.
        failures: The promises that were broken, with numbers.
        budget_bytes: The budget.
        predicted_bytes: The plan's peak.
        measured_bytes: The allocator's, with what was there before the step.
    """

    figures: str
    failures: tuple[str, ...] = ()
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None


Run = Callable[[torch.device, float], Found]


@dataclass(frozen=True)
class Check:
    """A path, and what it needs.

    Args:
        name: For tables.
        run: Takes the path on a device, with so many seconds for the search of each plan.
        on_gpu: What only a GPU shows: left out on a CPU.
        needs_gpu: Whether nothing of it runs on a CPU.
        is_exact: Whether it runs with deterministic algorithms.
    """

    name: str
    run: Run
    on_gpu: str
    needs_gpu: bool = False
    is_exact: bool = True


@contextmanager
def deterministic() -> Generator[None]:
    """Lets torch choose kernels that give the same numbers each time, and never by timing them."""
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.benchmark = before[1]


# ---------------------------------------------------------------------- one plan


def _planned(make: Callable[[torch.device], Example], budget: str) -> Run:
    """A check of one model at one budget."""
    return lambda device, seconds: _check_plan(*_example(make, device), budget, seconds)


def _example(make: Callable[[torch.device], Example], device: torch.device) -> Example:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(device)


def _fit(module: nn.Module, args: Sequence[Any], budget: str, seconds: float, **options: Any) -> Any:
    """Fits a copy to a budget, or to the smallest one if that is more: workspaces differ between devices."""
    settings: dict[str, Any] = {"time_limit": seconds, "loss": training_loss, **options}
    try:
        return irc.optimize(copy.deepcopy(module), tuple(args), budget, **settings)
    except BudgetError as error:
        return irc.optimize(copy.deepcopy(module), tuple(args), error.minimum_bytes, **settings)


def _check_plan(module: nn.Module, args: Sequence[Any], budget: str, seconds: float) -> Found:
    """Fits a model, and compares numbers, generators and peaks with the original's."""
    before = _generators()
    fitted = _fit(module, args, budget, seconds)
    failures = [] if _same(before, _generators()) else ["planning moved a random generator"]
    numbers = compare_step(module, fitted, args)
    if not (numbers.bit_equal and numbers.same_gradients and numbers.same_generator):
        failures.append(f"numbers differ: {numbers}")
    again = sum(decision.action == "recompute" for decision in fitted.plan.decisions)
    figures = f"{numbers}; {again} tensors computed again" if again else str(numbers)
    return _measured(fitted, args, figures, failures)


def _measured(fitted: Any, args: Sequence[Any], figures: str, failures: Sequence[str]) -> Found:
    """Adds the peaks of a fitted module that has run, and what they break."""
    plan: Plan = fitted.plan
    measured = measured_peak_bytes(fitted, args, plan.static_bytes)
    broken: list[str] = []
    if measured != plan.peak_bytes:
        broken.append(f"measured {measured} B, predicted {plan.peak_bytes} B")
    if measured > plan.budget_bytes:
        broken.append(f"measured {measured} B, budget {plan.budget_bytes} B")
    return Found(figures, (*failures, *broken), plan.budget_bytes, plan.peak_bytes, measured)


def _generators() -> list[Tensor]:
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *states]


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def _flash_attention(device: torch.device, seconds: float) -> Found:
    module, args = _example(models.attention, device)
    nodes = capture(module, args).graph.operations
    traced = sum(models.ATTENTION in node.op for node in nodes)
    found = _check_plan(module, args, "80%", seconds)
    wanted = 6  # three blocks, forward and backward
    failures = () if traced == wanted else (f"{traced} operations of flash attention, not {wanted}",)
    figures = f"{found.figures}; {traced} operations of flash attention"
    return replace(found, figures=figures, failures=(*found.failures, *failures))


def _autocast(device: torch.device, seconds: float) -> Found:
    with torch.autocast(device.type, torch.bfloat16):
        return _check_plan(*_example(models.layers, device), "80%", seconds)


# ---------------------------------------------------------------------- several steps


def _train(
    original: nn.Module, fitted: nn.Module, args: Sequence[Any], optimizer: Any = None
) -> tuple[str, tuple[str, ...]]:
    """Trains both side by side; returns what was compared, and what differs."""
    seen = compare(original, fitted, args, _STEPS, optimizer=optimizer)
    text = f"{_STEPS} steps: " + ("bit-equal" if seen.is_equal else "; ".join(map(str, seen.numbers)))
    return text, () if seen.is_equal else (f"numbers differ: {text}",)


def _generator_after_steps(device: torch.device, seconds: float) -> Found:
    module, args = _example(models.random_numbers, device)
    fitted = _fit(module, args, "100%", seconds)
    text, failures = _train(module, fitted, args)
    drawn: list[Tensor] = []
    for each in (module, fitted):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            each(*args).backward()
            drawn.append(torch.rand(5, device=device))
    if not torch.equal(*drawn):
        failures = (*failures, "the numbers drawn after a step are others than in eager")
    return _measured(fitted, args, text, failures)


def _optimizer_in_backward(device: torch.device, seconds: float) -> Found:
    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    module, args = _example(models.layers, device)
    fitted = _fit(module, args, "80%", seconds, optimizer_in_backward=adamw)
    text, failures = _train(module, fitted, args, adamw)
    return _measured(fitted, args, text, failures)


# ---------------------------------------------------------------------- tiers and streams


def _copies(device: torch.device, seconds: float) -> Found:
    """Copies to pinned memory beside a GPU, else to a disk; steps run one after the other without waiting."""
    module, args = _example(models.convolutions, device)
    with tempfile.TemporaryDirectory() as folder:
        swap = _HOST if device.type == "cuda" else f"disk:{folder}:1GiB"
        fitted = _fit(module, args, "45%", seconds, swap=swap, strategy="swap")
        ends = [_descend(copy.deepcopy(each), args) for each in (module, fitted)]
        failures = [] if _same(*ends) else [f"parameters differ after {_UNWAITED} steps without waiting"]
        text, differ = _train(module, fitted, args)
        copied = [f"{format_bytes(tier.out_bytes)} to {tier.tier} and back" for tier in fitted.plan.tiers]
        if not copied:
            failures.append("the plan copies nothing")
        return _measured(fitted, args, "; ".join((text, *copied)), (*differ, *failures))


def _descend(module: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    """Trains by plain gradient descent, and never waits for the device; returns the parameters."""
    for _ in range(_UNWAITED):
        module.zero_grad()
        module(*args).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-2)
    return [parameter.detach() for parameter in module.parameters()]


def _side_stream(device: torch.device, seconds: float) -> Found:
    """Steps with copies on a stream of the caller's, beside the same steps on the default stream."""
    module, args = _example(models.convolutions, device)
    fitted = _fit(module, args, "45%", seconds, swap=_HOST, strategy="swap")
    expected = _descend(copy.deepcopy(fitted), args)
    other, stream = copy.deepcopy(fitted), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        found = _descend(other, args)
    torch.cuda.current_stream(device).wait_stream(stream)
    failures = () if _same(expected, found) else ("parameters differ from those of the default stream",)
    return Found(f"{_UNWAITED} steps on a stream of the caller's", failures)


def _allocator(device: torch.device, seconds: float) -> Found:
    """The events of the allocator beside its own counters, and what it reserves."""
    module, args = _example(models.layers, device)
    fitted = _fit(module, args, "80%", seconds)
    fitted(*args).backward()
    found = _measured(fitted, args, "", ())
    assert found.measured_bytes is not None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fitted(*args).backward()
    torch.cuda.synchronize(device)
    counted = torch.cuda.max_memory_allocated(device) - before + fitted.plan.static_bytes
    reserved = torch.cuda.max_memory_reserved(device)
    failures = list(found.failures)
    if counted < found.measured_bytes:
        failures.append(f"the allocator's counters say {counted} B, its events {found.measured_bytes} B")
    left = sum(allocation_events(lambda: torch.empty(1, device=device), device))
    if left:
        failures.append(f"by the events, a tensor that is gone takes {left} B")
    figures = f"counters {format_bytes(counted)}, reserved for all of the process {format_bytes(reserved)}"
    return replace(found, figures=figures, failures=tuple(failures))


def _machine(device: torch.device, seconds: float) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        machine = measure_machine(str(device), folder, quick=True).machine
    rates: Mapping[str, float] = {
        tier.name: min(tier.out_bytes_per_second, tier.in_bytes_per_second) for tier in machine.tiers
    }
    wanted = ["host", "disk"] if device.type == "cuda" else ["disk"]
    failures = () if [*rates] == wanted else (f"tiers {[*rates]}, not {wanted}",)
    figures = ", ".join(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in rates.items())
    return Found(figures, failures)


# ---------------------------------------------------------------------- ranks


def _pipeline(device: torch.device, seconds: float) -> Found:
    """A pipeline of two stages on one rank of a process group, beside the original on the whole batch."""
    module, (rows,) = _example(models.layers, device)
    batch = rows[:1020]
    pipe = irc.pipeline(
        copy.deepcopy(module),
        batch,
        "1GiB",
        stages=1,
        micro_batches=2,
        schedule="interleaved",
        chunks=2,
        time_limit=seconds,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            trainer = pipe.start(device=device)
            losses = trainer.step(batch)
            dist.barrier()
        finally:
            dist.destroy_process_group()
    loss = sum(losses) / len(losses)
    wanted = sum(_backward(module, part) for part in batch.chunk(2)) / 2
    own = {name: parameter.grad for name, parameter in module.named_parameters()}
    apart = [
        name
        for name, parameter in trainer.rank.parameters.items()
        if parameter.grad is None or not torch.allclose(parameter.grad, _halved(own[name]), 1e-4, 1e-7)
    ]
    failures = [f"the gradient of {name} differs" for name in apart]
    if abs(loss - wanted) > 1e-5 * abs(wanted):
        failures.append(f"the loss is {loss}, of the original {wanted}")
    return Found(f"{backend}, one rank, 2 stages, 2 micro-batches: gradients agree", tuple(failures))


def _backward(module: nn.Module, x: Tensor) -> float:
    loss = module(x)
    loss.backward()
    return float(loss.item())


def _halved(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient / 2


# ---------------------------------------------------------------------- all of them

CHECKS: tuple[Check, ...] = (
    Check(
        "capture, all kept",
        _planned(models.layers, "100%"),
        "operations traced and measured on CUDA, blocks of 512 bytes",
    ),
    Check("recomputation", _planned(models.layers, "70%"), "the engine's thread for CUDA, cuBLAS workspaces"),
    Check(
        "convolutions, all kept",
        _planned(models.convolutions, "100%"),
        "cuDNN's choice of kernels, its workspaces and its BatchNorm",
    ),
    Check(
        "convolutions, recomputed", _planned(models.convolutions, "60%"), "the same within a smaller budget"
    ),
    Check("flash attention", _flash_attention, "CUDA's flash attention in bfloat16, with dropout"),
    Check("random operations", _planned(models.random_numbers, "100%"), "Philox: numbers, state and offset"),
    Check("generator after steps", _generator_after_steps, "Philox over several steps"),
    Check("autocast", _autocast, "autocast of CUDA"),
    Check("optimizer in backward", _optimizer_in_backward, "AdamW in the engine's thread for CUDA"),
    Check("copies to a tier", _copies, "pinned memory, a stream for each direction, events (here: a disk)"),
    Check("a stream of the caller's", _side_stream, "steps and copies on another stream", needs_gpu=True),
    Check("allocator", _allocator, "its events beside its counters, reserved bytes", needs_gpu=True),
    Check("this machine", _machine, "rates of the GPU and of its pinned memory"),
    Check("pipeline", _pipeline, "NCCL with one rank (here: gloo)"),
)
