"""A reference solver for small graphs with tiers: every order of instructions is looked at, without a solver.

The class is that of `CheckpointProblem` with copies of what forward makes: each storage is copied to a tier
at most once, freed and copied back at any time. Nothing here is shared with `irc.passes` but the class.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, count

from irc.ir import (
    Compute,
    Direction,
    Fetch,
    Free,
    Graph,
    Instruction,
    Loss,
    Node,
    Offload,
    Region,
    Schedule,
    Storage,
    Tier,
    Wait,
)
from irc.passes import CheckpointProblem

__all__ = ["Fastest", "fastest_with_swaps"]


@dataclass(frozen=True)
class Fastest:
    """A schedule that no other of the class beats within the budget.

    Args:
        seconds: Of the step.
        schedule: It.
        states: How many states were looked at.
    """

    seconds: float
    schedule: Schedule
    states: int


_Action = Node | Loss | Free | Offload | Fetch | Wait
"""Here a Wait says that a storage leaves its tier."""

_Set = frozenset[Storage]
_NOTHING: _Set = frozenset()


@dataclass(frozen=True, slots=True)
class _State:
    """Where a schedule has got to.

    Args:
        done: Base operations that have run, and 1 for the loss.
        again: Forward position behind that of the last operation that ran again since.
        there: Storages of forward on the device.
        unread: Those of them that were copied back and not read since.
        stored: The tier of each storage that was copied, None once it has left it.
        came_back: Storages in a tier that were copied back at least once.
        new: Storages made by the last operation, until time has passed.
        busy: Channels on which a copy was begun in the same instant.
        now: Time.
        channels: When each channel is free.
        ends: When the last copy of each storage ends.
        past: The last action and the state before it.
    """

    done: int
    again: int
    there: _Set
    unread: _Set
    stored: tuple[tuple[Storage, Tier | None], ...]
    came_back: _Set
    new: _Set
    busy: frozenset[object]
    now: float
    channels: tuple[tuple[object, float], ...]
    ends: tuple[tuple[Storage, float], ...]
    past: tuple[_Action, _State] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return (
            self.done,
            self.again,
            self.there,
            self.unread,
            frozenset(self.stored),
            self.came_back,
            self.new,
            self.busy,
        )

    def tier_of(self, storage: Storage) -> Tier | None:
        return next((tier for s, tier in self.stored if s is storage), None)

    def end_of(self, storage: Storage) -> float:
        return next((end for s, end in self.ends if s is storage), 0.0)

    def beats(self, other: _State) -> bool:
        """Whether all is over no later, where the keys are equal."""
        if self.now > other.now:
            return False
        for mine, its in ((self.channels, other.channels), (self.ends, other.ends)):
            theirs: dict[object, float] = dict(its)
            if any(time > max(theirs.get(thing, 0.0), other.now) for thing, time in mine):
                return False
        return True

    def wait(self, storages: Sequence[Storage]) -> _State:
        """Goes on once the copies of some storages have ended."""
        now = max([self.now, *map(self.end_of, storages)])
        return self if now == self.now else replace(self, now=now, new=_NOTHING, busy=frozenset())

    def free(self, storages: Sequence[Storage]) -> _State:
        state = self.wait(storages)
        for storage in storages:
            state = replace(state, there=state.there - {storage}, past=(Free(storage), state))
        return replace(state, new=state.new - set(storages))

    def copy(self, what: Offload | Fetch, tier: Tier, direction: Direction) -> _State:
        channel, storage = tier.channel(direction), what.storage
        start = max([self.now, *(free for c, free in self.channels if c == channel)])
        end = start + tier.copy_seconds(storage.nbytes, direction)
        return replace(
            self,
            busy=self.busy | {channel},
            channels=(*((c, free) for c, free in self.channels if c != channel), (channel, end)),
            ends=(*((s, e) for s, e in self.ends if s is not storage), (storage, end)),
            past=(what, self),
        )


def fastest_with_swaps(
    problem: CheckpointProblem, tiers: Sequence[Tier], budget_bytes: int, *, most_states: int = 10**7
) -> Fastest | None:
    """The fastest schedule of the class within the budget; None where none fits.

    Best-first search over states; of two that differ only in times, one that is later in all is left out.

    Args:
        problem: Of one forward in flight; only its graph, its costs and its order of backward are used.
        tiers: Where storages may be copied to.
        budget_bytes: The most that may be alive at once.
        most_states: After which to give up.

    Raises:
        RuntimeError: There are more states.
    """
    return _Search(problem, tiers, budget_bytes).run(most_states)


class _Search:
    def __init__(self, problem: CheckpointProblem, tiers: Sequence[Tier], budget_bytes: int) -> None:
        graph = self.graph = problem.graph
        assert graph.forwards_in_flight == 1
        self.tiers = tiers
        self.budget_bytes = budget_bytes
        self.seconds, self.workspace = problem.costs.seconds, problem.costs.workspace_bytes
        self.forward = [n for n in graph.operations if n.region is Region.FORWARD]
        self.split = len(self.forward)
        self.line: list[Node | None] = [*self.forward, None, *problem.backward]
        made = {s for node in self.forward for s in graph.allocates(node)}
        self.movable = frozenset(made - graph.output_storages)
        self.copyable = (self.movable & graph.copyable_storages) - graph.transient_storages
        self.reads = {n: frozenset(graph.reads(n)) & self.movable for n in graph.operations}
        self.makes = {n: frozenset(graph.allocates(n)) & self.movable for n in graph.operations}
        self.left = [0.0] * (len(self.line) + 1)
        for done in reversed(range(len(self.line))):
            node = self.line[done]
            self.left[done] = self.left[done + 1] + (self.seconds[node] if node else 0.0)
        self.useful = cache(self._useful)
        self._count_bytes()

    def _count_bytes(self) -> None:
        """Bytes of all but what forward makes that comes and goes: before each event, and what it adds."""
        graph = self.graph
        last: dict[Storage, int] = {}
        for event, node in enumerate(self.line):
            for storage in (*graph.allocates(node), *graph.reads(node)) if node else ():
                last[storage] = event
        permanent = graph.static_storages | graph.tangent_storages | graph.output_storages | self.movable
        alive = graph.static_bytes
        self.held: list[int] = []
        self.added: list[int] = []
        for event, node in enumerate(self.line):
            self.held.append(alive)
            if node is None:
                tangents = sum(s.nbytes for s in graph.tangent_storages)
                self.added.append(tangents + graph.loss_bytes)
                alive += tangents + graph.loss_held_bytes
                continue
            self.added.append(self.taken(node))
            alive += sum(s.nbytes for s in graph.allocates(node) if s not in self.movable)
            touched = {*graph.allocates(node), *graph.reads(node)} - permanent
            alive -= sum(s.nbytes for s in touched if last[s] == event)

    def taken(self, node: Node) -> int:
        return sum(s.nbytes for s in self.graph.allocates(node)) + self.workspace[node]

    def _useful(self, done: int) -> _Set:
        """Storages that what runs from an event on may read, directly or to make again what it reads."""
        found: set[Storage] = set()
        for node in self.line[done:]:
            found |= self.reads[node] if node else _NOTHING
        for node in reversed(self.forward):
            again = any(
                self.makes[node] & self.reads[later] for later in self.line[self.split + 1 :] if later
            )
            again = again or bool(self.makes[node] & found)
            if node.is_recomputable and again:
                found |= self.reads[node]
        return frozenset(found)

    def run(self, most_states: int) -> Fastest | None:
        start = _State(0, 0, _NOTHING, _NOTHING, (), _NOTHING, _NOTHING, frozenset(), 0.0, (), ())
        order = count()
        queue = [(self.left[0], next(order), start)]
        fronts: dict[tuple[object, ...], list[_State]] = {}
        seen = 0
        while queue:
            seconds, _, state = heapq.heappop(queue)
            if state.done == len(self.line):
                return Fastest(seconds, self.schedule(state), seen)
            front = fronts.setdefault(state.key, [])
            if any(other.beats(state) for other in front):
                continue
            front[:] = [other for other in front if not state.beats(other)]
            front.append(state)
            seen += 1
            if seen > most_states:
                raise RuntimeError(f"more than {most_states} states")
            for reached in self.following(state):
                if reached.done < len(self.line):
                    heapq.heappush(queue, (reached.now + self.left[reached.done], next(order), reached))
                elif not reached.unread:
                    over = max([reached.now, *(end for _, end in reached.ends)])
                    heapq.heappush(queue, (over, next(order), reached))
        return None

    def following(self, state: _State) -> Iterator[_State]:
        node = self.line[state.done]
        yield from self.lose(state) if node is None else self.compute(state, node, is_again=False)
        if state.done > self.split and (state.done > self.split + 1 or self.graph.transient_storages):
            for again in self.forward[state.again :]:
                made = self.makes[again] & self.useful(state.done)
                if again.is_recomputable and not made <= state.there:
                    yield from self.compute(state, again, is_again=True)
        for storage in self.copyable & self.useful(state.done):
            yield from self.copy_out(state, storage)
            yield from self.copy_back(state, storage)

    def with_room(self, state: _State, more_bytes: int, fixed: _Set) -> Iterator[_State]:
        """The state with that many bytes more, after freeing no more than has to be."""
        alive = self.held[state.done] + sum(s.nbytes for s in state.there) + more_bytes
        spare = sorted(state.there - fixed - state.unread, key=lambda s: s.name)
        tried: list[_Set] = []
        for size in range(len(spare) + 1):
            for chosen in map(frozenset, combinations(spare, size)):
                if any(smaller <= chosen for smaller in tried):
                    continue
                if alive - sum(s.nbytes for s in chosen) <= self.budget_bytes:
                    tried.append(chosen)
                    yield state.free(sorted(chosen, key=state.end_of))

    def compute(self, state: _State, node: Node, *, is_again: bool) -> Iterator[_State]:
        reads = self.reads[node]
        if not reads <= state.there:
            return
        more_bytes = self.taken(node) if is_again else self.added[state.done]
        for ready in self.with_room(state, more_bytes, reads):
            ready = ready.wait([s for s in reads if s in state.unread])
            made = self.makes[node] - ready.there
            done = state.done + (not is_again)
            reached = replace(
                ready,
                done=done,
                again=self.forward.index(node) + 1 if is_again else 0,
                there=ready.there | made,
                unread=ready.unread - reads,
                new=made,
                busy=frozenset(),
                now=ready.now + self.seconds[node],
                past=(node, ready),
            )
            yield self.without_useless(reached)

    def lose(self, state: _State) -> Iterator[_State]:
        gone = self.graph.transient_storages & state.there
        for ready in self.with_room(
            state.free(sorted(gone, key=state.end_of)), self.added[state.done], _NOTHING
        ):
            yield self.without_useless(replace(ready, done=state.done + 1, past=(Loss(), ready)))

    def without_useless(self, state: _State) -> _State:
        """Frees what is of no use any more, where nothing has to be waited for."""
        spent = state.there - self.useful(state.done)
        return state.free([s for s in spent if state.end_of(s) <= state.now])

    def copy_out(self, state: _State, storage: Storage) -> Iterator[_State]:
        """Right when it is made, or right after something else that had to come first."""
        if storage not in state.there or any(s is storage for s, _ in state.stored):
            return
        for tier in self.tiers:
            if storage.nbytes > tier.capacity_bytes:
                continue
            can_begin = storage in state.new or tier.channel(Direction.OUT) in state.busy
            stored = [s for s, where in state.stored if where == tier]
            full_bytes = sum(s.nbytes for s in stored) + storage.nbytes
            leaving = [s for s in stored if s in state.came_back]
            tried: list[_Set] = []
            for size in range(len(leaving) + 1):
                for chosen in map(frozenset, combinations(leaving, size)):
                    if any(smaller <= chosen for smaller in tried):
                        continue
                    if full_bytes - sum(s.nbytes for s in chosen) <= tier.capacity_bytes:
                        tried.append(chosen)
                        if chosen or can_begin:
                            yield self.to_tier(state, storage, tier, chosen)

    def to_tier(self, state: _State, storage: Storage, tier: Tier, leaving: _Set) -> _State:
        state = state.wait(sorted(leaving, key=lambda s: s.name))
        for gone in leaving:
            state = replace(state, past=(Wait(gone), state))
        stored = tuple((s, None if s in leaving else where) for s, where in state.stored)
        state = replace(state, stored=(*stored, (storage, tier)), came_back=state.came_back - leaving)
        return state.copy(Offload(storage, tier.name), tier, Direction.OUT)

    def copy_back(self, state: _State, storage: Storage) -> Iterator[_State]:
        tier = state.tier_of(storage)
        if tier is None or storage in state.there:
            return
        for ready in self.with_room(state, storage.nbytes, _NOTHING):
            begun = ready.copy(Fetch(storage, tier.name), tier, Direction.IN)
            yield replace(
                begun,
                there=begun.there | {storage},
                unread=begun.unread | {storage},
                came_back=begun.came_back | {storage},
            )

    # ------------------------------------------------------------------ the schedule

    def schedule(self, state: _State) -> Schedule:
        """The instructions behind a state."""
        actions: list[_Action] = []
        while state.past is not None:
            action, state = state.past
            actions.append(action)
        return Schedule(self.graph, tuple(_instructions(self.graph, actions[::-1], self.movable)))


def _instructions(graph: Graph, actions: Sequence[_Action], movable: _Set) -> Iterator[Instruction]:
    """The actions with the waits that they need, and with the frees of what is not movable."""
    last = {
        storage: index
        for index, action in enumerate(actions)
        if isinstance(action, Node)
        for storage in (*graph.allocates(action), *graph.reads(action))
    }
    held = graph.static_storages | graph.tangent_storages | graph.output_storages | movable
    pending: dict[Storage, Instruction] = {}
    there: set[Storage] = set()
    for index, action in enumerate(actions):
        if isinstance(action, Node):
            for storage in graph.reads(action):
                if isinstance(pending.get(storage), Fetch):
                    del pending[storage]
                    yield Wait(storage)
            kept = {s for s in graph.allocates(action) if s in held or last[s] > index} - there
            there |= kept
            yield Compute(action, frozenset(kept))
            for storage in graph.reads(action):
                if storage not in held and last[storage] == index:
                    yield Free(storage)
            continue
        if isinstance(action, Offload | Fetch):
            pending[action.storage] = action
            there.add(action.storage)
        elif isinstance(action, Free | Wait):
            storage = action.storage
            if pending.pop(storage, None) is not None:
                yield Wait(storage)
            if isinstance(action, Wait):
                continue
            there.remove(storage)
        yield action
    for storage in there & movable:
        if pending.pop(storage, None) is not None:
            yield Wait(storage)
        yield Free(storage)
