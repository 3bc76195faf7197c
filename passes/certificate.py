"""The certificate of a choice: what it costs, how far from the best it can be, and why each storage goes."""

from __future__ import annotations

from collections import Counter

from ..ir import Compute, Decision, Loss, Node, Plan, Storage, format_bytes
from .checkpointing import CheckpointProblem, Simulated
from .search import Found

__all__ = ["certify"]

_PROOF_GAP = 1e-4


def certify(
    problem: CheckpointProblem,
    budget_bytes: int,
    found: Found,
    *,
    baseline_bytes: int,
    minimum_bytes: int,
    seconds: float,
) -> Plan:
    """The plan of what a search found.

    Args:
        problem: What was searched.
        budget_bytes: What was asked for.
        found: The schedule, and the bound.
        baseline_bytes: Peak of the graph as it was captured, where nothing runs twice.
        minimum_bytes: The smallest peak that a schedule is known for.
        seconds: How long planning took.
    """
    step = problem.step_seconds
    overhead = max(found.best.seconds / step - 1, 0.0) if step else 0.0
    bound = min(found.bound_seconds / step, overhead) if step else 0.0
    return Plan(
        budget_bytes=budget_bytes,
        peak_bytes=found.best.peak_bytes,
        baseline_peak_bytes=baseline_bytes,
        static_bytes=problem.graph.static_bytes,
        minimum_budget_bytes=min(minimum_bytes, found.best.peak_bytes),
        floor_bytes=problem.floor_bytes,
        step_seconds=step,
        overhead=overhead,
        lower_bound_overhead=bound,
        proven_optimal=overhead - bound <= _PROOF_GAP,
        strategy=found.name,
        costs=problem.costs.source,
        decisions=_decisions(problem, found.best),
        seconds_to_plan=seconds,
    )


def _decisions(problem: CheckpointProblem, simulated: Simulated) -> tuple[Decision, ...]:
    """One decision for each storage that forward makes and that is no output."""
    runs = Counter(simulated.order)
    kept = _alive_at_loss(simulated)
    wanted = set(problem.wanted)
    decisions: list[Decision] = []
    for storage, node in problem.producer.items():
        again = runs[node] - 1
        seconds = problem.costs.seconds[node] * again
        if storage in kept:
            action, reason = "keep", _why_kept(problem, storage, node)
        elif storage in problem.read_positions or (again and storage in wanted):
            action, reason = _why_not_kept(problem, storage, again, seconds)
        else:
            action, reason = "free", "backward reads neither it nor anything that is made from it again"
        where = str(node.at) if node.at is not None else ""
        decisions.append(
            Decision(
                storage.name,
                f"{node.name} ({node.op})",
                storage.nbytes,
                action,
                again,
                seconds,
                reason,
                where,
            )
        )
    return tuple(decisions)


def _alive_at_loss(simulated: Simulated) -> set[Storage]:
    alive: set[Storage] = set()
    for instruction in simulated.schedule.instructions:
        if isinstance(instruction, Loss):
            break
        if isinstance(instruction, Compute):
            alive |= instruction.retained
        else:
            alive.discard(instruction.storage)
    return alive


def _why_kept(problem: CheckpointProblem, storage: Storage, node: Node) -> str:
    if not node.is_recomputable:
        return "its operation may run only once (" + ", ".join(sorted(t.value for t in node.traits)) + ")"
    return f"{_purpose(problem, storage)}; its operation takes {_milliseconds(problem.costs.seconds[node])}"


def _why_not_kept(
    problem: CheckpointProblem, storage: Storage, again: int, seconds: float
) -> tuple[str, str]:
    if not again:
        return "free", "backward does not need it under this plan"
    return (
        "recompute",
        f"{_purpose(problem, storage)}; its operation runs again {_times(again)} "
        f"({_milliseconds(seconds)}) and {format_bytes(storage.nbytes)} are free in between",
    )


def _purpose(problem: CheckpointProblem, storage: Storage) -> str:
    reads = len(problem.read_positions.get(storage, ()))
    return f"backward reads it {_times(reads)}" if reads else "other values are made from it again"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds * 1e3:,.0f} ms"
