"""Runs of compiled graphs between forward and backward, and the gradients that pass between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...backends.torch import PendingBackward, Program, compile_program, saved_values, storage_key
from ...frontends.torch import CapturedGraph
from ...ir import Graph, InputRole, OutputRole, Rounding, Schedule, Value, verify_graph, verify_schedule
from ...ir.scalars import Operand
from ...passes.subgraphs.footprint import outputs_bytes, tangents_bytes
from ...passes.subgraphs.subgraph import Choice, Subgraph, SubgraphSolutions
from ..number_slots import OperationSlots, slots_within

__all__ = ["Backward", "Gradient", "PendingRun", "Run", "Variant", "gradients_of"]

_PROGRAMS = 8
"""The number of compiled schedules that are kept of one graph."""


@dataclass(eq=False)
class Variant:
    """A compiled graph for one set of sizes.

    Args:
        name: Its number, and where it is in the user's code.
        captured: Its training graph.
        solutions: The same with costs, and the schedules known for it.
        expressions: The scalar operands that its program takes, computed from the numbers of a call.
        slots: The places of these among its operations.
    """

    name: str
    captured: CapturedGraph
    solutions: SubgraphSolutions
    expressions: tuple[Operand, ...] = ()
    slots: OperationSlots = field(default_factory=dict[Any, Any])
    _compiled: dict[int, tuple[Schedule, Program, tuple[Value, ...]]] = field(
        default_factory=dict[int, tuple[Schedule, Program, tuple[Value, ...]]]
    )

    @property
    def graph(self) -> Graph:
        """The training graph as it was captured."""
        return self.captured.captured.graph

    def compiled(self, schedule: Schedule) -> tuple[Program, tuple[Value, ...]]:
        """The program of a schedule, which is verified before it is compiled, and what it saves, in order.

        Raises:
            VerificationError: When the schedule is not valid.
        """
        if id(schedule) not in self._compiled:
            costs = self.solutions.program.costs
            assert costs is not None
            verify_graph(schedule.graph)
            verify_schedule(schedule, costs.workspace_bytes)
            slots = slots_within(schedule.graph, self.slots)
            program = compile_program(schedule, self.captured.captured.constants, slots=slots)
            self._compiled[id(schedule)] = schedule, program, saved_values(schedule)
            for key in list(self._compiled)[:-_PROGRAMS]:
                del self._compiled[key]
        return self._compiled[id(schedule)][1:]

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        """The roundings of its graph, and those that its steps have shown, each once."""
        programs = (program for _, program, _ in self._compiled.values())
        noticed = (rounding for program in programs for rounding in program.noticed_roundings)
        return tuple(dict.fromkeys((*self.captured.captured.roundings, *noticed)))

    def gradient_bytes(self) -> list[int]:
        """For each static input the bytes of its gradient, 0 if there is none."""
        graph = self.graph
        sizes: dict[str, int] = defaultdict(int)
        for output in graph.outputs:  # of a sparse one there are two parts
            if output.role is OutputRole.GRADIENT and output.value is not None:
                sizes[output.target] += output.value.storage.nbytes
        statics = (i for i in graph.inputs if i.role is not InputRole.TANGENT)
        return [sizes.get(f"{i.role.value}:{i.target}", 0) for i in statics]

    def tangent_bytes(self) -> dict[int, int]:
        """The bytes of the gradient of each output that has one, by its place among the outputs."""
        tangents = (i for i in self.graph.inputs if i.role is InputRole.TANGENT)
        return {int(i.target): i.value.storage.nbytes for i in tangents}


class Gradient(NamedTuple):
    """A gradient that a run's backward hands on.

    Args:
        nbytes: Its size.
        taker: The run whose output it is the gradient of; None if it stays, or nobody knows who takes it.
        place: Of that output among the taker's.
        leaf: What tells the leaf apart whose gradient it is; 0 if it is not a leaf's.
    """

    nbytes: int
    taker: PendingRun | None = None
    place: int = 0
    leaf: int = 0


@dataclass(eq=False)
class Run:
    """One call of a graph, before its forward has run.

    Args:
        subgraph: What it is in its step.
        variant: What runs.
        gradients: What its backward will hand on.
        upstream: The runs that its inputs come from: their backwards come after its own.
    """

    subgraph: Subgraph
    variant: Variant
    gradients: tuple[Gradient, ...]
    upstream: frozenset[Run]


@dataclass(eq=False)
class PendingRun(Run):
    """A run whose backward is still to come.

    Args:
        subgraph: As of any run.
        variant: The same.
        gradients: The same.
        upstream: The same.
        choice: By what it runs.
        step: The autograd node, once forward has run.
        outputs: The storages of its outputs.
        linked: The outputs that later runs have taken as inputs, by their place among the outputs.
    """

    choice: Choice
    step: PendingBackward | None = None
    outputs: tuple[int, ...] = ()
    linked: set[int] = field(default_factory=set[int])

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.variant.compiled(self.choice.schedule)[0]

    @property
    def is_pending(self) -> bool:
        """Whether forward has run and backward can still come."""
        return self.step is not None and self.step.is_pending

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds when its backward begins: saved values, outputs and their gradients."""
        graph = self.variant.graph
        return self.choice.footprint.saved_bytes + outputs_bytes(graph) + tangents_bytes(graph)

    @property
    def loose_bytes(self) -> int:
        """Bytes of the gradients that the loss, and no later run, makes of its outputs."""
        return sum(n for place, n in self.variant.tangent_bytes().items() if place not in self.linked)

    def is_behind(self, node: object) -> bool:
        """Whether an autograd node is the one of this run."""
        return self.step is not None and self.step.is_behind(node)

    def takes_off(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Forward has run; `outputs` is what `run_step` returned."""
        self.step = PendingBackward(self.program, inputs, outputs)
        given = {storage_key(tensor) for tensor in inputs}
        self.outputs = tuple({storage_key(output) for output in outputs} - given)

    def goes_on_by(self, choice: Choice) -> bool:
        """Makes backward run another schedule, which needs no more than what is saved, and frees the rest.

        Returns:
            Whether it was done.
        """
        held = self.variant.compiled(self.choice.schedule)[1]
        program, needed = self.variant.compiled(choice.schedule)
        if self.step is None or not set(needed) <= set(held):
            return False
        if not self.step.change(program, [held.index(value) for value in needed]):
            return False
        self.choice = choice
        return True


def gradients_of(
    variant: Variant, inputs: Sequence[Tensor], waiting: Sequence[PendingRun]
) -> tuple[Gradient, ...]:
    """The gradients that the backward of a run will hand on; outputs that it takes as inputs become linked.

    Args:
        variant: What will run.
        inputs: Its static inputs.
        waiting: The runs whose backward is still to come.
    """
    found: list[Gradient] = []
    for tensor, nbytes in zip(inputs, variant.gradient_bytes(), strict=True):
        if not nbytes or not tensor.requires_grad:
            continue
        maker = next((pending_run for pending_run in waiting if pending_run.is_behind(tensor.grad_fn)), None)
        if maker is not None:
            maker.linked.add(tensor.output_nr)
            found.append(Gradient(nbytes, maker, tensor.output_nr))
        elif not tensor.is_leaf or tensor.grad is None:  # else it is added to what is there
            found.append(Gradient(nbytes, leaf=id(tensor) if tensor.is_leaf else 0))
    return tuple(found)


@dataclass(frozen=True)
class Backward:
    """The memory that is alive during the backward of a run, beside what the run itself takes.

    Of two runs that depend on each other, the backward of the later one comes first. Of others, either may:
    a stranger still holds what it has saved, or has made its gradients.

    Args:
        fixed_bytes: Whatever is chosen: tensors that are alive, what the loss holds, and the gradients that
            runs downstream have handed on and nobody has taken.
        upstream: The runs whose backwards come later.
        strangers: The runs whose backwards come earlier or later, each with its gradients.
    """

    fixed_bytes: int
    upstream: tuple[Run, ...]
    strangers: tuple[tuple[Run, tuple[Gradient, ...]], ...]

    @staticmethod
    def of(run: Run, runs: Sequence[Run], fixed_bytes: int) -> Backward:
        """The backward of one of several runs.

        Args:
            run: One of them.
            runs: All whose backwards are still to come, the earliest first.
            fixed_bytes: What is alive beside what the runs take.
        """
        downstream = [other for other in runs if run in other.upstream]
        strangers = [o for o in runs if o is not run and o not in run.upstream and o not in downstream]
        handed = [gradient for other in downstream for gradient in other.gradients]
        leaves = {gradient.leaf for gradient in handed if gradient.leaf}
        return Backward(
            fixed_bytes + _handed_bytes(handed, run, downstream),
            tuple(run.upstream.intersection(runs)),
            tuple((o, tuple(g for g in o.gradients if g.leaf not in leaves)) for o in strangers),
        )

    def nbytes(self, new_bytes: int) -> int:
        """Bytes, with every run as it is chosen.

        Args:
            new_bytes: What the run that has not run yet will save.
        """
        upstream_bytes = sum(_saved_bytes(other, new_bytes) for other in self.upstream)
        saved = [_saved_bytes(other, new_bytes) for other, _ in self.strangers]
        made = [_sum(gradients) for _, gradients in self.strangers]
        every = [gradient for _, gradients in self.strangers for gradient in gradients]
        once = {gradient.leaf: gradient for gradient in every if gradient.leaf}.values()
        once_bytes = _sum(once) + _sum(gradient for gradient in every if not gradient.leaf)
        # two bounds of the worst order: run by run; and all that is saved with all gradients, each leaf once
        run_by_run = sum(max(pair) for pair in zip(saved, made, strict=True))
        return self.fixed_bytes + upstream_bytes + min(run_by_run, sum(saved) + once_bytes)


def _saved_bytes(run: Run, new_bytes: int) -> int:
    return run.choice.footprint.saved_bytes if isinstance(run, PendingRun) else new_bytes


def _sum(gradients: Iterable[Gradient]) -> int:
    return sum(gradient.nbytes for gradient in gradients)


def _handed_bytes(handed: Iterable[Gradient], run: Run, downstream: Sequence[Run]) -> int:
    """Returns the bytes handed on by runs downstream that exist during a backward beside its own tangents."""
    arrived: set[int] = set()
    kept: dict[int, int] = {}
    total = 0
    for gradient in handed:
        if gradient.leaf:
            kept[gradient.leaf] = gradient.nbytes
        elif gradient.taker is run:
            total += gradient.nbytes if gradient.place in arrived else 0
            arrived.add(gradient.place)
        elif gradient.taker not in downstream:
            total += gradient.nbytes
    return total + sum(kept.values())
