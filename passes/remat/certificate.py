"""The certificate of a choice: its cost, its distance from the best, and the reason for each storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ...ir import (
    Annotation,
    AnnotationEffect,
    Copy,
    Decision,
    Direction,
    Fetch,
    Free,
    Loss,
    Node,
    Plan,
    Policy,
    Schedule,
    StepTimes,
    Storage,
    Tier,
    TierUse,
    Trait,
    Wait,
    format_bytes,
    liveness,
    nondeterminism,
    operation_of,
    resident_before,
    step_times,
    stored_bytes,
)
from .choice import ChosenSchedule
from .planner import Baseline
from .problem import CheckpointProblem, Solution

__all__ = ["certify"]

_PROOF_GAP = 1e-4


def certify(
    chosen: ChosenSchedule,
    budget_bytes: int,
    *,
    baseline: Baseline,
    seconds: float,
    kernels_seconds: float = math.inf,
) -> Plan:
    """Makes the plan of a schedule.

    The bound is one for all schedules of the same operations.

    Args:
        chosen: The schedule, and what is known about smaller budgets.
        budget_bytes: The budget that was asked for.
        baseline: The memory of the step before it is planned.
        seconds: The time that planning took.
        kernels_seconds: The time of the step by kernels, which time steps are compared with.
    """
    problem, incumbent, tiers = chosen.problem, chosen.incumbent, chosen.tiers
    step = min(problem.step_seconds, kernels_seconds)
    slower_seconds = problem.step_seconds - step
    overhead = max(incumbent.best.seconds / step - 1, 0.0) if step else 0.0
    bound = min((slower_seconds + incumbent.bound_seconds) / step, overhead) if step else 0.0
    times = step_times(incumbent.best.schedule, problem.costs.seconds, tiers)
    made = _decisions(problem, incumbent.best, times)
    decisions = made | _offloaded_parameters(problem, incumbent.best.schedule, times)
    there = liveness(incumbent.best.schedule, problem.costs.workspace_bytes, with_gradients=True)
    dropped = liveness(incumbent.best.schedule, problem.costs.workspace_bytes, without_unused=True)
    return Plan(
        budget_bytes=budget_bytes,
        peak_bytes=incumbent.best.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        static_bytes=problem.graph.static_bytes,
        minimum_budget_bytes=min(chosen.minimum_bytes, incumbent.best.peak_bytes),
        floor_bytes=chosen.floor_bytes,
        step_seconds=step if problem.costs.has_times else None,
        overhead=overhead,
        lower_bound_overhead=bound,
        proven_optimal=overhead - bound <= _PROOF_GAP,
        strategy=incumbent.name,
        costs=problem.costs.source,
        decisions=tuple(decisions.values()),
        seconds_to_plan=seconds,
        annotations=tuple(
            AnnotationEffect(annotation.by, annotation.policy.value, _effect(problem, annotation, made))
            for annotation in problem.graph.annotations
        ),
        forwards_in_flight=problem.graph.forwards_in_flight,
        peak_with_gradients_bytes=None if problem.graph.sparse_gradients else there.peak_bytes,
        peak_without_unused_bytes=dropped.peak_bytes,
        baseline_source=baseline.source,
        baseline_without_unused_bytes=baseline.without_unused_bytes,
        baseline_above_eager_bytes=baseline.peak_bytes - baseline.eager_bytes,
        tiers=tuple(_uses(incumbent.best.schedule, times, tiers)),
        exposed_seconds=_exposed_seconds(incumbent.best, times),
        offloaded_bytes=sum(offloaded.storage.nbytes for offloaded in problem.graph.offloaded_parameters),
    )


def _exposed_seconds(best: Solution, times: StepTimes) -> float:
    """The time in which copies are waited for; 0 if it is only rounding."""
    exposed = best.seconds - times.compute_seconds if times.copies else 0.0
    return exposed if exposed > 1e-9 * times.compute_seconds else 0.0


def _uses(schedule: Schedule, times: StepTimes, tiers: Sequence[Tier]) -> Iterator[TierUse]:
    held = stored_bytes(schedule)
    for tier in tiers:
        if tier.name in held:
            copies = [copy for copy in times.copies if copy.tier == tier.name]
            moved = {
                way: sum(c.storage.nbytes for c in copies if c.direction is way)
                for way in (Direction.OUT, Direction.IN)
            }
            yield TierUse(
                tier.name,
                tier.capacity_bytes,
                max(held[tier.name]),
                moved[Direction.OUT],
                moved[Direction.IN],
                times.busy_seconds(tier.name, Direction.OUT),
                times.busy_seconds(tier.name, Direction.IN),
            )


def _decisions(problem: CheckpointProblem, solution: Solution, times: StepTimes) -> dict[Storage, Decision]:
    """The decision for each storage that forward makes and that is not an output."""
    runs = Counter(solution.order)
    loss = next(
        k for k, instruction in enumerate(solution.schedule.instructions) if isinstance(instruction, Loss)
    )
    kept = resident_before(solution.schedule, loss)
    wanted = set(problem.wanted)
    copied: dict[Storage, list[Copy]] = {}
    for copy in times.copies:
        copied.setdefault(copy.storage, []).append(copy)
    decisions: dict[Storage, Decision] = {}
    results = Counter(problem.producer.values())
    for storage, node in problem.producer.items():
        again = runs[node] - 1
        seconds = problem.costs.seconds[node] * again
        if storage in copied:
            action, reason = "swap", _why_swapped(solution.schedule, times, copied[storage], again)
        elif storage in kept:
            action, reason = "keep", _why_kept(problem, storage, node)
        elif storage in problem.read_positions or (again and storage in wanted):
            action, reason = _why_not_kept(problem, storage, again, seconds)
        else:
            action, reason = "free", "backward does not need it"
        decisions[storage] = Decision(
            storage.name,
            f"{node.name} ({operation_of(node)})",
            storage.nbytes,
            action,
            again,
            seconds / results[node],
            f"{reason}; a hint: {node.annotation.by}"
            if node.annotation is not None and node.annotation.is_hint
            else reason,
            str(node.at) if node.at is not None else "",
            _deciding(node, action),
        )
    return decisions


def _offloaded_parameters(
    problem: CheckpointProblem, schedule: Schedule, times: StepTimes
) -> dict[Storage, Decision]:
    """The decision for each parameter and state of an optimizer that lives in a tier."""
    found: dict[Storage, Decision] = {}
    for offloaded in problem.graph.offloaded_parameters:
        copies = [copy for copy in times.copies if copy.storage is offloaded.storage]
        fetched = sum(copy.direction is Direction.IN for copy in copies)
        written = "written back once" if len(copies) > fetched else "not changed"
        waited = sum(
            end - start
            for step, start, end in zip(
                schedule.instructions, times.start_seconds, times.end_seconds, strict=True
            )
            if isinstance(step, Wait) and step.storage is offloaded.storage
        )
        found[offloaded.storage] = Decision(
            offloaded.storage.name,
            offloaded.name,
            offloaded.storage.nbytes,
            "swap",
            0,
            0.0,
            f"lives in {offloaded.tier}: copied to the device {_times(fetched)} and {written}, "
            f"{_milliseconds(waited)} waited for",
        )
    return found


def _deciding(node: Node, action: str) -> str:
    """The annotation that made the decision, or nothing."""
    if node.annotation is None or node.run_once:
        return ""
    decided = {Policy.KEEP: "keep", Policy.RECOMPUTE: "recompute"}.get(node.annotation.policy)
    return node.annotation.by if action == decided else ""


def _why_swapped(schedule: Schedule, times: StepTimes, copies: Sequence[Copy], again: int) -> str:
    """Says what the copies of a storage cost, and for how long it is away."""
    storage, tier = copies[0].storage, copies[0].tier
    taken = " and ".join(
        f"{_milliseconds(sum(c.end_seconds - c.start_seconds for c in copies if c.direction is way))} {word}"
        for way, word in ((Direction.OUT, "out"), (Direction.IN, "back"))
    )
    away = waited = 0.0
    left = 0.0
    for step, instruction in enumerate(schedule.instructions):
        match instruction:
            case Free(freed) if freed is storage:
                left = times.start_seconds[step]
            case Fetch(fetched) if fetched is storage:
                away += times.start_seconds[step] - left
            case Wait(awaited) if awaited is storage:
                waited += times.end_seconds[step] - times.start_seconds[step]
            case _:
                pass
    exposed = f"of which {_milliseconds(waited)} are waited for" if waited > 0 else "beside computations"
    remade = f"; its operation runs again {_times(again)} besides" if again else ""
    return f"copied to {tier} ({taken}, {exposed}) and away for {_milliseconds(away)} of the step{remade}"


def _why_kept(problem: CheckpointProblem, storage: Storage, node: Node) -> str:
    if once := node.run_once:
        reasons = [_because(node, trait) for trait in sorted(once, key=lambda t: t.value)]
        against = node.annotation is not None and node.annotation.policy is Policy.RECOMPUTE
        return f"its operation may run only once ({', '.join(reasons)})" + (
            f", in spite of {node.annotation.by}" if node.annotation is not None and against else ""
        )
    if annotation := _deciding(node, "keep"):
        return f"{annotation}: {_purpose(problem, storage)}"
    if not problem.costs.has_times:
        return _purpose(problem, storage)
    return f"{_purpose(problem, storage)}; its operation takes {_milliseconds(problem.costs.seconds[node])}"


def _because(node: Node, trait: Trait) -> str:
    why = nondeterminism(node) if trait is Trait.NONDETERMINISTIC else None
    return f"{trait.value}: {why}" if why else trait.value


def _why_not_kept(
    problem: CheckpointProblem, storage: Storage, again: int, seconds: float
) -> tuple[str, str]:
    if not again:
        return "free", "backward does not need it under this plan"
    annotation = _deciding(problem.producer[storage], "recompute")
    return (
        "recompute",
        f"{annotation and annotation + ': '}{_purpose(problem, storage)}; its operation runs again "
        f"{_times(again)} "
        f"({_milliseconds(seconds)}) and {format_bytes(storage.nbytes)} are free in between",
    )


def _purpose(problem: CheckpointProblem, storage: Storage) -> str:
    reads = len(problem.read_positions.get(storage, ()))
    return f"backward reads it {_times(reads)}" if reads else "other values are made from it again"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds * 1e3:,.0f} ms"


def _effect(problem: CheckpointProblem, annotation: Annotation, decisions: Mapping[Storage, Decision]) -> str:
    """Says what an annotation did."""
    mine = {s: d for s, d in decisions.items() if problem.producer[s].annotation == annotation}
    operations = [node for node in problem.forward if node.annotation == annotation]
    kept = [d for d in mine.values() if d.action == "keep"]
    again = [d for d in mine.values() if d.action == "recompute"]
    if not operations:
        return _without_operations(annotation)
    match annotation.policy:
        case Policy.KEEP if kept:
            return f"{_amount(kept)} kept for backward; none of {len(operations)} operations runs again"
        case Policy.RECOMPUTE if again or kept:
            once = f"; {_amount(kept)} kept, as their operations may run only once" if kept else ""
            return f"{_amount(again)} not kept for backward, and made again{once}"
        case Policy.KEEP | Policy.RECOMPUTE:
            return "no effect: backward needs nothing of it"
        case _:
            return f"a hint, left to the search: {_amount(kept)} kept, {_amount(again)} made again"


def _without_operations(annotation: Annotation) -> str:
    leaves = ", or all its results leave it" if annotation.policy is Policy.RECOMPUTE else ""
    return f"no effect: nothing of it runs in forward, or other annotations decide{leaves}"


def _amount(decisions: Sequence[Decision]) -> str:
    count = len(decisions)
    return f"{count} storage{'' if count == 1 else 's'} ({format_bytes(sum(d.nbytes for d in decisions))})"
