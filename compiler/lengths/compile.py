"""Compiles a call for all lengths of a range: few schedules, each for the lengths between two of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from ...backends.torch import LengthFamily, ReservedMemory, VariedCall
from ...backends.torch.guards.free_numbers import NO_NUMBERS
from ...ir import BudgetError, IrcError, Node, UnsupportedError, UsageError, VerificationError, liveness
from ...ir.verify import verify_graph, verify_schedule
from ...passes import Program
from ...passes.costs.machines import machine_named
from ...passes.costs.table import Costs, analytic_costs
from ..compile import compile_call
from ..compiled_call import CompiledCall, emitted_call
from ..frozen_heap import frozen_heap
from ..planned_program import costed_call, planned_call
from ..request import Request
from .axis import LengthAxis, LengthCall
from .graph_family import GraphFamily, GraphsDiffer, graph_family, schedule_of

__all__ = ["compile_lengths"]

_log = logging.getLogger("irc")

_EXCESS = 0.15
"""The part of the overhead, over all lengths, that plans for longer calls may add to it."""
_LITTLE = 0.0003
"""An overhead that is not worth another plan."""
_MOST_PLANS = 7
_MOST_RANGES = 32
"""A range of lengths is not divided if it is smaller than this part of the longest."""
_CONVOLUTION = "convolution"
_PRECISION = 0.01
"""The part of a length to which it is found out up to where nothing is computed twice."""


@frozen_heap()
def compile_lengths(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    reserved: ReservedMemory,
    varied: VariedCall | None = None,
) -> CompiledCall:
    """Compiles a call, as `compile_call`, and calls that differ from it in their length alone with it.

    The graph of the longest call is captured, and of two others, and sizes become polynomials of the length.
    A schedule for a length is one for all that are shorter: no tensor is larger there. As they need less of
    it, schedules for shorter ones are made until they save little. A call that has no length in the range,
    or whose length decides more than sizes, is compiled by itself; that is logged.

    Raises:
        BudgetError: IRC204 if the longest call does not fit; IRC520 then says so of a later one.
        IrcError: As `compile_call`.
    """
    axis = request.lengths
    call = None if axis is None or varied is not None else _found(axis, module, args, kwargs, request)
    if call is None:
        return compile_call(module, args, kwargs, request, reserved, varied)
    assert axis is not None
    try:
        return _Compiler(module, call, request, reserved).compiled(axis)
    except BudgetError:
        if request.example is None:
            raise
        return compile_call(module, args, kwargs, request, reserved, varied)
    except IrcError as error:
        made = compile_call(module, args, kwargs, request, reserved, varied)
        _log.warning("%s is planned for each length by itself: %s", call.name, error.message)
        return replace(made, request=replace(made.request, dynamic=None))


def _found(
    axis: LengthAxis, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> LengthCall | None:
    """The call with its length; None if it has none in the range.

    Raises:
        UsageError: IRC406 if the example lacks what the option names.
    """
    try:
        return axis.find(module, args, kwargs)
    except UsageError:
        if request.example is None:
            raise
        return None


@dataclass(frozen=True)
class _Planned:
    """The schedule for a length."""

    length: int
    family: GraphFamily
    program: Program

    @property
    def overhead(self) -> float:
        """The time that it adds."""
        assert self.program.plan is not None
        return self.program.plan.overhead

    @property
    def peak_bytes(self) -> int:
        """Its peak, without what is held for other plans."""
        assert self.program.schedule is not None and self.program.costs is not None
        return liveness(self.program.schedule, self.program.costs.workspace_bytes).peak_bytes


class _Compiler:
    """Compiles the calls of all lengths of a range."""

    def __init__(
        self, module: nn.Module, call: LengthCall, request: Request, reserved: ReservedMemory
    ) -> None:
        self.module, self.call, self.reserved = module, call, reserved
        self.request = request
        """The request; with a budget in bytes after the first plan."""
        self.made: list[CompiledCall] = []
        """Compiled calls, the longest first."""

    def compiled(self, axis: LengthAxis) -> CompiledCall:
        """Compiles all; returns the longest call, with the others beside it."""
        last = self.call.last
        family_of_calls = LengthFamily(*self.call.place, self.call.name)
        while last >= self.call.first:
            try:
                family = graph_family(self.module, self.call, self.request, last)
                self._compile(family, family_of_calls)
            except GraphsDiffer:
                if self.made:
                    raise
                self._compile_alone(last)
                last -= 1
                continue
            except (BudgetError, UnsupportedError) as error:
                if not any(each.compiled.lengths for each in self.made):
                    raise
                _log.info("%s of %d and less is planned by itself: %s", self.call.name, last, error.message)
                break
            last = family.first - 1
        shortest = self.made[-1].compiled.lengths
        assert shortest is not None
        if self.call.length <= last:  # the call that asks is shorter than what the range came to
            self._compile_alone(self.call.length)
        first, *others = self.made
        request = replace(first.request, dynamic=axis.after(shortest.first, self.call.last))
        return replace(first, others=tuple(each.compiled for each in others), request=request)

    def _compile_alone(self, length: int) -> None:
        """Compiles a length by itself, such as that of a whole table of positions, which is not sliced."""
        args, kwargs = self.call.at(length)
        made = compile_call(self.module, args, kwargs, self.request, self.reserved)
        compiled = replace(made.compiled, reason=f"{self.call.name} of {length}")
        self.request = made.request
        self.made.append(replace(made, compiled=compiled))

    def _compile(self, family: GraphFamily, calls: LengthFamily) -> None:
        """Compiles the calls of one graph."""
        planned = self._planned(family)
        for before, each in reversed([*pairwise((None, *planned))]):
            assert each is not None
            self._check(each, before)
            self._emit(each, family.first if before is None else before.length + 1, calls)

    def _planned(self, family: GraphFamily) -> list[_Planned]:
        """Makes the schedules for some lengths, the shortest of them first."""
        longest = self._plan(family, family.last)
        if longest.overhead <= _LITTLE:
            return [longest]
        shortest = self._plan(family, self._all_kept_up_to(family, longest))
        planned = [shortest, longest]
        while len(planned) < _MOST_PLANS:
            gaps = [(_excess(a, b), k) for k, (a, b) in enumerate(pairwise(planned))]
            total = sum((b.length - a.length) * (a.overhead + b.overhead) / 2 for a, b in pairwise(planned))
            _, place = max(gaps)
            spared = max(_EXCESS * total, _LITTLE * (family.last - family.first))
            a, b = planned[place : place + 2]
            narrow = max(4, family.last // _MOST_RANGES)
            if sum(excess for excess, _ in gaps) <= spared or b.length - a.length < narrow:
                break
            planned.insert(place + 1, self._plan(family, (a.length + b.length) // 2, longest))
        return planned

    def _plan(self, family: GraphFamily, length: int, timed: _Planned | None = None) -> _Planned:
        """Makes the schedule for a length; times are those of another, as far as they are known."""
        captured, prepared = family.at(length)
        costed = partial(self._costed, timed=None if timed is None else timed.program)
        program = planned_call(captured, prepared, self.request, self.reserved, costed)
        if self.request.example is None:
            settled = self.request.settled(captured, program)
            self.request = replace(settled, observers=())
        return _Planned(length, family, program)

    def _costed(self, program: Program, *, with_times: bool, timed: Program | None = None) -> Program:
        """The program with costs that hold for shorter lengths too.

        Kernels of convolutions copy tensors or not as their sizes divide: what is measured at one length
        says nothing of another, and a bound takes its place. Between two lengths that are measured,
        workspaces are those of the longer.

        Args:
            program: The program of a length.
            with_times: Whether the operations' times are asked for.
            timed: The program of a longer length that is measured, if this one is not to be.
        """
        if timed is not None and timed.costs is not None and timed.costs.has_times:
            costs = _carried(timed.costs, program, timed)
            costs = replace(costs, seconds=_scaled(timed, program, _modelled(program)), has_times=with_times)
            return replace(program, costs=costs)
        found = costed_call(program, self.request, with_times=with_times)
        assert found.costs is not None
        costs = found.costs
        modelled = _modelled(program)
        workspaces = {
            node: max(nbytes, modelled.workspace_bytes[node]) if _CONVOLUTION in node.op else nbytes
            for node, nbytes in costs.workspace_bytes.items()
        }
        return replace(found, costs=replace(costs, workspace_bytes=workspaces))

    def _all_kept_up_to(self, family: GraphFamily, longest: _Planned) -> int:
        """Returns about the largest length for which nothing has to be computed twice."""
        costs = longest.program.costs
        assert costs is not None
        low, high = family.first, family.last
        while high - low > max(_PRECISION * high, 1):
            length = (low + high) // 2
            _, program = family.at(length)
            counted = replace(program, costs=_carried(costs, program, longest.program))
            if self.request.without_times(counted) is None:
                high = length
            else:
                low = length
        return low

    def _emit(self, planned: _Planned, first: int, calls: LengthFamily) -> None:
        """Compiles a schedule for the lengths from `first` on."""
        family, program = planned.family, planned.program
        assert program.schedule is not None and program.plan is not None
        lengths = family.range(calls, first, planned.length, program.schedule)
        captured, _ = family.at(planned.length)
        reserved = self.made[0].compiled.reserved if self.made else self.reserved.reserved
        made = emitted_call(
            self.module,
            captured,
            family.names,
            program,
            self.request,
            replace(self.reserved, reserved=reserved),
            {},
            NO_NUMBERS,
            family.forms,
        )
        span = f"{first} to {planned.length}" if first < planned.length else f"{first}"
        compiled = replace(made.compiled, lengths=lengths, reason=f"{calls.name} of {span}")
        self.made.append(replace(made, compiled=compiled))

    def _check(self, planned: _Planned, before: _Planned | None) -> None:
        """Verifies a schedule at the length below those that it is for, with the workspaces measured there.

        Args:
            planned: The schedule.
            before: That of the next shorter length; without it, the shortest length of all is measured.

        Raises:
            UnsupportedError: IRC351.
        """
        first = planned.family.first if before is None else before.length
        _, program = planned.family.at(first)
        if before is None:
            program = self._costed(program, with_times=False)
        else:
            assert before.program.costs is not None
            program = replace(program, costs=_carried(before.program.costs, program, before.program))
        assert planned.program.schedule is not None and planned.program.plan is not None
        assert program.costs is not None
        schedule = schedule_of(planned.program.schedule, program)
        workspaces = program.costs.workspace_bytes
        peak_bytes = liveness(schedule, workspaces).peak_bytes
        held_bytes = planned.program.plan.peak_bytes - planned.peak_bytes
        try:
            verify_graph(schedule.graph)
            verify_schedule(
                schedule,
                workspaces,
                budget_bytes=planned.program.plan.budget_bytes - held_bytes,
                peak_bytes=peak_bytes,
            )
        except VerificationError as error:
            raise UnsupportedError(
                "IRC351", f"the schedule for length {planned.length} is none for {first}: {error.message}"
            ) from error


def _excess(a: _Planned, b: _Planned) -> float:
    """The overhead that the lengths between two plans have too much, all together."""
    return (b.length - a.length) * max(b.overhead - a.overhead, 0.0) / 2


def _carried(costs: Costs, program: Program, known: Program) -> Costs:
    """The costs of another length's program as those of this one, whose operations are the same."""
    nodes = {(node.name, node.op): node for node in _nodes(known)}
    pairs = {node: nodes[node.name, node.op] for node in _nodes(program)}
    return replace(
        costs,
        seconds={node: costs.seconds[other] for node, other in pairs.items() if other in costs.seconds},
        workspace_bytes={
            node: costs.workspace_bytes[other] for node, other in pairs.items() if other in costs.seconds
        },
    )


def _scaled(timed: Program, program: Program, modelled: Costs) -> dict[Node, float]:
    """The times of a program: those of another length, as a machine's roofline makes of them."""
    assert timed.costs is not None
    known = _carried(timed.costs, program, timed).seconds
    of_known = _carried(_modelled(timed), program, timed).seconds
    return {
        node: seconds * modelled.seconds[node] / of_known[node] if of_known[node] else seconds
        for node, seconds in known.items()
    }


def _modelled(program: Program) -> Costs:
    """The costs of the program's operations on a modest processor, by its roofline."""
    graphs = [program.graph, *([program.original] if program.original is not None else [])]
    return Costs.united([analytic_costs(graph, machine_named("cpu")) for graph in graphs])


def _nodes(program: Program) -> Sequence[Node]:
    graphs = [program.graph, *([program.original] if program.original is not None else [])]
    return [node for graph in graphs for node in graph.operations]
