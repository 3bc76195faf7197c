"""The memory of a device that trains a stage as the published runs did, allocation by allocation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from irc.compiler.pipeline.plan import captured_micro_batch
from irc.ir import SEND, Compute, Free, Graph, InputRole, Loss, OutputRole, Region, Storage, with_frees
from irc.ir.pipeline.exchange import received_values, sent_values
from irc.ir.schedule import Instruction
from irc.passes.pipeline.placement import Dataflow
from irc.passes.pipeline.stage_graphs import cut

from ..models.gpt2_grid import Shape
from .allocator import Block, CachingAllocator

__all__ = ["Held", "Run", "StageMoves", "replayed", "stages_of"]

_COPY_STREAMS = 32
"""Streams in torch's pool for a device; each micro-batch's copies have one, in turn."""
_STEPS = 10
_CUBLAS_BYTES = 8_519_680
"""Workspace of a cuBLAS handle before H100; the threads of forward and of backward have one each."""

_Move = tuple[Storage, bool, bool]
"""A storage, whether it is taken or given back, and whether another device has sent it."""


@dataclass(frozen=True)
class Run:
    """How a published row trains.

    Args:
        implementation: `torchgpipe`, or `self`, its authors' own.
        checkpoints: Whether stages compute their forward again: of all micro-batches (`self`) or all but the
            last one (`torchgpipe`, whose mode is `except_last`).
        micro_batches: How many a step has.
    """

    implementation: str
    checkpoints: bool
    micro_batches: int

    @property
    def checkpointed(self) -> int:
        """How many micro-batches compute their forward again: the first ones."""
        if not self.checkpoints:
            return 0
        return self.micro_batches - (self.implementation == "torchgpipe")


@dataclass(frozen=True)
class Held:
    """What a device was found to hold.

    Args:
        alive_bytes: The most that tensors took at once.
        reserved_bytes: What the allocator had reserved for them in the end.
        saved_bytes: What the forward of one micro-batch leaves for its backward.
        boundary_bytes: What one micro-batch receives for forward, and what it sends.
    """

    alive_bytes: int
    reserved_bytes: int
    saved_bytes: int
    boundary_bytes: int


@dataclass(frozen=True)
class StageMoves:
    """What a stage takes and gives back, as autograd does: each tensor goes after its last reader.

    Args:
        graph: Of one micro-batch.
    """

    graph: Graph

    @cached_property
    def parameters(self) -> list[int]:
        """Bytes of each parameter."""
        return [i.value.storage.nbytes for i in self.graph.inputs if i.role is InputRole.PARAMETER]

    @cached_property
    def gradients(self) -> frozenset[Storage]:
        """Gradients of parameters."""
        made = (o.value for o in self.graph.outputs if o.role is OutputRole.GRADIENT)
        return frozenset(value.storage for value in made if value is not None)

    @cached_property
    def results(self) -> frozenset[Storage]:
        """The scores; nothing but in the last stage."""
        made = (o.value for o in self.graph.outputs if o.role is OutputRole.OUTPUT)
        return frozenset(value.storage for value in made if value is not None)

    @cached_property
    def received(self) -> frozenset[Storage]:
        """What forward receives."""
        return frozenset(value.storage for value in received_values(self.graph, Region.FORWARD))

    @cached_property
    def sent(self) -> frozenset[Storage]:
        """What forward and backward send."""
        values = (value for region in Region for value in sent_values(self.graph, region))
        return frozenset(value.storage for value in values)

    @cached_property
    def forward(self) -> list[_Move]:
        """A forward that keeps what backward reads."""
        return self._halves[0]

    @cached_property
    def backward(self) -> list[_Move]:
        """The backward after it."""
        return self._halves[1]

    @cached_property
    def forward_alone(self) -> list[_Move]:
        """A forward without autograd."""
        nodes = [node for node in self.graph.operations if node.region is Region.FORWARD]
        return self._moves(with_frees(self.graph, nodes, ()).instructions)

    @cached_property
    def saved_bytes(self) -> int:
        """What `forward` leaves."""
        left: dict[Storage, int] = {}
        for storage, is_taken, _ in self.forward:
            if is_taken:
                left[storage] = storage.nbytes
            else:
                left.pop(storage, None)
        return sum(left.values())

    @cached_property
    def _halves(self) -> tuple[list[_Move], list[_Move]]:
        halves = {r: [n for n in self.graph.operations if n.region is r] for r in Region}
        steps = with_frees(self.graph, halves[Region.FORWARD], halves[Region.BACKWARD]).instructions
        loss = next(place for place, step in enumerate(steps) if isinstance(step, Loss))
        return self._moves(steps[:loss]), self._moves(steps[loss:])

    def _moves(self, steps: Sequence[Instruction]) -> list[_Move]:
        arriving = {v.storage for region in Region for v in received_values(self.graph, region)}
        found: list[_Move] = []
        for step in steps:
            if isinstance(step, Free):
                found.append((step.storage, False, False))
            elif isinstance(step, Compute) and step.node.op != SEND:
                made = self.graph.allocates(step.node)
                found.extend((storage, True, storage in arriving) for storage in made)
                found.extend((s, False, False) for s in made if s not in step.retained)
        return found


def stages_of(
    model: nn.Sequential, shape: Shape, plans: Iterable[Sequence[int]], micro_batches: int
) -> list[list[StageMoves]]:
    """The stages of one micro-batch, for each plan.

    Args:
        model: Whose modules are divided.
        shape: Its sizes.
        plans: How many modules each stage has.
        micro_batches: In how many parts the batch is divided.
    """
    tokens = torch.zeros(shape.batch // micro_batches, shape.positions, dtype=torch.int64)
    graph = captured_micro_batch(model, (tokens,), None).graph
    line = Dataflow(graph).forward
    found: list[list[StageMoves]] = []
    for plan in plans:
        stage_of_module = [stage for stage, modules in enumerate(plan) for _ in range(modules)]
        stages = {
            node: stage_of_module[int(node.at.module.split(".")[0])]
            for node in line
            if node.at is not None and node.at.module
        }
        found.append([StageMoves(stage.graph) for stage in cut(graph, stages, len(plan))])
    return found


def replayed(stage: StageMoves, run: Run) -> Held:
    """What a device holds that trains a stage for ten steps.

    A step is the forward of all micro-batches, the loss of the whole batch, `zero_grad`, the backward of all
    micro-batches from the last to the first, and SGD with momentum and weight decay.
    """
    device = _Device(stage, run)
    for _ in range(_STEPS):
        device.step()
    memory = device.memory
    boundary = sum(storage.nbytes for storage in stage.received | stage.sent)
    return Held(memory.peak_bytes, memory.reserved_bytes, stage.saved_bytes, boundary)


class _Device:
    """A device between two allocations."""

    def __init__(self, stage: StageMoves, run: Run) -> None:
        self.stage, self.run = stage, run
        self.memory = CachingAllocator()
        self.alive: list[dict[Storage, Block]] = [{} for _ in range(run.micro_batches)]
        self.gradients: dict[Storage, Block] = {}
        self.momentum: list[Block] = []
        self.scores: Block | None = None
        """Of the step before, which the training loop still has while the next one goes forward."""
        self.kept: list[Block] = []
        """What `self` keeps of each forward that it computed again, as long as the step's graph is there."""
        for nbytes in stage.parameters:
            self.memory.take(nbytes)
        for _ in range(2):
            self.memory.take(_CUBLAS_BYTES)

    def step(self) -> None:
        """One training step."""
        stage, run, memory = self.stage, self.run, self.memory
        for number in range(run.micro_batches):
            if number < run.checkpointed:
                self._run(stage.forward_alone, number, without=stage.received)
            else:
                self._run(stage.forward, number)
        gradient = self._loss()
        self._give(self.gradients.values())
        self.gradients.clear()
        for number in reversed(range(run.micro_batches)):
            if number < run.checkpointed:
                self._again(number)
            self._run(stage.backward, number, without=self._outlasting(number))
            self._end(number)
        if gradient is not None:
            memory.give(gradient)
        decayed = [memory.take(nbytes) for nbytes in stage.parameters]
        self.momentum = self.momentum or [memory.take(nbytes) for nbytes in stage.parameters]
        self._give(decayed)

    def _loss(self) -> Block | None:
        """Cross entropy over the scores of all micro-batches, and its gradient; in the last stage."""
        memory, count = self.memory, self.run.micro_batches
        kept, self.kept = self.kept, []
        if not self.stage.results:
            self._give(kept)
            return None
        nbytes = count * sum(storage.nbytes for storage in self.stage.results)
        scores = memory.take(nbytes)
        for alive in self.alive:
            self._give([alive.pop(storage) for storage in self.stage.results])
        self._give(kept)
        if self.scores is not None:
            memory.give(self.scores)
        self.scores = scores
        logarithms, of_loss, gradient = (memory.take(nbytes) for _ in range(3))
        self._give((of_loss, logarithms))
        return gradient

    def _again(self, number: int) -> None:
        """The forward of a micro-batch again, for its backward."""
        there = self.stage.received
        moves = [move for move in self.stage.forward if move[0] not in there]
        self._run(moves, number, without=self._outlasting(number))

    def _outlasting(self, number: int) -> frozenset[Storage]:
        """What `self` keeps beyond the backward of a micro-batch: inputs, results and gradients of inputs."""
        if self.run.implementation == "self" and number < self.run.checkpointed:
            return self.stage.received | self.stage.results | self.stage.sent
        return frozenset()

    def _end(self, number: int) -> None:
        """What a micro-batch still has when its backward ends."""
        alive, outlasting = self.alive[number], self._outlasting(number)
        self.kept += [alive.pop(storage) for storage in list(alive) if storage in outlasting]
        self._give(alive.values())
        alive.clear()

    def _run(self, moves: Iterable[_Move], number: int, without: Collection[Storage] = ()) -> None:
        """Takes and gives back; storages in `without` are not given back."""
        alive, stream = self.alive[number], 1 + number % _COPY_STREAMS
        for storage, is_taken, is_received in moves:
            if not is_taken:
                if storage not in without and storage in alive:
                    self.memory.give(alive.pop(storage))
                continue
            block = self.memory.take(storage.nbytes, stream if is_received else 0)
            if storage not in self.stage.gradients:
                alive[storage] = block
            elif storage in self.gradients:
                self.memory.give(block)  # it is added to the gradient of other micro-batches
            else:
                self.gradients[storage] = block

    def _give(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.memory.give(block)
