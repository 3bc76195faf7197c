"""Improves a schedule with copies step by step: less or more of it runs again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...ir import Node, Storage
from ..remat.problem import CheckpointProblem, Recomputations
from ..remat.search import Incumbent
from .offload_problem import OffloadProblem

__all__ = ["PROOF_GAP", "improve"]

PROOF_GAP = 1e-4
"""A schedule counts as proved up to this fraction of the step's time above the bound."""

_DEPTHS = (1, 2, 4)
"""The numbers of operations, one made from the other, that an addition makes again."""

_PROGRESS = 1e-4
_BETTER = 1e-9


def improve(work: OffloadProblem, incumbent: Incumbent, *, deadline: float, gap: float = PROOF_GAP) -> None:
    """Runs less again, or more, if that makes a schedule faster; copies are chosen anew each time.

    Args:
        work: The problem.
        incumbent: The solution to improve.
        deadline: `time.thread_time()` at which to stop.
        gap: The distance from the best at which to stop, as a fraction of the step's time.
    """
    problem = work.problem
    recomputations = problem.recomputations(incumbent.best)
    while True:
        before = incumbent.best.seconds
        for change in (*_removals(problem, recomputations), *_additions(problem, recomputations)):
            if time.thread_time() >= deadline or incumbent.is_proved(problem, gap):
                return
            changed = _changed(problem, recomputations, change)
            best = incumbent.best.seconds * (1 - _BETTER)
            is_new = changed != recomputations and _makes_transient(problem, changed)
            solution = work.run(changed, below_seconds=best) if is_new else None
            if solution is not None and solution.seconds < best:
                incumbent.update("joint", solution, work.budget_bytes)
                recomputations = changed
        if incumbent.best.seconds >= before * (1 - _PROGRESS):
            return


def _makes_transient(problem: CheckpointProblem, recomputations: Recomputations) -> bool:
    """Whether backward makes again, before it reads them, the storages that must not stay for it."""
    missing = set(problem.transient)
    split = len(problem.forward)
    for node, before in zip(problem.base[split:], recomputations[split:], strict=True):
        for run in (*before, node):
            if not missing.isdisjoint(problem.forward_reads[run]):
                return False
            missing.difference_update(problem.graph.allocates(run))
    return True


@dataclass(frozen=True, slots=True)
class _Change:
    """A change: operations that no longer run again before a step of the base order, or that now do."""

    step: int
    nodes: tuple[Node, ...]
    removes: bool


def _removals(problem: CheckpointProblem, recomputations: Recomputations) -> list[_Change]:
    """Each operation that runs again, the longest first."""
    found = [_Change(step, (node,), True) for step, before in enumerate(recomputations) for node in before]
    return sorted(found, key=lambda change: -problem.costs.seconds[change.nodes[0]])


def _additions(problem: CheckpointProblem, recomputations: Recomputations) -> list[_Change]:
    """Lists what backward reads from forward, made again just before by chains of operations; large first."""
    split = len(problem.forward)
    runs = {node for before in recomputations for node in before}
    found: list[tuple[int, _Change]] = []
    for storage, positions in problem.read_positions.items():
        maker = problem.producer[storage]
        if maker in runs or not maker.is_recomputable:
            continue
        for depth in _DEPTHS:
            chain = _chain(problem, maker, depth)
            if len(chain) > depth // 2:
                found.append((-storage.nbytes, _Change(split + positions[0], chain, False)))
    return [change for _, change in sorted(found, key=lambda pair: pair[0])]


def _chain(problem: CheckpointProblem, node: Node, depth: int) -> tuple[Node, ...]:
    """An operation and the nearest that make what it reads, in forward order."""
    chain = {node}
    while len(chain) < depth:
        makers = {problem.producer[s] for made in chain for s in problem.forward_reads[made]} - chain
        makers = {maker for maker in makers if maker.is_recomputable}
        if not makers:
            break
        chain.add(max(makers, key=problem.index.__getitem__))
    return tuple(sorted(chain, key=problem.index.__getitem__))


def _changed(problem: CheckpointProblem, recomputations: Recomputations, change: _Change) -> list[list[Node]]:
    """Applies a change, and drops the recomputations that nothing reads then."""
    made = [list(before) for before in recomputations]
    here = made[change.step]
    if change.removes:
        made[change.step] = [node for node in here if node not in change.nodes]
    else:
        made[change.step] = sorted({*here, *change.nodes}, key=problem.index.__getitem__)
    wanted: set[Storage] = set()
    found: list[list[Node]] = []
    for node, before in zip(reversed(problem.base), reversed(made), strict=True):
        live: list[Node] = []
        for again in (node, *reversed(before)):
            allocated = problem.graph.allocates(again)
            if again is not node:
                if wanted.isdisjoint(allocated):
                    continue
                live.append(again)
            wanted.difference_update(allocated)
            wanted.update(problem.graph.reads(again))
        found.append(live[::-1])
    return found[::-1]
