"""Several calls of one schedule, each instruction of each call replayed, in every order that is allowed.

It is what `irc.ir.live_forwards` derives a formula for. A call goes through forward, the loss, the loss's
backward and backward; these follow each other in every way that keeps the order within a call and the number
in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hypothesis import strategies as st

from irc.ir import Compute, Free, Graph, InputRole, Loss, Node, OutputRole, Region, Schedule, Storage
from support.strategies import Sample

__all__ = ["Calls", "several"]


def several(samples: st.SearchStrategy[Sample], most: int = 3) -> st.SearchStrategy[Sample]:
    """Graphs with several forwards in flight, whose loss holds some bytes while it waits."""
    return st.builds(_in_flight, samples, st.integers(2, most), st.integers(0, 8))


def _in_flight(sample: Sample, count: int, eighths: int) -> Sample:
    graph = sample.graph
    most_bytes = graph.loss_bytes + sum(s.nbytes for s in graph.tangent_storages)
    graph = replace(graph, forwards_in_flight=count, loss_saved_bytes=most_bytes * eighths // 8)
    return replace(sample, graph=graph)


_PHASES = ("new", "ran forward", "has a loss", "has tangents", "ran backward", "gone")
_NEW, _FORWARD, _LOSS, _TANGENTS, _BACKWARD, _GONE = range(len(_PHASES))


@dataclass(frozen=True)
class State:
    """Between two parts of calls.

    Args:
        phases: How far each call is.
        has_gradients: Whether `.grad` is there, or where it is not, gradients that will be.
        is_within: Whether this is within one `backward()`, whose gradients the engine holds beside `.grad`.
    """

    phases: tuple[int, ...]
    has_gradients: bool
    is_within: bool = False


@dataclass(frozen=True)
class Calls:
    """The calls of one schedule.

    Args:
        schedule: What each of them runs.
        workspace_bytes: Of each operation.
        count: How many may be in flight.
        free_order: Whether `.grad` is there from the start, and any call may follow any other; else all run
            forward, and then backward in any order.
    """

    schedule: Schedule
    workspace_bytes: Mapping[Node, int]
    count: int
    free_order: bool = False

    @property
    def graph(self) -> Graph:
        return self.schedule.graph

    def peak_bytes(self) -> int:
        """The most that is alive at once in any order."""
        calls = self.count + (1 if self.free_order else 0)
        start = State((_NEW,) * calls, self.free_order)
        pending, seen, peak = [start], {start}, 0
        while pending:
            state = pending.pop()
            for call in range(calls):
                if state.phases[call] == _GONE or not self.may_go_on(state, call):
                    continue
                peak = max(peak, *self.running(state, call))
                following = self.after(state, call)
                pending.extend(new for new in following if new not in seen)
                seen.update(following)
        return peak

    def may_go_on(self, state: State, call: int) -> bool:
        phase = state.phases[call]
        if state.is_within:
            return phase in (_LOSS, _TANGENTS)
        if self.free_order:
            in_flight = sum(_NEW < other < _GONE for other in state.phases)
            return phase != _NEW or in_flight < self.count
        if phase == _BACKWARD:
            return False  # the caller holds outputs and loss
        return phase != _TANGENTS or _NEW not in state.phases

    def after(self, state: State, call: int) -> list[State]:
        phases = (*state.phases[:call], state.phases[call] + 1, *state.phases[call + 1 :])
        done = State(phases, state.has_gradients or _BACKWARD in phases)
        goes_on = phases[call] == _BACKWARD or state.is_within
        if self.free_order and goes_on and (_LOSS in phases or _TANGENTS in phases):
            return [done, replace(done, is_within=True)]
        return [done]

    def running(self, state: State, call: int) -> Iterator[int]:
        """The bytes alive while a call goes on, instruction by instruction."""
        others = [self.held(phase) for other, phase in enumerate(state.phases) if other != call]
        beside_bytes = self.static_bytes + sum(map(_sum, others))
        beside_bytes += sum(self.scalars(phase) for other, phase in enumerate(state.phases) if other != call)
        beside_bytes += self.gradient_bytes * (state.has_gradients + state.is_within)
        phase = state.phases[call]
        here = set(self.held(phase))
        if phase == _NEW:
            yield from self.replayed(self.schedule.instructions[: self.split], here, beside_bytes)
        elif phase == _LOSS:
            loss_bytes = _sum(self.graph.tangent_storages) + self.graph.loss_bytes
            yield beside_bytes + _sum(here) + loss_bytes
        elif phase == _TANGENTS:
            held_bytes = beside_bytes + self.graph.loss_held_bytes
            yield from self.replayed(self.schedule.instructions[self.split + 1 :], here, held_bytes)
        yield beside_bytes + _sum(self.held(phase)) + self.scalars(phase)

    def replayed(self, instructions: tuple[object, ...], here: set[Storage], nbytes: int) -> Iterator[int]:
        """The bytes alive during each instruction, beside `nbytes`; `here` is what the call holds."""
        for instruction in instructions:
            match instruction:
                case Compute(node, retained):
                    made = {v.storage for v in node.values if self.graph.producers.get(v.storage) is node}
                    yield nbytes + _sum(here) + _sum(made) + self.workspace_bytes.get(node, 0)
                    here |= retained
                case Free(storage):
                    here.remove(storage)
                case _:
                    raise AssertionError(instruction)

    # ------------------------------------------------------------------ what is held between the parts

    def held(self, phase: int) -> frozenset[Storage]:
        """The storages of its own that a call holds."""
        match phase:
            case 1 | 2:
                return self.kept
            case 3:
                return self.kept | self.graph.tangent_storages
            case 4:
                return self.left
            case _:
                return frozenset()

    def scalars(self, phase: int) -> int:
        """What its loss takes beside."""
        saved_bytes, held_bytes = self.graph.loss_saved_bytes, self.graph.loss_held_bytes
        finished_bytes = held_bytes + self.graph.loss_tangent_bytes
        return (0, 0, saved_bytes, held_bytes, finished_bytes, 0)[phase]

    @cached_property
    def split(self) -> int:
        return next(i for i, item in enumerate(self.schedule.instructions) if isinstance(item, Loss))

    @cached_property
    def kept(self) -> frozenset[Storage]:
        """The storages that a call holds after its forward."""
        here: set[Storage] = set()
        for _ in self.replayed(self.schedule.instructions[: self.split], here, 0):
            pass
        return frozenset(here)

    @cached_property
    def left(self) -> frozenset[Storage]:
        """The storages that a call leaves with the caller: outputs and the gradients of its inputs."""
        delivered = self.kept & self.graph.output_storages
        return delivered | {
            o.value.storage
            for o in self.graph.outputs
            if o.value is not None
            and o.target.startswith("input:")
            and o.value.storage in self.made_in_backward
        }

    @cached_property
    def made_in_backward(self) -> frozenset[Storage]:
        return frozenset(s for s, n in self.graph.producers.items() if n.region is Region.BACKWARD)

    @cached_property
    def gradient_bytes(self) -> int:
        """One set of the gradients of parameters; the parameters of random graphs are not tied."""
        parameters = (o for o in self.graph.outputs if o.role is OutputRole.GRADIENT and o.value is not None)
        return sum(
            o.value.storage.nbytes
            for o in parameters
            if o.value is not None
            and o.target.startswith("parameter:")
            and o.value.storage in self.made_in_backward
        )

    @cached_property
    def static_bytes(self) -> int:
        """Parameters and buffers once, inputs once for each call in flight."""
        found = {i.value.storage: i.role for i in self.graph.inputs if i.role is not InputRole.TANGENT}
        times = {role: self.count if role is InputRole.INPUT else 1 for role in InputRole}
        return sum(s.nbytes * times[role] for s, role in found.items()) + self.graph.reserved_bytes


def _sum(storages: frozenset[Storage] | set[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)
