"""The estimate of a training step on a machine: what stands in memory, the plan that fits, and its speed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...frontends.torch import Captured, Loss
from ...ir import (
    BudgetError,
    Gradients,
    Graph,
    Input,
    InputRole,
    Plan,
    TensorType,
    TimeLimitError,
    format_bytes,
    parse_budget,
    printable,
)
from ...passes import CheckpointProblem, Machine, PassManager, Planner, Program, machine_named
from ...passes.costs.optimizer_costs import OptimizerFactory, extrapolated_step_costs, optimizer_of
from ...passes.costs.table import StepCost
from ...torch_support.pytree import flatten
from ..case import Case
from ..frozen_heap import frozen_heap
from ..pipeline.micro_batches import batch_of
from ..request import Request
from .memory_use import MemoryUse, memory_use, use_after_backward

__all__ = ["Estimate", "estimate", "items_of", "without_large_steps"]

DRIVER_PART = 0.05
"""The part of a described device that is left to its driver, its context and the allocator's gaps."""

_LOOP_BYTES = 4096
"""The bytes of what a training loop holds of single numbers: the loss, its gradient, what it logs."""

ROOFLINE_ERROR = (0.4, 1.6)
"""The measured times of whole steps on a CPU, in times of its measured roofline: the least and the most of
two runs of twelve models (docs/results/estimates.md). Rates measured on a busy machine give the least."""


@dataclass(frozen=True)
class Estimate:
    """The estimate of a training step.

    Args:
        parameters: The number of elements of the parameters.
        trained: Those of them that are trained.
        machine: The source of times and workspaces: a described machine, or `measured`.
        capacity_bytes: The memory of the device; 0 if it is not known.
        budget_bytes: The bytes that the plan may take.
        written: The step as its user wrote it; an optimizer's state is there beside it.
        static_bytes: The bytes that are there between steps, as irc plans it.
        minimum_bytes: The smallest budget that a schedule was found for.
        plan: The plan within the budget; None if there is none.
        planned: The memory of the plan at its peak.
        why_not: The reason if there is no plan.
        items: The number of tokens or samples of a step.
        unit: `tokens` or `samples`.
        step_seconds: The time of the step that computes nothing twice.
    """

    parameters: int
    trained: int
    machine: str
    capacity_bytes: int
    budget_bytes: int
    written: MemoryUse
    static_bytes: int
    minimum_bytes: int
    plan: Plan | None
    planned: MemoryUse | None
    why_not: str
    items: int
    unit: str
    step_seconds: float

    @property
    def fits(self) -> bool:
        """Whether there is a plan within the budget."""
        return self.plan is not None

    @property
    def items_per_second(self) -> float:
        """The tokens or samples that a planned step trains on in a second; 0 without a plan."""
        if self.plan is None or not self.step_seconds:
            return 0.0
        return self.items / (self.step_seconds * (1 + self.plan.overhead))

    def to_json(self) -> dict[str, Any]:
        """The estimate as JSON-ready data."""
        planned, plan = self.planned, self.plan
        return {
            "format": "irc-estimate-1",
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "machine": self.machine,
            "capacity_bytes": self.capacity_bytes,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "why_not": self.why_not or None,
            "as_written": {"peak_bytes": self.written.peak_bytes, "kinds": dict(self.written.kinds)},
            "static_bytes": self.static_bytes,
            "minimum_budget_bytes": self.minimum_bytes,
            "planned": None
            if planned is None or plan is None
            else {
                "peak_bytes": planned.peak_bytes,
                "kinds": dict(planned.kinds),
                "overhead": plan.overhead,
                "lower_bound_overhead": plan.lower_bound_overhead,
            },
            "step_seconds": self.step_seconds,
            "unit": self.unit,
            "items": self.items,
            "items_per_second": self.items_per_second,
            "seconds_are": self._source,
        }

    def summary(self) -> str:
        """The estimate for a person."""
        rows = [("", "as written", "planned")]
        planned = self.planned.kinds if self.planned else {}
        kinds = [kind for kind in (*self.written.kinds, *planned)]
        for kind in dict.fromkeys(kinds):
            rows.append((kind, _bytes(self.written.kinds.get(kind)), _bytes(planned.get(kind))))
        peak = self.planned.peak_bytes if self.planned else None
        rows.append(("peak", _bytes(self.written.peak_bytes), _bytes(peak)))
        lines = [f"{name:>24}  {one:>10}  {two:>10}".rstrip() for name, one, two in rows]
        frozen = "" if self.trained == self.parameters else f", {_count(self.trained)} of them trained"
        lines.insert(0, f"{'parameters':>16}  {_count(self.parameters)}{frozen}")
        lines += [
            f"{'smallest budget':>16}  {format_bytes(self.minimum_bytes)} ({self.minimum_bytes:,} bytes)",
            f"{'budget':>16}  {format_bytes(self.budget_bytes)}{self._of_capacity}",
            f"{'plan':>16}  {self._verdict}",
        ]
        if self.plan is not None:
            lines.append(f"{'speed':>16}  {self.items_per_second:,.4g} {self.unit} a second, {self._source}")
        return "\n".join(lines)

    @property
    def _of_capacity(self) -> str:
        if not self.capacity_bytes:
            return ""
        return f", of {format_bytes(self.capacity_bytes)} of {self.machine}"

    @property
    def _verdict(self) -> str:
        plan = self.plan
        if plan is None:
            return f"none: {self.why_not}"
        if not plan.overhead:
            return f"fits as it is: {format_bytes(plan.peak_bytes)}, nothing runs twice"
        return (
            f"fits in {format_bytes(plan.peak_bytes)} with {plan.overhead:.2%} more time "
            f"(no schedule adds less than {plan.lower_bound_overhead:.2%})"
        )

    @property
    def _source(self) -> str:
        """The source of the times."""
        if self.machine in ("measured", "thorough"):
            return "by measured operations"
        least, most = ROOFLINE_ERROR
        return (
            f"by the roofline of {self.machine}: a described machine, whose steps were not measured (on a "
            f"CPU of known rates, steps took {least:g} to {most:g} times as long as its roofline says)"
        )


def estimate(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    machine: str = "h100",
    budget: int | str | None = None,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
    exact: bool | str = True,
    time_limit: float = 60.0,
) -> Estimate:
    """Estimates what a training step of a model takes on a machine, without weights and without running it.

    Args:
        model: An `nn.Module` in train() mode; on the device `meta` or made under torch's `FakeTensorMode`
            it needs no memory.
        example_args: Arguments of one training step.
        example_kwargs: Keyword arguments of one training step.
        machine: The name of a described machine or the path of a file that `irc machine -o` wrote;
            `measured` runs each operation on this machine.
        budget: The bytes that a plan may take, as of `irc.optimize`; None for what the machine has, less a
            twentieth that is left to its driver.
        optimizer: Makes the optimizer of a list of parameters, as `optimizer_in_backward` of `irc.optimize`.
            As written it steps after backward, as planned within it.
        loss: The loss of the model's result, as of `irc.optimize`.
        exact: As of `irc.optimize`.
        time_limit: Seconds of the processor for the search of a schedule.

    Raises:
        UnsupportedError: The model uses what irc does not support.
        UsageError: An argument is malformed.
    """
    described = None if machine in ("measured", "thorough") else machine_named(machine)
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    kwargs = dict(example_kwargs or {})
    capacity_bytes = 0 if described is None else described.capacity_bytes
    whole = max(int(capacity_bytes * (1 - DRIVER_PART)), 1) if capacity_bytes else "100%"
    asked = whole if budget is None else budget
    request = Request.of(
        asked, costs=machine, optimizer=optimizer, loss=loss, exact=exact, time_limit=time_limit
    )
    with frozen_heap():
        case = Case.of(model, args, kwargs, request)
        case = replace(case, request=without_large_steps(request, case.captured))
        return _estimate(case, described, items_of(args, kwargs))


def _estimate(case: Case, described: Machine | None, items: tuple[int, str]) -> Estimate:
    """The estimate of a captured call."""
    captured, request, graph = case.captured, case.request, case.captured.graph
    costed = PassManager([request.cost]).run(Program(graph, eager=captured.eager))
    prepared = PassManager(request.preparing).run(Program(graph))
    try:
        program, why_not = case.plan().program, ""
        plan, schedule, costs = program.plan, program.schedule, program.costs
        assert plan is not None and schedule is not None and costs is not None
        planned = memory_use(schedule, costs.workspace_bytes)
        minimum_bytes, budget_bytes = plan.minimum_budget_bytes, plan.budget_bytes
    except (BudgetError, TimeLimitError) as error:
        program, plan, planned = PassManager([request.cost]).run(prepared), None, None
        why_not = error.message.partition("; ")[0]
        planner = Planner(program)
        minimum_bytes = error.minimum_bytes if isinstance(error, BudgetError) else planner.minimum_bytes()
        budget_bytes = parse_budget(request.budget, planner.baseline_bytes)
    parameters = _parameters(graph)
    return Estimate(
        parameters=sum(entry.value.type.numel for entry in parameters),
        trained=sum(entry.value.type.numel for entry in parameters if entry.requires_grad),
        machine="measured" if described is None else printable(described.name, 64),
        capacity_bytes=0 if described is None else described.capacity_bytes,
        budget_bytes=budget_bytes,
        written=_as_written(
            captured,
            costed,
            prepared.graph,
            at_once=None if request.optimizer is None else _steps_at_once(request.optimizer, described),
        ),
        static_bytes=prepared.graph.static_bytes,
        minimum_bytes=minimum_bytes,
        plan=plan,
        planned=planned,
        why_not=why_not,
        items=items[0],
        unit=items[1],
        step_seconds=Planner(program).problem.step_seconds,
    )


def _as_written(
    captured: Captured, costed: Program, prepared: Graph, *, at_once: OptimizerFactory | None
) -> MemoryUse:
    """The memory of the step as its user wrote it: in backward, or when the optimizer steps after it.

    Args:
        captured: The call.
        costed: Its graph with costs.
        prepared: The graph with the optimizer's steps, if there is one.
        at_once: The factory of that optimizer, if it makes its temporaries for all parameters at once.
    """
    assert costed.costs is not None
    graph, workspaces = captured.graph, costed.costs.workspace_bytes
    eager_bytes = 0 if captured.eager is None else captured.eager.peak_bytes(graph, workspaces) + _LOOP_BYTES
    schedule = CheckpointProblem(graph, costed.costs).eager.schedule
    if prepared.gradients is not Gradients.APPLIED:
        return memory_use(schedule, workspaces, peak_bytes=eager_bytes)
    state_bytes = prepared.reserved_bytes
    if at_once is None:
        step_bytes = max((StepCost.of(node).workspace_bytes for node in prepared.releases), default=0)
    else:
        types = _trained_types(graph)
        costs = extrapolated_step_costs(at_once, types)
        step_bytes = sum(costs[type].workspace_bytes for type in types)
    return max(
        memory_use(schedule, workspaces, peak_bytes=eager_bytes, state_bytes=state_bytes),
        use_after_backward(graph, {"optimizer state": state_bytes, "workspaces": _LOOP_BYTES + step_bytes}),
        key=lambda use: use.peak_bytes,
    )


def _steps_at_once(factory: OptimizerFactory, described: Machine | None) -> OptimizerFactory | None:
    """The factory of an optimizer whose step makes its temporaries for all parameters at once (`foreach`).

    Torch chooses that on GPUs unless it is told otherwise. A described machine with a tier `host` is one.
    None if the factory's optimizer takes its steps in turn.
    """
    is_gpu = torch.cuda.is_available() if described is None else described.tier("host") is not None

    def at_once(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer_of(factory, parameters)
        for group in made.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = is_gpu
        return made

    groups = at_once([nn.Parameter(torch.zeros(1))]).param_groups
    return at_once if any(group.get("foreach") for group in groups) else None


def without_large_steps(request: Request, captured: Captured) -> Request:
    """The request, with the costs of an optimizer's steps known for large parameters: none is made up."""
    if request.release is None or request.optimizer is None:
        return request
    known = extrapolated_step_costs(request.optimizer, _trained_types(captured.graph))
    return replace(request, release=replace(request.release, known=known))


def _trained_types(graph: Graph) -> list[TensorType]:
    """The type of each parameter that is trained."""
    return [entry.value.type for entry in _parameters(graph) if entry.requires_grad]


def _parameters(graph: Graph) -> Collection[Input]:
    """The parameters of a graph, of tied ones one."""
    return {graph.tied[e.value]: e for e in graph.inputs if e.role is InputRole.PARAMETER}.values()


def items_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, str]:
    """The number of tokens or samples of a step: the elements of its first tensor of whole numbers in rows.

    Without one, the batch counts: the first dimension of its first tensor.
    """
    leaves = flatten((args, dict(kwargs)))[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    whole = (t for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32))
    tokens = next(whole, None)
    if tokens is not None:
        return tokens.numel(), "tokens"
    return batch_of((*args, *kwargs.values())), "samples"


def _count(number: int) -> str:
    """A number of elements with a decimal unit."""
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)
