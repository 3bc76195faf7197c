"""Checks that a graph is well formed and that a schedule carries it out within its memory.

The schedule's check keeps its own books, on purpose: it reuses neither `liveness` nor what `Graph` derives,
and compares its peak with theirs. Each of the two functions reports the first fault in program order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from .annotation import Policy
from .errors import VerificationError
from .graph import (
    PAUSE,
    RECEIVE,
    RUN_ONCE,
    SEND,
    Gradients,
    Graph,
    Input,
    InputRole,
    Node,
    Output,
    OutputRole,
    Region,
    Trait,
)
from .liveness import Timeline, liveness
from .schedule import Compute, Fetch, Free, Loss, Offload, Schedule, Wait
from .tiers import Tier
from .types import Storage, TensorType, Value

__all__ = ["verify_graph", "verify_schedule"]


def verify_graph(graph: Graph) -> None:
    """Checks that `graph` is well formed.

    Raises:
        VerificationError: IRC110 a name is used twice; IRC111 a value is read before it is written, or never
            written; IRC112 a value is written twice; IRC113 a value does not fit its storage; IRC114 forward
            depends on backward; IRC115 a view allocates; IRC116 an operation that is no view returns an
            alias; IRC117 an output is missing; IRC118 a gradient belongs to no input; IRC119 an effect does
            not write a parameter, buffer, input or constant; IRC133 a gradient is released wrongly, or the
            reserved bytes are not those of what is released; IRC134 a parameter is read after its gradient
            was applied; IRC140 what has a home cannot have one; IRC141 an exchange between pipeline stages is
            not well formed; IRC550 an annotation is out of place; IRC566 the
            number of forwards in flight is none, or cannot be.
    """
    _GraphCheck(graph).run()
    _check_forwards(graph)
    if graph.releases or graph.reserved_bytes:
        _ReleaseCheck(graph).run()
    _check_offloaded(graph)


def _check_forwards(graph: Graph) -> None:
    count = graph.forwards_in_flight
    if count < 1:
        _fail("IRC566", f"{count} forwards are in flight; one is the least")
    if count > 1 and graph.gradients is Gradients.APPLIED:
        message = f"{count} forwards are in flight, and the first backward updates the parameters"
        _fail("IRC566", f"{message} that the others read")


def _check_offloaded(graph: Graph) -> None:
    """Parameters that the caller is not handed and that only an optimizer writes; states of optimizers."""
    delivered = {o.value.storage for o in graph.outputs if o.value is not None}
    entries: dict[Storage, list[Input]] = {}
    for entry in graph.inputs:
        entries.setdefault(entry.value.storage, []).append(entry)
    written = {n.operands[0].storage for n in graph.nodes if Trait.EFFECT in n.traits and n.releases is None}
    applied = {n.operands[0]: n for n in graph.nodes if n.releases is Gradients.APPLIED}
    first = {entry.target: entry.value for entry in graph.inputs if entry.role is InputRole.PARAMETER}
    seen: set[Storage] = set()
    for offloaded in graph.offloaded_parameters:
        what = offloaded.name
        names = entries.get(offloaded.storage, [])
        if offloaded.storage in seen:
            _fail("IRC140", f"{what} has two homes")
        seen.add(offloaded.storage)
        if not offloaded.value.type.is_dense or offloaded.value.type.nbytes > offloaded.storage.nbytes:
            _fail("IRC140", f"{what} has a home in {offloaded.tier}, and is not one block of memory")
        if offloaded.is_state:
            node = applied.get(first[offloaded.parameter]) if offloaded.parameter in first else None
            if names or node is None or dict(node.keywords).get("moving_bytes") != offloaded.storage.nbytes:
                _fail(
                    "IRC140",
                    f"{what} has a home in {offloaded.tier}, and no optimizer has so much of it",
                )
        elif offloaded.value not in [entry.value for entry in names if entry.target == offloaded.parameter]:
            _fail(
                "IRC140",
                f"{what} has a home in {offloaded.tier}, and the graph has no such parameter",
            )
        elif any(e.role is not InputRole.PARAMETER or e.value.type != offloaded.value.type for e in names):
            _fail(
                "IRC140",
                f"{what} has a home in {offloaded.tier}, and shares its memory with something else",
            )
        elif offloaded.storage in delivered or offloaded.storage in written:
            _fail(
                "IRC140",
                f"{what} has a home in {offloaded.tier}, and is delivered to the caller or written",
            )


_EXCHANGES = frozenset({SEND, RECEIVE, PAUSE})
_IN_ORDER = frozenset({Trait.RANDOM, Trait.EFFECT, Trait.EXCHANGE})
"""What keeps the order of the graph; disposing of one gradient does not touch another parameter."""


class _GraphCheck:
    """What is known of the graph up to the node that is looked at."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names: dict[tuple[type, str], Storage | Value | Node] = {}
        self.written: set[Value] = set()
        self.written_later = {value for node in graph.nodes for value in node.values}
        self.after_loss: set[Value] = set()
        """Tangents, and what backward nodes write."""
        self.allocated: set[Storage] = set()
        self.static = {i.value.storage for i in graph.inputs if i.role is not InputRole.TANGENT}
        self.exchanged: set[tuple[str, Region, str]] = set()

    def run(self) -> None:
        for entry in self.graph.inputs:
            self.write(entry.value, None)
            self.allocated.add(entry.value.storage)
            if entry.role is InputRole.TANGENT:
                self.after_loss.add(entry.value)
        for offloaded in self.graph.offloaded_parameters:
            if offloaded.is_state:
                self.write(offloaded.value, None)
                self.allocated.add(offloaded.storage)
        backward: Node | None = None
        if len({annotation.by for annotation in self.graph.annotations}) < len(self.graph.annotations):
            _fail("IRC550", "two annotations are by the same")
        for node in self.graph.nodes:
            self.name(node, node)
            self.annotation(node)
            for operand in node.operands:
                self.read(operand, node)
            if node.region is Region.BACKWARD:
                backward = node
            elif backward is not None:
                _fail("IRC114", f"forward node {node.name} stands after backward node {backward.name}", node)
            for value in node.values:
                self.write(value, node)
            self.aliases(node)
            self.allocated.update(value.storage for value in node.values)
        self.outputs()

    def name(self, thing: Storage | Value | Node, node: Node | None) -> None:
        known = self.names.setdefault((type(thing), thing.name), thing)
        if known is not thing:
            kind = type(thing).__name__.lower()
            _fail("IRC110", f"two {kind}s are named {thing.name}", node)

    def annotation(self, node: Node) -> None:
        if node.annotation is None:
            return
        if node.annotation not in self.graph.annotations:
            _fail(
                "IRC550",
                f"{node.name} has the annotation {node.annotation.by}, which is not one of the graph",
                node,
            )
        if node.is_view or node.region is Region.BACKWARD:
            _fail(
                "IRC550",
                f"{node.name} has the annotation {node.annotation.by}, but is no forward operation",
                node,
            )

    def read(self, value: Value, node: Node) -> None:
        if value not in self.written:
            when = "before it is written" if value in self.written_later else "but never written"
            _fail("IRC111", f"{value} is read by {node.name} {when}", node)
        if node.region is Region.FORWARD and value in self.after_loss:
            _fail("IRC114", f"forward node {node.name} reads {value}, which exists only in backward", node)

    def write(self, value: Value, node: Node | None) -> None:
        if value in self.written:
            by = f" by {node.name}" if node else ""
            _fail("IRC112", f"{value} is written again{by}", node)
        self.name(value, node)
        self.name(value.storage, node)
        self.written.add(value)
        if node is not None and node.region is Region.BACKWARD:
            self.after_loss.add(value)
        reach_bytes = _reach_bytes(value)
        if reach_bytes is None:
            rank, strides = len(value.type.shape), len(value.type.strides)
            _fail("IRC113", f"{value} has {rank} dimensions and {strides} strides", node)
        if reach_bytes > value.storage.nbytes:
            storage = value.storage
            message = f"{value} reaches {reach_bytes} B into storage {storage.name} of {storage.nbytes} B"
            _fail("IRC113", message, node)

    def aliases(self, node: Node) -> None:
        if Trait.EFFECT in node.traits:
            return self.effect(node)
        if Trait.EXCHANGE in node.traits or node.op in _EXCHANGES:
            self.exchange(node)
        read = {operand.storage for operand in node.operands}
        for value in node.values:
            if node.is_view and value.storage not in read:
                message = f"view {node.name} returns {value} in storage {value.storage.name}"
                _fail("IRC115", f"{message}, in which none of its operands lies", node)
            if not node.is_view and value.storage in self.allocated:
                message = f"{node.name} is no view but returns {value} in storage {value.storage.name}"
                _fail("IRC116", f"{message}, which exists already", node)

    def effect(self, node: Node) -> None:
        operands = node.operands
        if not operands or operands[0].storage not in self.static or node.is_view:
            _fail("IRC119", f"effect {node.name} does not write a static storage by its first operand", node)
        for value in node.values:
            if value.storage is not operands[0].storage and value.storage in self.allocated:
                message = f"effect {node.name} returns {value} in storage {value.storage.name}"
                _fail("IRC116", f"{message}, which exists already and is not the one it writes", node)

    def exchange(self, node: Node) -> None:
        """Sends one value, or receives one; each key once in each direction, and one pause at the most."""
        match node.op, node.arguments, node.results:
            case (op, (Value(), str() as key), ()) if op == SEND:
                pass
            case (op, (str() as key,), (Value(),)) if op == RECEIVE:
                pass
            case (op, (), ()) if op == PAUSE and node.region is Region.BACKWARD:
                key = ""
            case _:
                _fail("IRC141", f"{node.name} is no exchange between pipeline stages", node)
        if node.traits != frozenset({Trait.EXCHANGE}) or node.keywords:
            _fail("IRC141", f"{node.name} is an exchange with other traits, or with keywords", node)
        if (node.op, node.region, key) in self.exchanged:
            _fail("IRC141", f"{node.name} is {node.op} {key!r} a second time", node)
        self.exchanged.add((node.op, node.region, key))

    def outputs(self) -> None:
        is_stage = any(node.op in (SEND, RECEIVE) for node in self.graph.nodes)
        if not is_stage and not any(output.role is OutputRole.OUTPUT for output in self.graph.outputs):
            _fail("IRC117", "the graph has no output")
        targets = {f"{i.role.value}:{i.target}" for i in self.graph.inputs if i.role is not InputRole.TANGENT}
        delivered: set[tuple[OutputRole, str]] = set()
        for output in self.graph.outputs:
            what = _describe(output)
            if (output.role, output.target) in delivered:
                _fail("IRC110", f"{what} is delivered twice")
            delivered.add((output.role, output.target))
            if output.value is not None and output.value not in self.written:
                _fail("IRC117", f"{what} is {output.value}, which is never written")
            if output.role is OutputRole.GRADIENT:
                if output.target not in targets:
                    _fail("IRC118", f"{what} belongs to no input of the graph")
            elif output.value is None:
                _fail("IRC117", f"{what} has no value")
            elif output.value in self.after_loss:
                _fail("IRC117", f"{what} is {output.value}, which exists only in backward")


class _ReleaseCheck:
    """Whether the gradients that a graph releases are those of its parameters, each once and in time."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        trained = (i for i in graph.inputs if i.role is InputRole.PARAMETER and i.requires_grad)
        self.targets: dict[Value, str] = {}
        self.tied: dict[Value, list[str]] = {}
        """For each name that a trained parameter was first given, all its names."""
        first: dict[tuple[Storage, TensorType], list[str]] = {}
        for entry in trained:
            self.targets[entry.value] = entry.target
            names = first.setdefault((entry.value.storage, entry.value.type), [])
            names.append(entry.target)
            self.tied[entry.value] = names
        self.undelivered = {
            o.target for o in graph.outputs if o.role is OutputRole.GRADIENT and o.value is None
        }
        self.held = {i.value.storage for i in graph.inputs}
        self.held |= {o.value.storage for o in graph.outputs if o.value is not None}
        """Storages that the caller has hold of, and those of gradients that were released."""
        self.kinds: set[Gradients] = set()
        self.released: set[str] = set()
        self.applied: dict[Storage, Node] = {}
        self.taken_bytes = 0

    def run(self) -> None:
        for node in self.graph.nodes:
            if node.releases is not None:
                self.release(node, node.releases)
            elif not node.is_view:
                self.reads(node.operands, node.name, node)
        for output in self.graph.outputs:
            if output.role is OutputRole.GRADIENT and output.value is not None:
                self.reads((output.value,), _describe(output), None)
        if self.taken_bytes != self.graph.reserved_bytes:
            message = f"{self.graph.reserved_bytes} B are reserved where what is released takes"
            _fail("IRC133", f"{message} {self.taken_bytes} B")

    def reads(self, values: Sequence[Value], reader: str, node: Node | None) -> None:
        for value in values:
            if value.storage in self.applied:
                by = self.applied[value.storage].name
                _fail("IRC134", f"{reader} reads {value}, which {by} has updated before", node)

    def release(self, node: Node, kind: Gradients) -> None:
        parameter, gradient = self.operands(node)
        self.kinds.add(kind)
        if len(self.kinds) > 1:
            _fail("IRC133", f"{node.name} releases its gradient in another way than those before it", node)
        for name in self.tied[parameter]:
            if name in self.released:
                _fail("IRC133", f"{node.name} releases the gradient of {parameter} again", node)
            if f"parameter:{name}" not in self.undelivered:
                _fail("IRC133", f"{node.name} releases the gradient of {parameter}, which is delivered", node)
        self.released.update(self.tied[parameter])
        if gradient.storage in self.held:
            _fail("IRC133", f"{node.name} releases {gradient}, whose storage somebody else holds", node)
        self.held.add(gradient.storage)
        if kind is Gradients.ACCUMULATED:
            self.taken_bytes += gradient.storage.nbytes
        else:
            self.taken_bytes += self.measured(node)
            self.applied[parameter.storage] = node

    def operands(self, node: Node) -> tuple[Value, Value]:
        """The parameter and its gradient, where they are what they have to be."""
        if node.region is not Region.BACKWARD or Trait.EFFECT not in node.traits or node.results:
            _fail("IRC133", f"{node.name} is not an effect of backward without results", node)
        match node.arguments:
            case (Value() as parameter, Value() as gradient) if parameter in self.targets:
                pass
            case _:
                message = f"{node.name} does not take a parameter that requires a gradient, and its gradient"
                _fail("IRC133", message, node)
        mine, its = gradient.type, parameter.type
        if (mine.shape, mine.dtype) != (its.shape, its.dtype):
            _fail("IRC133", f"{node.name} takes {gradient} for a gradient of {parameter}", node)
        return parameter, gradient

    def measured(self, node: Node) -> int:
        """The bytes of state that an optimizer's step keeps."""
        keywords = dict(node.keywords)
        for key in ("state_bytes", "workspace_bytes", "seconds"):
            number = keywords.get(key)
            if not isinstance(number, int | float if key == "seconds" else int) or not number >= 0:
                _fail("IRC133", f"{node.name} has {key}={number!r}", node)
        state_bytes = keywords["state_bytes"]
        assert isinstance(state_bytes, int)
        return state_bytes


def _reach_bytes(value: Value) -> int | None:
    """Bytes from the first to the last element; 0 where strides are not known, None where they are wrong."""
    shape, strides = value.type.shape, value.type.strides
    if len(strides) != len(shape):
        return None if strides else 0
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * value.type.dtype.itemsize


def verify_schedule(
    schedule: Schedule,
    workspace_bytes: Mapping[Node, int],
    *,
    budget_bytes: int | None = None,
    peak_bytes: int | None = None,
    tiers: Sequence[Tier] = (),
) -> Timeline:
    """Checks that `schedule` carries out its graph, and within its memory.

    Args:
        schedule: Over a graph that `verify_graph` accepts.
        workspace_bytes: What each node takes while it runs, beyond its results; a missing node takes nothing.
        budget_bytes: The most that may be alive at once, static bytes included.
        peak_bytes: The peak that someone claims: it must be exact.
        tiers: Where storages may be copied to.

    Returns:
        The memory, instruction by instruction, as this check counts it: equal to `liveness` in every entry.

    Raises:
        VerificationError: IRC120 a storage is read while it is not resident; IRC121 a storage may not be
            freed here, or not before its home has what it became; IRC122 a node may not retain a storage;
            IRC123 a node that cannot be recomputed does not run exactly once; IRC124 random nodes, effects
            and their readers run out of order; IRC125 not forward, one loss, backward, or a node that no
            schedule runs; IRC126 an output or gradient is missing; IRC127 a storage is left over; IRC128 the
            peak is over the budget; IRC129 the peak is not the one claimed; IRC134 an operation reads a
            parameter after its gradient was applied; IRC135 a storage cannot be copied to a tier here, or
            need not be; IRC136 a tier does not hold what is fetched, or it is there already; IRC137 nobody
            began the copy that is waited for; IRC138 a storage is read or freed while it is copied, or a copy
            is never waited for; IRC139 there is no such tier, or it is full; IRC551 a node runs again
            although its results are to be kept; IRC552 a storage stays from forward to backward although it
            is to be made again.
    """
    check = _ScheduleCheck(schedule, workspace_bytes, {tier.name: tier.capacity_bytes for tier in tiers})
    timeline = check.run()
    counted = liveness(schedule, workspace_bytes)
    if counted != timeline:
        step = _first_difference(timeline, counted)
        ours, theirs = (
            f"{t.during_bytes[step]} B during, {t.after_bytes[step]} B after" for t in (timeline, counted)
        )
        message = f"instruction {step}: {ours} by this check; {theirs} by liveness"
        _fail("IRC129", message, check.node_at(step))
    peak, step = timeline.peak_bytes, timeline.peak_index
    if peak_bytes is not None and peak != peak_bytes:
        message = f"peak is {peak} B at instruction {step}, not the {peak_bytes} B claimed"
        _fail("IRC129", message, check.node_at(step))
    if budget_bytes is not None and peak > budget_bytes:
        message = f"peak is {peak} B at instruction {step}, over the budget of {budget_bytes} B"
        _fail("IRC128", message, check.node_at(step))
    return timeline


def _first_difference(a: Timeline, b: Timeline) -> int:
    rows_a, rows_b = (list(zip(t.during_bytes, t.after_bytes, strict=True)) for t in (a, b))
    return next(i for i, (row_a, row_b) in enumerate(zip(rows_a, rows_b, strict=True)) if row_a != row_b)


class _ScheduleCheck:
    """What is resident, what has run, and how much memory that takes."""

    def __init__(
        self, schedule: Schedule, workspace_bytes: Mapping[Node, int], capacity_bytes: Mapping[str, int]
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.graph = schedule.graph
        self.instructions = schedule.instructions
        self.workspace_bytes = workspace_bytes
        self.step = 0
        self.describe_graph()
        self.tangents -= self.static
        self.delivered -= self.static | self.tangents
        self.resident: set[Storage] = set(self.static)
        self.static_bytes = sum(storage.nbytes for storage in self.resident) + self.graph.reserved_bytes
        self.static_bytes += (self.graph.forwards_in_flight - 1) * sum(s.nbytes for s in self.inputs)
        self.static_bytes -= sum(
            offloaded.storage.nbytes for offloaded in self.graph.offloaded_parameters if offloaded.is_state
        )
        self.alive_bytes = self.static_bytes
        self.waiting_bytes = 0
        """What a call holds between its forward and its backward."""
        self.loss_step = 0
        self.during_bytes: list[int] = []
        self.after_bytes: list[int] = []
        self.lost = False
        self.ran: set[Node] = set()
        self.applied: dict[Storage, Node] = {}
        """The parameters that an optimizer has updated, each with the node that did."""
        self.in_order_done = 0
        self.copying: set[Storage] = set()
        """The storages of which a copy is under way, either way."""
        self.fetching: set[Storage] = set()
        """Those of them whose numbers are not there yet."""
        self.stored: dict[Storage, str] = {
            offloaded.storage: offloaded.tier for offloaded in self.graph.offloaded_parameters
        }
        """The tier that holds, or is being given, a copy."""
        self.changed: set[Storage] = set()
        """What has a home, and is other there than on the device."""
        self.last_fetch = {i.storage: k for k, i in enumerate(self.instructions) if isinstance(i, Fetch)}
        self.held_bytes = dict.fromkeys(capacity_bytes, 0)
        for offloaded in self.graph.offloaded_parameters:
            self.hold(offloaded.storage, offloaded.tier)

    def describe_graph(self) -> None:
        """Who allocates, who overwrites, what stays: derived here from the nodes alone."""
        graph = self.graph
        self.tangents = {i.value.storage for i in graph.inputs if i.role is InputRole.TANGENT}
        self.offloaded_parameters = {
            offloaded.storage: offloaded.tier for offloaded in graph.offloaded_parameters
        }
        targets = {i.value: i.target for i in graph.inputs if i.role is InputRole.PARAMETER}
        states = {
            offloaded.parameter: offloaded.storage
            for offloaded in graph.offloaded_parameters
            if offloaded.is_state
        }
        self.changes: dict[Node, set[Storage]] = {}
        """What has a home and is changed by the step of an optimizer."""
        for node in graph.nodes:
            if node.releases is Gradients.APPLIED:
                parameter = node.operands[0]
                touched = {parameter.storage, states.get(targets[parameter], parameter.storage)}
                self.changes[node] = touched & self.offloaded_parameters.keys()
        self.static = {i.value.storage for i in graph.inputs if i.role is not InputRole.TANGENT}
        self.static -= self.offloaded_parameters.keys()
        self.delivered = {o.value.storage for o in graph.outputs if o.value is not None}
        shared = {i.value.storage for i in graph.inputs if i.role is not InputRole.INPUT}
        self.inputs = self.static - self.tangents - shared
        self.allocates: dict[Node, set[Storage]] = {}
        self.producer: dict[Storage, Node] = {}
        self.effects_behind: dict[Value, frozenset[Node]] = {}
        """The effects that must have run before a value in a static storage holds its numbers."""
        self.runs_before: dict[Node, list[Node]] = {}
        """For each effect, the pinned nodes that read the storage before it is overwritten."""
        pinned: list[Node] = []
        for node in graph.nodes:
            if node.is_view:
                behind = self.effects_read(node)
                self.effects_behind.update((value, behind) for value in node.values if behind)
                continue
            storages = {value.storage for value in node.values} - self.static - self.tangents
            storages -= self.offloaded_parameters.keys()
            self.allocates[node] = {s for s in storages if self.producer.setdefault(s, node) is node}
            if Trait.EFFECT in node.traits:
                target = node.operands[0].storage
                reading = (p for p in pinned if any(v.storage is target for v in p.operands))
                self.runs_before[node] = list(reading)
                self.effects_behind.update(
                    (v, frozenset((node,))) for v in node.values if v.storage is target
                )
            if Trait.PINNED in node.traits:
                pinned.append(node)
        self.in_order = [n for n in self.allocates if n.traits & _IN_ORDER and n.releases is None]
        self.describe_ends()

    def describe_ends(self) -> None:
        """What a call leaves with the caller, and `.grad`."""
        entries = {f"{i.role.value}:{i.target}": i for i in self.graph.inputs}
        self.left: set[Storage] = set()
        self.gradients: dict[object, int] = {}
        """Bytes of the gradient of each parameter; tied ones are one tensor, with one gradient."""
        for output in self.graph.outputs:
            storage = output.value.storage if output.value is not None else None
            if storage is None or storage not in self.producer:
                continue
            made_forward = self.producer[storage].region is Region.FORWARD
            if made_forward or entries[output.target].role is InputRole.INPUT:
                self.left.add(storage)
            else:
                value = entries[output.target].value
                self.gradients[value.storage, value.type] = storage.nbytes

    def effects_read(self, node: Node) -> frozenset[Node]:
        none: frozenset[Node] = frozenset()
        return none.union(*(self.effects_behind.get(value, none) for value in node.operands))

    def run(self) -> Timeline:
        for step, instruction in enumerate(self.instructions):
            self.step = step
            match instruction:
                case Compute(node, retained):
                    self.compute(node, retained)
                case Free(storage):
                    self.free(storage)
                case Loss():
                    self.loss()
                case Offload(storage, tier):
                    self.offload(storage, tier)
                case Fetch(storage, tier):
                    self.fetch(storage, tier)
                case Wait(storage):
                    self.wait(storage)
            self.after_bytes.append(self.alive_bytes)
        self.finish()
        waits, ends = self.others_bytes(0), max(map(self.others_bytes, range(self.graph.forwards_in_flight)))
        beside = [waits if step < self.loss_step else ends for step in range(len(self.instructions))]
        return Timeline(
            tuple(own + others for own, others in zip(self.during_bytes, beside, strict=True)),
            tuple(own + others for own, others in zip(self.after_bytes, beside, strict=True)),
        )

    def others_bytes(self, finished: int) -> int:
        """What the other calls in flight hold, where the backward of so many of them has run."""
        waiting = self.graph.forwards_in_flight - 1 - finished
        left_bytes = sum(s.nbytes for s in self.left) + self.graph.loss_held_bytes
        nbytes = waiting * self.waiting_bytes + finished * left_bytes
        return nbytes + (sum(self.gradients.values()) if finished else 0)

    def compute(self, node: Node, retained: frozenset[Storage]) -> None:
        if node not in self.allocates:
            why = "a view, which no schedule runs" if node.is_view else "no node of the graph"
            self.fail("IRC125", f"{node.name} is {why}", node)
        if node.region is Region.BACKWARD and not self.lost:
            self.fail("IRC125", f"backward node {node.name} runs before the loss", node)
        self.operands(node)
        self.order(node)
        allocated = self.allocates[node]
        self.during_bytes.append(
            self.alive_bytes + sum(s.nbytes for s in allocated) + self.workspace_bytes.get(node, 0)
        )
        for storage in _by_name(retained):
            if storage not in allocated:
                self.fail("IRC122", f"{node.name} retains {_show(storage)}, which it does not allocate", node)
            if storage in self.resident:
                self.fail("IRC122", f"{node.name} retains {_show(storage)}, which is resident already", node)
            self.resident.add(storage)
            self.alive_bytes += storage.nbytes
        self.ran.add(node)
        if node.releases is Gradients.APPLIED:
            self.applied[node.operands[0].storage] = node
            self.changed |= self.changes[node]

    def operands(self, node: Node) -> None:
        for storage in _by_name(frozenset(self.changes.get(node, ()))):
            if storage not in self.resident:
                self.fail("IRC120", f"{node.name} changes {_show(storage)}, which is not resident", node)
            if storage in self.fetching:
                message = f"{node.name} changes {_show(storage)} before its copy has arrived"
                self.fail("IRC138", message, node)
        for value in node.operands:
            if value.storage not in self.resident:
                message = f"{node.name} reads {value} in {_show(value.storage)}, which is not resident"
                self.fail("IRC120", message, node)
            if value.storage in self.fetching:
                message = f"{node.name} reads {value} in {_show(value.storage)} before its copy has arrived"
                self.fail("IRC138", message, node)
            if value.storage in self.applied and node.releases is None:
                message = f"{node.name} reads {value}, which {self.applied[value.storage].name} has updated"
                self.fail("IRC134", message, node)
        for effect in self.effects_read(node) - self.ran:
            self.fail("IRC124", f"{node.name} reads what {effect.name} writes, which has not run yet", node)

    def order(self, node: Node) -> None:
        if node.region is Region.BACKWARD and node in self.ran:
            self.fail("IRC123", f"{node.name} is a backward operation and runs a second time", node)
        if node.is_recomputable:
            return
        if node in self.ran:
            if node.traits & RUN_ONCE or node.annotation is None:
                self.fail("IRC123", f"{node.name} {_why_once(node)} and runs a second time", node)
            self.fail("IRC551", f"{node.name} runs a second time, against {node.annotation.by}", node)
        for reader in self.runs_before.get(node, ()):
            if reader not in self.ran:
                self.fail(
                    "IRC124",
                    f"effect {node.name} runs before {reader.name}, which reads the old values",
                    node,
                )
        if node.releases is None and node.traits & _IN_ORDER:
            following = self.in_order[self.in_order_done]
            if following is not node:
                self.fail(
                    "IRC124", f"{node.name} runs before {following.name}: not the order of the graph", node
                )
            self.in_order_done += 1

    def free(self, storage: Storage) -> None:
        producer = self.producer.get(storage)
        for kept, why in (
            (self.static, "exists before and after the step"),
            (self.tangents, "is a tangent, held by the caller"),
            (self.delivered, "is delivered to the caller"),
        ):
            if storage in kept:
                self.fail("IRC121", f"{_show(storage)} is freed, but {why}", producer)
        if storage not in self.resident:
            self.fail("IRC121", f"{_show(storage)} is freed, but not resident", producer)
        if storage in self.copying:
            self.fail("IRC138", f"{_show(storage)} is freed before its copy has ended", producer)
        if storage in self.changed:
            tier = self.offloaded_parameters[storage]
            message = f"{_show(storage)} is freed, and {tier} does not have what it became"
            self.fail("IRC121", message, producer)
        self.during_bytes.append(self.alive_bytes)
        self.resident.remove(storage)
        self.alive_bytes -= storage.nbytes

    def offload(self, storage: Storage, tier: str) -> None:
        self.during_bytes.append(self.alive_bytes)
        producer = self.producer.get(storage)
        if storage in self.offloaded_parameters:
            return self.offload_parameter(storage, tier)
        if storage not in self.resident or storage not in self.graph.copyable_storages:
            message = f"{_show(storage)} cannot be copied to {tier}: {self.why_fixed(storage)}"
            self.fail("IRC135", message, producer)
        if storage in self.copying or storage in self.stored:
            self.fail("IRC135", f"{_show(storage)} is copied to {tier}, but was copied before", producer)
        self.copying.add(storage)
        self.stored[storage] = tier
        self.hold(storage, tier)

    def offload_parameter(self, storage: Storage, tier: str) -> None:
        if (
            storage not in self.changed
            or storage in self.copying
            or tier != self.offloaded_parameters[storage]
        ):
            message = f"{_show(storage)} cannot be copied to {tier}: {self.why_offloaded(storage)}"
            self.fail("IRC135", message)
        self.copying.add(storage)

    def why_offloaded(self, storage: Storage) -> str:
        offloaded = self.offloaded_parameters[storage]
        if storage in self.copying:
            return f"it is being copied to its home in {offloaded}"
        return (
            f"its home is in {offloaded}"
            if storage in self.changed
            else f"it is in {offloaded} as it is here"
        )

    def hold(self, storage: Storage, tier: str) -> None:
        """A tier holds one more."""
        producer = self.producer.get(storage)
        if tier not in self.capacity_bytes:
            self.fail("IRC139", f"{_show(storage)} is copied to {tier}, and there is no such tier", producer)
        self.held_bytes[tier] += storage.nbytes
        if self.held_bytes[tier] > self.capacity_bytes[tier]:
            message = f"{tier} would hold {self.held_bytes[tier]} B; it takes {self.capacity_bytes[tier]} B"
            self.fail("IRC139", message, producer)

    def why_fixed(self, storage: Storage) -> str:
        if storage in self.delivered:
            return "it is delivered to the caller"
        if storage not in self.producer:
            return "no operation makes it"
        return (
            "it is not made as one tensor that fills it" if storage in self.resident else "it is not resident"
        )

    def fetch(self, storage: Storage, tier: str) -> None:
        producer = self.producer.get(storage)
        if self.stored.get(storage) != tier or storage in self.copying:
            self.fail("IRC136", f"{_show(storage)} is fetched from {tier}, which does not hold it", producer)
        if storage in self.resident:
            self.fail("IRC136", f"{_show(storage)} is fetched from {tier}, but resident already", producer)
        self.during_bytes.append(self.alive_bytes + storage.nbytes)
        self.copying.add(storage)
        self.fetching.add(storage)
        self.resident.add(storage)
        self.alive_bytes += storage.nbytes

    def wait(self, storage: Storage) -> None:
        self.during_bytes.append(self.alive_bytes)
        if storage not in self.copying:
            self.fail(
                "IRC137", f"nothing copies {_show(storage)}, and it is waited for", self.producer.get(storage)
            )
        self.copying.remove(storage)
        if storage in self.offloaded_parameters:
            if storage not in self.fetching:
                self.changed.discard(storage)
            self.fetching.discard(storage)
            return
        self.fetching.discard(storage)
        if self.last_fetch.get(storage, -1) < self.step:
            self.held_bytes[self.stored.pop(storage)] -= storage.nbytes

    def loss(self) -> None:
        if self.lost:
            self.fail("IRC125", "the loss stands there twice")
        self.deliver([o for o in self.graph.outputs if o.role is OutputRole.OUTPUT], "at the loss")
        self.crossing()
        self.lost = True
        arriving_bytes = sum(storage.nbytes for storage in self.tangents)
        after_loss_bytes = arriving_bytes + self.graph.loss_held_bytes
        self.waiting_bytes = self.alive_bytes - self.static_bytes
        self.waiting_bytes += max(after_loss_bytes, self.graph.loss_saved_bytes)
        self.loss_step = self.step
        self.during_bytes.append(self.alive_bytes + arriving_bytes + self.graph.loss_bytes)
        self.resident |= self.tangents
        self.alive_bytes += after_loss_bytes

    def crossing(self) -> None:
        """Refuses what stays for backward against an annotation."""
        made = self.resident - self.static - self.delivered - self.offloaded_parameters.keys()
        for storage in _by_name(frozenset(made)):
            node = self.producer[storage]
            annotation = node.annotation
            if (
                annotation is not None
                and annotation.policy is Policy.RECOMPUTE
                and not node.traits & RUN_ONCE
            ):
                message = f"{_show(storage)} of {node.name} stays for backward, against {annotation.by}"
                self.fail("IRC552", message, node)

    def deliver(self, outputs: Sequence[Output], when: str) -> None:
        for output in outputs:
            if output.value is None:
                continue
            storage = output.value.storage
            if storage not in self.resident:
                message = f"{_describe(output)} in {_show(storage)} is not resident {when}"
                self.fail("IRC126", message, self.producer.get(storage))
            for effect in self.effects_behind.get(output.value, frozenset()) - self.ran:
                self.fail(
                    "IRC126",
                    f"{_describe(output)} is written by {effect.name}, which has not run {when}",
                    effect,
                )

    def finish(self) -> None:
        self.step = len(self.instructions)
        if not self.lost:
            self.fail("IRC125", "there is no loss")
        for node in self.allocates:
            if node.traits & RUN_ONCE and node not in self.ran:
                self.fail("IRC123", f"{node.name} {_why_once(node)} and does not run", node)
        self.deliver(self.graph.outputs, "at the end")
        for storage in _by_name(frozenset(self.copying)):
            self.fail(
                "IRC138", f"the copy of {_show(storage)} is never waited for", self.producer.get(storage)
            )
        left = self.resident - self.static - self.tangents - self.delivered
        for storage in sorted(left, key=lambda s: (-s.nbytes, s.name)):
            more = f", and {len(left) - 1} more" if len(left) > 1 else ""
            self.fail("IRC127", f"{_show(storage)} is never freed{more}", self.producer.get(storage))

    def node_at(self, step: int) -> Node | None:
        instruction = self.instructions[step]
        return instruction.node if isinstance(instruction, Compute) else None

    def fail(self, code: str, message: str, node: Node | None = None) -> NoReturn:
        where = (
            f"instruction {self.step}" if self.step < len(self.instructions) else "after the last instruction"
        )
        _fail(code, f"{where}: {message}", node)


def _fail(code: str, message: str, node: Node | None = None) -> NoReturn:
    raise VerificationError(code, message, at=node.at if node is not None else None)


def _by_name(storages: frozenset[Storage]) -> list[Storage]:
    return sorted(storages, key=lambda storage: storage.name)


def _show(storage: Storage) -> str:
    return f"storage {storage.name} ({storage.nbytes} B)"


def _describe(output: Output) -> str:
    return f"gradient of {output.target}" if output.role is OutputRole.GRADIENT else f"output {output.target}"


def _why_once(node: Node) -> str:
    traits = ", ".join(sorted(t.value for t in node.traits & RUN_ONCE))
    return f"must run exactly once ({traits})"
