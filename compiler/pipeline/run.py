"""Trains what `irc optimize --stages` wrote: under torchrun a rank's stages, in one process all of them."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...backends.distributed import reaching
from ...ir import InputRole, Trait, UnsupportedError, UsageError, format_bytes
from ...ir.files import check_parent
from ...passes.costs.allocations import peak_bytes
from ...torch_support.pytree import flatten
from ..model_source import load_for_micro_batches, training_loss
from ..source import Source
from ..training import Differences, optimizer_of_all
from .artifact import WrittenPipeline, read_pipeline, unread_state
from .micro_batches import micro_batches_of
from .trainer import PipelineTrainer, state_of
from .weights import read_weights, write_weights

__all__ = ["PipelineReport", "RankReport", "in_group", "run_pipeline"]

_RATE = 1e-3
_LIMIT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class RankReport:
    """The measurements of one rank.

    Args:
        budget_bytes: Of its device.
        predicted_bytes: Its predicted peak.
        measured_bytes: Its peak, from allocator events, with what is there between steps.
        gradient_difference: The largest difference of a gradient's element from the original's on one device;
            None if nothing was compared.
        gradient_scale: The largest element of the original's gradients of this rank's parameters.
        worst_gradient: The largest difference as a multiple of what rounding may make.
        buffer_difference: The largest difference of a buffer's element.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    gradient_difference: float | None = None
    gradient_scale: float = 0.0
    worst_gradient: float = 0.0
    buffer_difference: float = 0.0


@dataclass(frozen=True)
class PipelineReport:
    """Some steps of a pipeline.

    Args:
        ranks: What each rank saw; one report where all stages ran in one process.
        losses: The mean loss of each step.
        original_losses: The same of the original on one device; empty if nothing was compared.
        seconds: Of the clock, for each step.
        predicted_seconds: As planned, for a device of each stage's own.
        is_alone: Whether all stages ran in one process, for which nothing was promised.
        note: Why something was not compared.
    """

    ranks: tuple[RankReport, ...]
    losses: tuple[float, ...]
    original_losses: tuple[float, ...]
    seconds: tuple[float, ...]
    predicted_seconds: float
    is_alone: bool
    note: str = ""

    @property
    def failures(self) -> list[str]:
        """The promises that were not kept."""
        found: list[str] = []
        for index, rank in enumerate(self.ranks):
            most = min(rank.predicted_bytes, rank.budget_bytes)
            if not self.is_alone and rank.measured_bytes > most:
                found.append(
                    f"rank {index}: the measured peak of {rank.measured_bytes} bytes is over the predicted "
                    f"{rank.predicted_bytes} or the budget of {rank.budget_bytes}"
                )
            if rank.worst_gradient > 1 or not rank.buffer_difference <= 1e-5:
                found.append(
                    f"rank {index}: gradients differ by {rank.gradient_difference:.3g} (largest "
                    f"{rank.gradient_scale:.3g}), buffers by {rank.buffer_difference:.3g}"
                )
        for step, (ours, its) in enumerate(zip(self.losses, self.original_losses, strict=False)):
            if not abs(ours - its) <= 1e-5 * max(abs(its), 1e-6):
                found.append(f"step {step + 1}: the loss is {ours:.8g}, the original's {its:.8g}")
        return found

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return {
            "format": "irc-pipeline-run-1",
            "ranks": [
                {name: getattr(rank, name) for name in RankReport.__dataclass_fields__} for rank in self.ranks
            ],
            "losses": list(self.losses),
            "original_losses": list(self.original_losses),
            "seconds": list(self.seconds),
            "predicted_seconds": self.predicted_seconds,
            "one_process": self.is_alone,
            "note": self.note or None,
            "failures": self.failures,
        }

    def text(self) -> str:
        """For a person."""
        lines: list[str] = []
        for step, (loss, seconds) in enumerate(zip(self.losses, self.seconds, strict=True)):
            its = f"  (original: loss {self.original_losses[step]:.6g})" if self.original_losses else ""
            lines.append(f"step {step + 1}: loss {loss:.6g}, {seconds:.3f} s{its}")
        for index, rank in enumerate(self.ranks):
            if self.is_alone:
                lines.append(
                    f"one process: peak measured {rank.measured_bytes:,} bytes "
                    f"({format_bytes(rank.measured_bytes)}); the plan is for several devices, and promises "
                    "nothing here"
                )
            else:
                off = rank.predicted_bytes / max(rank.measured_bytes, 1) - 1
                holds = rank.measured_bytes <= rank.predicted_bytes <= rank.budget_bytes
                sign = " <=" if holds else ","
                lines.append(
                    f"rank {index}: peak measured {rank.measured_bytes:,}{sign} predicted "
                    f"{rank.predicted_bytes:,}{sign} budget {rank.budget_bytes:,} bytes "
                    f"({format_bytes(rank.measured_bytes)} of {format_bytes(rank.budget_bytes)}; "
                    f"predicted is {off:+.2%} off)"
                )
            if rank.gradient_difference is not None:
                lines.append(
                    f"        largest gradient difference {rank.gradient_difference:.3g} (largest gradient "
                    f"{rank.gradient_scale:.3g}), buffer difference {rank.buffer_difference:.3g}"
                )
        if self.note:
            lines.append(f"note: {self.note}")
        return "\n".join(lines)


@contextlib.contextmanager
def in_group() -> Generator[int | None]:
    """The rank in the group that torchrun started, or None if it did not; the group ends afterwards."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with reaching(when="at the start"):
        dist.init_process_group("gloo", timeout=_LIMIT)
    try:
        yield dist.get_rank()
    finally:
        with reaching(when="at the end"):
            dist.destroy_process_group()


def run_pipeline(
    folder: Path,
    steps: int,
    *,
    with_original: bool,
    original: Source | None = None,
    weights: Path | None = None,
    save_weights: Path | None = None,
    is_trusted: bool = False,
) -> PipelineReport:
    """Trains some steps on the written batch, by the planned optimizer or plain SGD, and measures memory.

    Args:
        folder: What `irc optimize --stages` wrote.
        steps: How many.
        with_original: Load the original on each rank, train it there on one device, micro-batch by
            micro-batch, and compare losses, gradients and buffers of each step.
        original: The source of the original; None for the one that the folder names, whose code runs then.
        weights: A safetensors file with the model's names to begin with, instead of what was written.
        save_weights: A safetensors file for what was trained, by the model's names.
        is_trusted: As of `read_pipeline`.

    Raises:
        UnsupportedError: IRC494 for a plan for accelerators.
        UsageError: IRC435 if there is no folder for the weights; IRC431 for a folder that is damaged;
            IRC432 when the original is another model now; IRC488 for another number of ranks than devices;
            IRC497 for weights of another model; IRC434 when weights cannot be written.
    """
    rank = dist.get_rank() if dist.is_initialized() else None
    written = read_pipeline(folder, rank, is_trusted=is_trusted)
    if original is not None:
        written = replace(written, source=original)
    _refuse_accelerators(written)
    if save_weights is not None:
        check_parent(save_weights)
    trainer = PipelineTrainer(written.stages, written.state, rebuild=_flat, saved=written.own_names)
    if weights is not None:
        trainer.load_state_dict(read_weights(weights, trainer.state_dict()))
    examples = _needed(written, trainer)
    micro_batches = written.stages.plan.micro_batches
    note = _why_not(written) if with_original and rank is not None else ""
    whole = _Original(written, folder, weights) if with_original and not note else None
    differences, buffers = Differences(), Differences()
    losses: list[float] = []
    its: list[float] = []
    seconds: list[float] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(steps):
            for parameter in trainer.parameters():
                parameter.grad = None
            before = torch.get_rng_state()
            if whole is not None:
                its.append(whole.step(micro_batches))
                torch.set_rng_state(before)
            started = time.perf_counter()
            found = trainer.step(*examples)
            seconds.append(time.perf_counter() - started)
            losses.append(_everywhere(sum(found) / micro_batches if found else math.nan, written))
            if whole is not None:
                differences.add(whole.gradients(trainer))
                buffers.add(whole.buffers(trainer))
                whole.update()
            _update(trainer)
    del whole

    def step() -> None:
        trainer.step(*examples)
        _update(trainer)

    measured = _static_bytes(trainer, examples) + peak_bytes(step)
    if save_weights is not None:
        unread = {} if rank else unread_state(folder, written)
        write_weights(save_weights, trainer.state_dict() | unread)
    plan = written.stages.plan
    place = rank or 0
    compared = with_original and not note
    own = RankReport(
        plan.budget_bytes[place],
        plan.peak_bytes[place],
        measured,
        differences.largest if compared else None,
        differences.scale,
        differences.worst,
        buffers.largest,
    )
    return PipelineReport(
        _gathered(own),
        tuple(losses),
        tuple(its),
        tuple(seconds),
        plan.step_seconds,
        rank is None,
        note,
    )


def _update(trainer: PipelineTrainer) -> None:
    """The step of the planned optimizer, or of plain SGD."""
    if trainer.stages.optimizer is not None:
        trainer.optimizer.step()
    else:
        _descend(trainer.parameters())


def _descend(parameters: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-_RATE)


def _refuse_accelerators(written: WrittenPipeline) -> None:
    devices = {storage.device for schedule in written.stages.schedules for storage in schedule.graph.storages}
    other = next((device for device in sorted(devices) if device != "cpu"), None)
    if other is not None:
        raise UnsupportedError(
            "IRC494",
            f"the pipeline is planned for {other}, and irc run trains pipelines on the CPU",
            help="train it by irc.pipeline(...).start(device=...) in a process group of its own",
        )


def _flat(leaves: list[Any]) -> Any:
    """The model's result without the way it nests."""
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


def _why_not(written: WrittenPipeline) -> str:
    """Why ranks cannot be compared with one device, if they cannot."""
    nodes = (n for schedule in written.stages.schedules for n in schedule.graph.operations)
    random = next((node for node in nodes if Trait.RANDOM in node.traits), None)
    if random is None:
        return ""
    return (
        f"numbers were not compared: {random.op} draws random numbers, and each rank has a generator of its "
        "own (in one process they are compared)"
    )


def _needed(written: WrittenPipeline, trainer: PipelineTrainer) -> list[Tensor]:
    """The batch; what this rank's stages do not read is there without its numbers."""
    order = written.stages.order
    mine = range(order.stages) if trainer.is_alone else order.stages_on(dist.get_rank())
    read = {
        int(entry.target)
        for stage in mine
        for entry in written.stages.schedules[stage].graph.inputs
        if entry.role is InputRole.INPUT
    }
    return [
        example if index in read else example.to("meta") for index, example in enumerate(written.examples)
    ]


def _static_bytes(trainer: PipelineTrainer, examples: Sequence[Tensor]) -> int:
    """Returns the bytes between steps: parameters, gradients, state, buffers, constants and the batch."""
    order = trainer.stages.order
    mine = range(order.stages) if trainer.is_alone else order.stages_on(dist.get_rank())
    programs = [trainer.programs[stage] for stage in mine]
    tensors: list[Tensor] = [*trainer.rank.parameters.values(), *trainer.rank.buffers.values(), *examples]
    tensors += [p.grad for p in trainer.parameters() if p.grad is not None]
    if trainer.stages.optimizer is not None:
        held = (value for state in trainer.optimizer.state.values() for value in state.values())
        tensors += [value for value in held if isinstance(value, Tensor)]
    for program in programs:
        for entry in program.statics:
            if entry.role is InputRole.CONSTANT:
                tensors.append(program.constants[entry.target])
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.device.type != "meta"}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _everywhere(loss: float, written: WrittenPipeline) -> float:
    """The loss that the rank of the last stage knows."""
    if not dist.is_initialized():
        return loss
    said = torch.tensor([loss], dtype=torch.float64)
    with reaching(when="after a step"):
        dist.broadcast(said, written.stages.order.device_of[-1])
    return said.item()


def _gathered(own: RankReport) -> tuple[RankReport, ...]:
    """The reports of all ranks, on each of them."""
    if not dist.is_initialized():
        return (own,)
    given = own.gradient_difference
    row = torch.tensor(
        [
            float(own.budget_bytes),
            float(own.predicted_bytes),
            float(own.measured_bytes),
            -1.0 if given is None else given,
            own.gradient_scale,
            own.worst_gradient,
            own.buffer_difference,
        ],
        dtype=torch.float64,
    )
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    with reaching(when="at the end"):
        dist.all_gather(rows, row)
    found: list[RankReport] = []
    for values in (row.tolist() for row in rows):
        difference = None if values[3] < 0 else values[3]
        found.append(RankReport(int(values[0]), int(values[1]), int(values[2]), difference, *values[4:]))
    return tuple(found)


class _Original:
    """The original on one device, micro-batch by micro-batch."""

    def __init__(self, written: WrittenPipeline, folder: Path, weights: Path | None) -> None:
        whole = read_pipeline(folder, is_trusted=True)  # as it was read before
        loaded = load_for_micro_batches(written.source, written.stages.plan.micro_batches)
        self.module: nn.Module = loaded.module
        state = state_of(self.module)
        for name, tensor in whole.state.items():
            if name not in state or state[name].shape != tensor.shape:
                raise _changed(written, f"has no {name} of the written shape {list(tensor.shape)}")
        begin = whole.state
        if weights is not None:
            begin = begin | read_weights(weights, {name: begin[name] for name in whole.own_names})
        with torch.no_grad():
            for name, tensor in begin.items():
                state[name].copy_(tensor)
        leaves, tree = flatten(loaded.args)
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
        if shapes != [example.shape for example in whole.examples]:
            raise _changed(written, "takes other inputs than the written ones")
        factory = written.stages.optimizer
        self.optimizer = None if factory is None else optimizer_of_all(factory, self.module)
        given = iter(whole.examples)
        self.args = pytree.tree_unflatten(
            [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        )

    def step(self, micro_batches: int) -> float:
        """The mean loss; gradients of it are in `.grad`."""
        self.module.zero_grad()
        losses: list[float] = []
        for batch in micro_batches_of(self.args, micro_batches):
            loss = training_loss(self.module(*batch))
            (loss / micro_batches).backward()
            losses.append(loss.item())
        return sum(losses) / micro_batches

    def gradients(self, trainer: PipelineTrainer) -> list[tuple[Tensor, Tensor]]:
        """The gradients of the original, each with that of the pipeline."""
        mine = dict(self.module.named_parameters(remove_duplicate=False))
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, parameter in trainer.rank.parameters.items():
            expected, found = mine[name].grad, parameter.grad
            if expected is None and found is None:
                continue
            zeros = torch.zeros_like(parameter)
            pairs.append((zeros if expected is None else expected, zeros if found is None else found))
        return pairs

    def buffers(self, trainer: PipelineTrainer) -> list[tuple[Tensor, Tensor]]:
        """The buffers of both."""
        its = dict(self.module.named_buffers(remove_duplicate=False))
        return [(its[name], buffer) for name, buffer in trainer.rank.buffers.items()]

    def update(self) -> None:
        """The same step as the pipeline takes."""
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            _descend(self.module.parameters())


def _changed(written: WrittenPipeline, how: str) -> UsageError:
    return UsageError(
        "IRC432",
        f"{written.source.model} {how}",
        help="the model has changed since; write the folder again with irc optimize",
    )
