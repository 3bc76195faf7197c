"""A call of a module that can be planned at any budget: the one road from a call to a plan."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ..backends.torch import ReservedMemory
from ..frontends.torch import Captured
from ..ir import BudgetError, Plan, TimeLimitError, Trait
from ..passes import PassManager, Program
from ..torch_support.attribute_reads import Names
from .captured_call import captured_call
from .planned_program import NOTHING_RESERVED, costed_call, planned_call, prepared_call
from .request import Request
from .tiles import tiles_advice, tiles_of, whole_or_tiled
from .time_steps import kernels_or_time_steps

__all__ = ["Case", "Planned"]


@dataclass(frozen=True)
class Planned:
    """A call with a schedule and its certificate.

    Args:
        captured: The call as a graph: LSTM layers are the kernels that eager runs, or their time steps.
        names: What was read of each submodule while it was traced.
        program: The graph, rewritten, with costs, schedule and certificate.
    """

    captured: Captured
    names: Names
    program: Program


@dataclass(frozen=True)
class Case:
    """A captured call that can be planned at any budget.

    A plan may take several forms of the call: LSTM layers as kernels or as their time steps, operations fused
    or not, all whole or the widest in tiles of rows. `plan` is the one loop over them.

    Args:
        captured: The call as a graph.
        names: What was read of each submodule while it was traced.
        request: What is asked of a plan.
        reserved: What the module holds already for other plans.
        time_steps: Captures the call with its LSTM layers as time steps.
    """

    captured: Captured
    names: Names
    request: Request
    reserved: ReservedMemory
    time_steps: Callable[[], tuple[Captured, Names]]

    @staticmethod
    def of(
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: Request,
        reserved: ReservedMemory = NOTHING_RESERVED,
    ) -> Case:
        """Captures a call of a module, which may be without data.

        Args:
            module: What is called.
            args: Its arguments.
            kwargs: Its keyword arguments.
            request: What is asked of a plan.
            reserved: What the module holds already for other plans.

        Raises:
            UnsupportedError: The model uses what is not supported.
            UsageError: IRC522 if the loss does not run on a result that is larger than the example's.
        """
        trace = partial(captured_call, module, args, kwargs, request)
        return Case(*trace(), request, reserved, partial(trace, stepwise=True))

    def plan(self) -> Planned:
        """Plans the call: the fastest plan of the first form that fits.

        Kernels come before time steps, which are captured only if no kernels fit, and fused operations before
        others.

        Raises:
            BudgetError: IRC204 if no form fits, as of the form that needs least; nothing has run.
            TimeLimitError: IRC205 if the time limit ended before any schedule was found.
        """
        return kernels_or_time_steps(
            self.captured.graph,
            lambda: self._fused_or_not(self.captured, self.names, self.prepared),
            self._by_time_steps,
        )

    @cached_property
    def prepared(self) -> Program:
        """The graph, rewritten, without costs."""
        return prepared_call(self.captured, self.request)

    @cached_property
    def as_eager_runs(self) -> Program:
        """The rewritten graph with costs: plans of other forms are compared with it."""
        return costed_call(self.prepared, self.request)

    def _by_time_steps(self) -> Planned:
        captured, names = self.time_steps()
        prepared = replace(prepared_call(captured, self.request), kernels=self.as_eager_runs)
        return self._fused_or_not(captured, names, prepared)

    def _fused_or_not(self, captured: Captured, names: Names, prepared: Program) -> Planned:
        """Plans a capture of the call: of fused operations, if their compiler is asked for and they fit."""
        compiler, refusals = self.request.compiler, list[BudgetError]()
        for request in (self.request, *(() if compiler is None else (replace(self.request, compiler=None),))):
            try:
                program = _Form(self, captured, prepared, request).plan()
            except BudgetError as error:
                refusals.append(error)
                continue
            if request.compiler is not compiler:  # it was asked for all the same
                program = replace(program, plan=replace(_plan(program), compiler=compiler or ""))
            return Planned(captured, names, program)
        raise min(refusals, key=lambda error: error.minimum_bytes)


@dataclass(frozen=True)
class _Form:
    """A form of a call: its graph with all operations whole, which may be fused, or have tiles.

    Args:
        case: The call.
        captured: It, as a graph of this form.
        prepared: The graph, rewritten.
        request: What is asked of its plan; without the compiler if nothing is fused.
    """

    case: Case
    captured: Captured
    prepared: Program
    request: Request

    def plan(self) -> Program:
        """Plans it: with rows in tiles where the request lets them be.

        Once something fits, each further search takes what is left of the time limit, and at least a quarter.

        Raises:
            BudgetError: IRC204.
            TimeLimitError: IRC205.
        """
        request, started = self.request, time.thread_time()
        functional = self._without_writes()
        tried: list[int] = []
        fitting: list[Program] = []

        def planned(program: Program) -> Program:
            limit = request.plan.time_limit
            left = max(limit - (time.thread_time() - started), limit / 4) if fitting else limit
            within = replace(request, plan=replace(request.plan, time_limit=left))
            tried.append(program.tiles)
            fitting.append(planned_call(self.captured, _fused(program, within), within, self.case.reserved))
            return fitting[-1]

        def tiled(tiles: int) -> Program | None:
            in_tiles = PassManager([*request.in_tiles(tiles)], request.observers).run(functional)
            if not in_tiles.tiles:
                return None
            return planned(replace(in_tiles, original=None, kernels=self.case.as_eager_runs))

        same = self._tiled_as_the_example(tiled)
        if same is not None:
            return same
        try:
            best = whole_or_tiled(
                tiles_of(functional.graph, request),
                lambda: planned(functional if request.fusing else self.prepared),
                tiled,
                step_seconds=_step_seconds,
                is_best=lambda program: _plan(program).overhead <= request.plan.gap,
            )
        except BudgetError as error:
            error.help = "; ".join(filter(None, (error.help, tiles_advice(functional.graph, request))))
            raise
        if len(tried) > 1:
            best = replace(best, plan=replace(_plan(best), seconds_to_plan=time.thread_time() - started))
        return best

    def _without_writes(self) -> Program:
        """The graph before it writes in place, which rewrites can read."""
        if not any(Trait.OVERWRITES in node.traits for node in self.prepared.graph.nodes):
            return self.prepared
        functional = prepared_call(self.captured, self.request.without_writes)
        return replace(functional, kernels=self.prepared.kernels)

    def _tiled_as_the_example(self, tiled: Callable[[int], Program | None]) -> Program | None:
        """The plan in as many tiles as the example's, whose schedule may be taken over, if there is one."""
        example = None if self.request.example is None else self.request.example.program
        if example is not None and example.tiles:
            with contextlib.suppress(BudgetError, TimeLimitError):
                return tiled(example.tiles)
        return None


def _fused(program: Program, request: Request) -> Program:
    """The program with kernels, if the request names their compiler, and with writes in place."""
    fusing = () if request.fusing is None else (request.fusing,)
    with torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
        return PassManager([*fusing, *request.writing], request.observers).run(program)


def _plan(program: Program) -> Plan:
    assert program.plan is not None
    return program.plan


def _step_seconds(program: Program) -> float:
    return (1 + _plan(program).overhead) * (_plan(program).step_seconds or 0.0)
