"""A report of what a model needs to train: tensors by role, largest storages, peak, smallest budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compiler.time_steps import has_kernels
from ..ir import InputRole, Storage, format_bytes, liveness, printable
from ..passes import CheckpointProblem, Planner, Program, smallest_budget

__all__ = ["Inspection", "inspect_program"]


@dataclass(frozen=True, slots=True)
class Row:
    """A storage that forward makes."""

    storage: str
    nbytes: int
    type: str
    operation: str
    location: str


@dataclass(frozen=True)
class Inspection:
    """A model's memory.

    Args:
        roles: Count and bytes of parameters, buffers, inputs, constants.
        operations: Operations of forward and of backward.
        baseline_peak_bytes: Peak of a step that computes nothing twice, static bytes included.
        baseline_source: How that is known, as in a plan.
        minimum_budget_bytes: The smallest budget that a schedule was found for.
        floor_bytes: What no schedule can go below.
        has_kernels: Whether it runs LSTM layers by kernels, whose time steps may take less.
        step_seconds: Time of the step.
        costs: Where seconds and workspaces come from.
        peak_operation: What runs at the baseline's peak.
        largest: The largest storages that forward makes.
    """

    roles: dict[str, tuple[int, int]]
    operations: tuple[int, int]
    baseline_peak_bytes: int
    baseline_source: str
    minimum_budget_bytes: int
    floor_bytes: int
    step_seconds: float
    costs: str
    peak_operation: str
    largest: tuple[Row, ...]
    has_kernels: bool = False

    def to_json(self) -> dict[str, Any]:
        """The inspection as JSON-ready data."""
        return {
            "roles": {
                role: {"count": count, "bytes": nbytes} for role, (count, nbytes) in self.roles.items()
            },
            "forward_operations": self.operations[0],
            "backward_operations": self.operations[1],
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "baseline_source": self.baseline_source,
            "minimum_budget_bytes": self.minimum_budget_bytes,
            "floor_bytes": self.floor_bytes,
            "step_seconds": self.step_seconds,
            "costs": self.costs,
            "peak_operation": self.peak_operation,
            "largest": [
                {
                    "storage": row.storage,
                    "bytes": row.nbytes,
                    "type": row.type,
                    "operation": row.operation,
                    "at": row.location,
                }
                for row in self.largest
            ],
        }

    def table(self) -> str:
        """The inspection for a person."""
        lines = [
            f"{role:>12}  {count:6d}  {format_bytes(nbytes):>10}"
            for role, (count, nbytes) in self.roles.items()
        ]
        lines += [
            f"{'operations':>12}  {self.operations[0]} forward, {self.operations[1]} backward; a step takes "
            f"{self.step_seconds * 1e3:.4g} ms (costs {self.costs})",
            f"{'baseline':>12}  {format_bytes(self.baseline_peak_bytes)} at its peak "
            f"({self.baseline_peak_bytes:,} bytes), in {self.peak_operation}"
            f"{', modelled: the graph as captured' * (self.baseline_source == 'modelled')}",
            f"{'smallest':>12}  {format_bytes(self.minimum_budget_bytes)} budget "
            f"({self.minimum_budget_bytes:,} bytes, "
            f"{self.minimum_budget_bytes / self.baseline_peak_bytes:.1%} of baseline); "
            f"none is below {self.floor_bytes:,}"
            f"{' with LSTM kernels, and time steps of these layers may take less' * self.has_kernels}",
            "largest storages of forward:" if self.largest else "",
        ]
        lines += [
            f"{format_bytes(r.nbytes):>12}  {r.type:<34} {r.operation:<44} {r.location}" for r in self.largest
        ]
        return "\n".join(line.rstrip() for line in lines).rstrip()


def inspect_program(program: Program, top: int) -> Inspection:
    """Looks at a program with costs.

    Args:
        program: A graph and its costs.
        top: How many storages to list.
    """
    assert program.costs is not None, "costs come first"
    graph = program.graph
    problem = CheckpointProblem(program.original or graph, program.costs)
    baseline = problem.eager.schedule
    timeline = liveness(baseline, program.costs.workspace_bytes)
    planner = Planner(program)
    minimum, floor = smallest_budget(planner), planner.problem.floor_bytes
    made = sorted(problem.producer.items(), key=lambda item: -item[0].nbytes)[:top]
    rows: list[Row] = []
    for storage, node in made:
        value = next(v for v in node.values if v.storage is storage)
        shape = ", ".join(map(str, value.type.shape))
        where = str(node.at) if node.at is not None else ""
        of_type = f"{value.type.dtype.value}[{shape}]"
        rows.append(Row(storage.name, storage.nbytes, of_type, printable(f"{node.name} ({node.op})"), where))
    at_peak = baseline.instructions[timeline.peak_index]
    node = getattr(at_peak, "node", None)
    return Inspection(
        roles={role.value: _sum(program, role) for role in InputRole if role is not InputRole.TANGENT},
        operations=(len(problem.forward), len(problem.backward)),
        baseline_peak_bytes=planner.baseline.peak_bytes,
        baseline_source=planner.baseline.source,
        minimum_budget_bytes=minimum,
        floor_bytes=floor,
        step_seconds=planner.problem.step_seconds,
        has_kernels=has_kernels(graph),
        costs=program.costs.source,
        peak_operation="the loss" if node is None else printable(f"{node.name} ({node.op})"),
        largest=tuple(rows),
    )


def _sum(program: Program, role: InputRole) -> tuple[int, int]:
    inputs = [i for i in program.graph.inputs if i.role is role]
    storages: set[Storage] = {i.value.storage for i in inputs}
    return len(inputs), sum(storage.nbytes for storage in storages)
