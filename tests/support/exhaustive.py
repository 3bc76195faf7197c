"""Reference solvers for small graphs: every schedule of a class is looked at, without the solvers.

`cheapest_in_class` covers the class of `CheckpointProblem`: forward once, then before each backward operation
but the first whatever must be computed again, in forward order; before the first too where annotations keep
storages from staying. `cheapest_of_all` covers every schedule that
keeps the order of first runs: it may compute anything again at any time, in forward too. `cheapest_in_order`
covers those of them that compute again in forward order between two first runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from itertools import count as itertools_count
from random import Random

from hypothesis import strategies as st

from irc.ir import (
    GENERATOR_STATE,
    DType,
    Graph,
    Input,
    InputRole,
    Node,
    Output,
    OutputRole,
    Region,
    Storage,
    TensorType,
    Trait,
    Value,
    allocation_bytes,
    generator_state_type,
    loss_waiting_bytes,
    others_after,
    others_before,
)
from irc.passes import CheckpointProblem, Costs
from irc.passes.remat.problem import Solution
from support.strategies import Sample

__all__ = [
    "Choice",
    "at_random",
    "chains",
    "cheapest_in_class",
    "cheapest_in_order",
    "cheapest_of_all",
    "problem_of",
    "subsets",
]


def problem_of(sample: Sample) -> CheckpointProblem:
    """The recomputation problem of a random graph."""
    return CheckpointProblem(sample.graph, Costs(sample.seconds, sample.workspace_bytes, "analytic:test"))


@st.composite
def chains(draw: st.DrawFn, max_forward: int = 9, max_kept: int = 7) -> Sample:
    """Training graphs in which recomputation pays: long chains with skips, whose values backward reads.

    Args:
        draw: Given by hypothesis.
        max_forward: The most forward nodes.
        max_kept: The most storages that come and go: the reference solvers look at every set of them.
    """
    count = draw(st.integers(2, max_forward))
    random = Random(draw(st.integers(0, 1 << 32)))
    return _chain(random, count, max_kept)


def _chain(random: Random, count: int, max_kept: int) -> Sample:
    def value(name: str, nbytes: int) -> Value:
        return Value(name, TensorType.contiguous((nbytes,), DType.FLOAT8_E5M2), Storage(f"s_{name}", nbytes))

    unit = random.choice((1, 1, 512, 1 << 20, 123_456_789))
    x, w = value("x", unit * random.randint(1, 4)), value("w", unit * random.randint(1, 4))
    nodes: list[Node] = []
    made = [x]
    room = max_kept
    for index in range(count):
        pair = index + 1 < count and room >= 2 and random.random() < 0.2
        results = [value(f"v{index}", unit * random.randint(1, 9))]
        if pair:
            results.append(value(f"u{index}", unit * random.randint(1, 9)))
        operands = [made[-1]] if random.random() < 0.9 else [w]
        if random.random() < 0.35:
            operands.append(random.choice(made))
        once = random.choice((Trait.RANDOM, Trait.PINNED, Trait.NONDETERMINISTIC))
        traits = frozenset({once} if random.random() < 0.15 else ())
        operands = list(dict.fromkeys((*operands, w)))
        node = Node(f"f{index}", "test.op", tuple(operands), tuple(results), is_sequence=pair, traits=traits)
        if Trait.RANDOM in traits and room > len(results) and random.random() < 0.7:
            type = generator_state_type("cpu")
            name = f"state{index}"
            state = Value(name, type, Storage(name, allocation_bytes(type.nbytes, "cpu"), "cpu"))
            nodes.append(Node(f"copy{index}", GENERATOR_STATE, ("cpu",), (state,), traits=traits))
            node = node.with_generator_state(state)
            room -= 1
        nodes.append(node)
        room -= len(results)
        random.shuffle(results)
        made.extend(results)
        if room <= 0:
            break
    last = nodes[-1].values[0]
    outputs = [Output(last, OutputRole.OUTPUT, "0")]
    tangent = value("t", last.type.nbytes)
    gradient = tangent
    draws = [node for node in nodes if node.op != GENERATOR_STATE]
    for index, node in reversed(list(enumerate(draws))):
        saved = [v for v in (*node.operands, *node.values) if v is not w and random.random() < 0.6]
        operands = tuple(dict.fromkeys((gradient, *saved)))
        gradient = value(f"g{index}", unit * random.randint(0, 5))
        nodes.append(Node(f"b{index}", "test.grad", operands, (gradient,), region=Region.BACKWARD))
    outputs.append(Output(gradient, OutputRole.GRADIENT, "parameter:w"))
    inputs = (
        Input(x, InputRole.INPUT, "0"),
        Input(w, InputRole.PARAMETER, "w", requires_grad=True),
        Input(tangent, InputRole.TANGENT, "0"),
    )
    loss_bytes = unit * random.choice((0, 0, 1, 6))
    held = random.choice((0, loss_bytes // 2))
    graph = Graph(inputs, tuple(nodes), tuple(outputs), loss_bytes, held)
    seconds = {node: float(random.randint(1, 9)) for node in nodes}
    workspaces = {node: unit * random.choice((0, 0, 0, 1, 3, 8)) for node in nodes}
    return Sample(graph, seconds, workspaces)


@dataclass(frozen=True)
class Choice:
    """A schedule of the class: what it costs, and what runs again before each backward operation.

    Args:
        seconds: Of all that runs.
        peak_bytes: The most that is alive at once.
        again: What runs again.
        beside_bytes: What other forwards in flight hold from the loss on; it is part of the peak.
    """

    seconds: float
    peak_bytes: int
    again: tuple[tuple[Node, ...], ...]
    beside_bytes: int = 0

    def beats(self, other: Choice) -> bool:
        pairs = zip(self._cost, other._cost, strict=True)
        return all(mine <= its for mine, its in pairs)

    @property
    def _cost(self) -> tuple[float, int, int]:
        return self.seconds, self.peak_bytes, self.beside_bytes


Kept = frozenset[Storage]


def subsets(storages: Iterable[Storage]) -> Iterator[Kept]:
    """Every subset, small ones first."""
    items = tuple(storages)
    for size in range(len(items) + 1):
        yield from map(frozenset, combinations(items, size))


def size_of(storages: Iterable[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


class _Class:
    """Dynamic programming over what is kept after each backward operation, with all trade-offs."""

    def __init__(self, problem: CheckpointProblem) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.workspace = problem.costs.workspace_bytes
        self.reads = [frozenset(problem.forward_reads[node]) for node in problem.backward]
        self.tangents = size_of(self.graph.tangent_storages)
        self.remake = cache(self._remake)

    def front(self) -> tuple[Choice, ...]:
        """The choices that no other beats, fastest first."""
        problem = self.problem
        if not problem.backward:
            return (Choice(problem.step_seconds, self.forward_peak(frozenset()), ()),)
        states: dict[Kept, list[Choice]] = {}
        if problem.transient:
            for kept in subsets(s for s in problem.wanted if s not in problem.transient):
                beside = beside_bytes(problem, kept)[1]
                states[kept] = [Choice(0.0, self.forward_peak(kept), (), beside)]
            states = self.advance(states, 0)
        else:
            for kept in subsets(problem.wanted):
                alive = kept | self.reads[0]
                beside = beside_bytes(problem, alive)[1]
                peak = max(self.forward_peak(alive), problem.held_during[0] + size_of(alive) + beside)
                _insert(states.setdefault(kept, []), Choice(0.0, peak, ((),), beside))
        for position in range(1, len(problem.backward)):
            states = self.advance(states, position)
        best: list[Choice] = []
        for choices in states.values():
            for choice in choices:
                _insert(best, replace(choice, beside_bytes=0))
        total = problem.step_seconds
        done = (Choice(total + choice.seconds, choice.peak_bytes, choice.again) for choice in best)
        return tuple(sorted(done, key=lambda choice: (choice.seconds, choice.peak_bytes)))

    def advance(self, states: dict[Kept, list[Choice]], position: int) -> dict[Kept, list[Choice]]:
        problem = self.problem
        at = position + len(problem.forward) + 1
        useful = [s for s in problem.wanted if problem.last_needed[s] > at]
        following: dict[Kept, list[Choice]] = {}
        before_loss = problem.held_before[len(problem.forward)]
        held = problem.held_after[position - 1] if position else before_loss
        for kept in subsets(useful):
            alive = kept | self.reads[position]
            during = problem.held_during[position] + size_of(alive)
            for before, choices in states.items():
                remade = self.remake(before, alive)
                if remade is None:
                    continue
                again, seconds, extra = remade
                peak = max(during, held + extra)
                for choice in choices:
                    reached = Choice(
                        choice.seconds + seconds,
                        max(choice.peak_bytes, peak + choice.beside_bytes),
                        (*choice.again, again),
                        choice.beside_bytes,
                    )
                    _insert(following.setdefault(kept, []), reached)
        return following

    def forward_peak(self, kept: Kept) -> int:
        """The peak of forward and of the loss, where `kept` stays for backward."""
        problem, graph = self.problem, self.graph
        delivered = graph.output_storages
        made: list[Storage] = []
        before, after = beside_bytes(problem, kept)
        peak = graph.static_bytes + before
        for index, node in enumerate(problem.forward):
            read_later = {s for reader in problem.forward[index:] for s in graph.reads(reader)}
            alive = [s for s in made if s in delivered or s in kept or s in read_later]
            here = graph.static_bytes + size_of(alive) + size_of(graph.allocates(node)) + self.workspace[node]
            peak = max(peak, here + before)
            made.extend(graph.allocates(node))
        outputs = size_of(s for s in made if s in delivered)
        loss = graph.static_bytes + outputs + size_of(kept) + self.tangents + graph.loss_bytes
        return max(peak, loss + after)

    def _remake(self, before: Kept, goal: Kept) -> tuple[tuple[Node, ...], float, int] | None:
        """What runs to have `goal` where `before` is there: operations, seconds, bytes of forward."""
        problem = self.problem
        running: set[Node] = set()
        pending = list(goal - before)
        while pending:
            node = problem.producer[pending.pop()]
            if node in running:
                continue
            if not node.is_recomputable:
                return None
            running.add(node)
            pending.extend(s for s in problem.forward_reads[node] if s not in before)
        again = tuple(node for node in problem.forward if node in running)
        there = set(before)
        extra = 0
        for index, node in enumerate(again):
            needed = goal.union(*(problem.forward_reads[later] for later in again[index:]))
            allocated = self.graph.allocates(node)
            there = there & needed - set(allocated)
            extra = max(extra, size_of(there) + size_of(allocated) + self.workspace[node])
            there |= {s for s in allocated if s in problem.producer}
        return again, math.fsum(problem.costs.seconds[node] for node in again), extra


def beside_bytes(problem: CheckpointProblem, kept: Kept) -> tuple[int, int]:
    """What other forwards in flight hold before the loss and after it, where `kept` stays for backward."""
    graph = problem.graph
    fixed = size_of(s for s in graph.output_storages if graph.producers[s].region is Region.FORWARD)
    held = size_of(kept) + fixed + loss_waiting_bytes(graph)
    before, after = (max(c.bytes_at(held) for c in cases(graph)) for cases in (others_before, others_after))
    return before, after


def _insert(choices: list[Choice], new: Choice) -> None:
    if any(choice.beats(new) for choice in choices):
        return
    choices[:] = [choice for choice in choices if not new.beats(choice)]
    choices.append(new)


def cheapest_in_class(problem: CheckpointProblem) -> tuple[Choice, ...]:
    """The choices of the class that no other beats in time and in peak, fastest first."""
    return _Class(problem).front()


def cheapest_of_all(problem: CheckpointProblem, budget_bytes: int) -> float:
    """The least seconds of any schedule within the budget that keeps the problem's order of first runs.

    Dijkstra's algorithm over (first runs done, forward-made storages resident); infinite where none fits.
    With several forwards in flight, the best over all that may stay at the loss.
    """
    return _cheapest_in_flight(problem, budget_bytes, in_order=False)


def cheapest_in_order(problem: CheckpointProblem, budget_bytes: int) -> float:
    """The same of schedules that compute again in forward order between two first runs, or beside the loss.

    That is Checkmate's class: each operation runs at most once in a stage, and in topological order.
    """
    return _cheapest_in_flight(problem, budget_bytes, in_order=True)


def _cheapest_in_flight(problem: CheckpointProblem, budget_bytes: int, *, in_order: bool) -> float:
    if problem.graph.forwards_in_flight == 1:
        return _cheapest(problem, (budget_bytes, budget_bytes), None, in_order)
    found = [math.inf]
    for kept in subsets(problem.wanted):
        before, after = beside_bytes(problem, kept)
        found.append(_cheapest(problem, (budget_bytes - before, budget_bytes - after), kept, in_order))
    return min(found)


def _cheapest(
    problem: CheckpointProblem, budgets: tuple[int, int], kept: Kept | None, in_order: bool
) -> float:
    """The same with budgets before the loss and from it on, where `kept` stays at the loss (None: any).

    A state also has the position in forward from which on something may run again; 0 if any may.
    """
    graph, seconds, workspace = problem.graph, problem.costs.seconds, problem.costs.workspace_bytes
    if _loss_bytes(problem, kept or frozenset()) > budgets[1]:
        return math.inf
    line = (*problem.forward, *problem.backward)
    split = len(problem.forward)
    producer = frozenset(problem.producer)
    permanent = [graph.static_bytes]
    for node in problem.forward:
        permanent.append(permanent[-1] + size_of(s for s in graph.allocates(node) if s not in producer))
    reads = {node: frozenset(problem.forward_reads[node]) for node in line}
    makes = {node: frozenset(s for s in graph.allocates(node) if s in producer) for node in line}
    order = itertools_count()
    queue: list[tuple[float, int, int, bool, int, Kept]] = [(0.0, next(order), 0, False, 0, frozenset())]
    seen: set[tuple[int, bool, int, Kept]] = set()
    while queue:
        spent, _, done, lost, begin, there = heapq.heappop(queue)
        if done == len(line) and (lost or not problem.backward):
            return spent
        if (done, lost, begin, there) in seen:
            continue
        seen.add((done, lost, begin, there))

        def reach(cost: float, done: int, lost: bool, begin: int, there: Kept) -> None:
            if (done, lost, begin, there) not in seen:
                heapq.heappush(queue, (cost, next(order), done, lost, begin, there))

        for storage in there:
            reach(spent, done, lost, begin, there - {storage})
        budget_bytes = budgets[lost]
        crosses = done == split and not lost and problem.transient.isdisjoint(there)
        if crosses and (kept is None or there == kept) and _loss_bytes(problem, there) <= budgets[1]:
            reach(spent, done, True, 0, there)
        if done == split and lost:
            held = permanent[split] + size_of(graph.tangent_storages) + graph.loss_held_bytes
        elif done > split:
            held = problem.held_after[done - split - 1]
        else:
            held = permanent[done]
        for index, node in enumerate(problem.forward[begin:done], begin):
            if not node.is_recomputable or not reads[node] <= there or makes[node] <= there:
                continue
            during = held + size_of(there) + size_of(graph.allocates(node)) + workspace[node]
            if during <= budget_bytes:
                after = index + 1 if in_order else 0
                reach(spent + seconds[node], done, lost, after, there | makes[node])
        if done == len(line) or (done == split and not lost):
            continue
        node = line[done]
        if not reads[node] <= there:
            continue
        if node.region is Region.BACKWARD:
            during = problem.held_during[done - split] + size_of(there)
        else:
            during = held + size_of(there) + size_of(graph.allocates(node)) + workspace[node]
        if during <= budget_bytes:
            reach(spent + seconds[node], done + 1, lost, 0, there | makes[node])
    return math.inf


def _loss_bytes(problem: CheckpointProblem, there: Kept) -> int:
    graph = problem.graph
    outputs = size_of(s for s in graph.output_storages if graph.producers[s].region is Region.FORWARD)
    return graph.static_bytes + outputs + size_of(graph.tangent_storages) + graph.loss_bytes + size_of(there)


def at_random(problem: CheckpointProblem, random: Random) -> Solution:
    """A schedule that forgets at random and makes again what it reads, in forward too."""
    there: set[Storage] = set()
    trace: list[Node] = []

    def compute(node: Node) -> None:
        for storage in problem.forward_reads[node]:
            if storage not in there:
                compute(problem.producer[storage])
        trace.append(node)
        there.update(s for s in problem.graph.allocates(node) if s in problem.producer)

    split: int | None = None
    for node in (*problem.forward, *problem.backward):
        forget = [
            s for s in problem.producer if problem.producer[s].is_recomputable and random.random() < 0.3
        ]
        there.difference_update(forget)
        if node not in problem.index and split is None:
            split = len(trace)
            there -= problem.transient
        compute(node)
    split = len(trace) if split is None else split
    return problem.simulate_order(trace[:split], trace[split:])
