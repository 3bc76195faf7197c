"""Checks that a schedule carries out its graph, and stays within its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from ..annotation import Policy
from ..fused import overwritten
from ..graph import RUN_ONCE, Gradients, Node, Output, OutputRole, Region
from ..liveness import Timeline, liveness
from ..schedule import Compute, Fetch, Free, Loss, Offload, Schedule, Wait
from ..tiers import Tier
from ..types import Storage
from .faults import by_name, describe, fail, show
from .graph_facts import IN_ORDER, GraphFacts

__all__ = ["verify_schedule"]


def verify_schedule(
    schedule: Schedule,
    workspace_bytes: Mapping[Node, int],
    *,
    budget_bytes: int | None = None,
    peak_bytes: int | None = None,
    tiers: Sequence[Tier] = (),
) -> Timeline:
    """Checks that `schedule` carries out its graph, and stays within its memory.

    Args:
        schedule: Over a graph that `verify_graph` accepts.
        workspace_bytes: Bytes that each node takes while it runs, beyond its results; none when missing.
        budget_bytes: The most bytes that may be alive at once, static bytes included.
        peak_bytes: The peak that a plan claims: it must be exact.
        tiers: The tiers to which storages may be copied.

    Returns:
        The memory, instruction by instruction, as this check counts it: equal to `liveness` in every entry.

    Raises:
        VerificationError: IRC120 a storage is read while it is not resident; IRC121 a storage may not be
            freed here, or not before its tier has its new numbers; IRC122 a node may not retain a storage;
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
        fail("IRC129", message, check.node_at(step))
    peak, step = timeline.peak_bytes, timeline.peak_index
    if peak_bytes is not None and peak != peak_bytes:
        message = f"peak is {peak} B at instruction {step}, not the {peak_bytes} B claimed"
        fail("IRC129", message, check.node_at(step))
    if budget_bytes is not None and peak > budget_bytes:
        message = f"peak is {peak} B at instruction {step}, over the budget of {budget_bytes} B"
        fail("IRC128", message, check.node_at(step))
    return timeline


def _first_difference(a: Timeline, b: Timeline) -> int:
    rows_a, rows_b = (list(zip(t.during_bytes, t.after_bytes, strict=True)) for t in (a, b))
    return next(i for i, (row_a, row_b) in enumerate(zip(rows_a, rows_b, strict=True)) if row_a != row_b)


class _ScheduleCheck:
    """Follows a schedule: what is resident, what has run, and how much memory that takes."""

    def __init__(
        self, schedule: Schedule, workspace_bytes: Mapping[Node, int], capacity_bytes: Mapping[str, int]
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.graph = schedule.graph
        self.instructions = schedule.instructions
        self.workspace_bytes = workspace_bytes
        self.step = 0
        self.facts = GraphFacts(self.graph)
        self.resident: set[Storage] = set(self.facts.static)
        self.static_bytes = sum(storage.nbytes for storage in self.resident) + self.graph.reserved_bytes
        self.static_bytes += (self.graph.forwards_in_flight - 1) * sum(s.nbytes for s in self.facts.inputs)
        self.static_bytes -= sum(
            offloaded.storage.nbytes for offloaded in self.graph.offloaded_parameters if offloaded.is_state
        )
        self.alive_bytes = self.static_bytes
        self.waiting_bytes = 0
        """Bytes that a call holds between its forward and its backward."""
        self.loss_step = 0
        self.during_bytes: list[int] = []
        self.after_bytes: list[int] = []
        self.lost = False
        self.ran: set[Node] = set()
        self.applied: dict[Storage, Node] = {}
        """The parameters that an optimizer has updated, each with the node that did."""
        self.gone: dict[Storage, Node] = {}
        """Storages, not freed yet, whose memory a result has taken, each with the node that makes it."""
        self.in_order_done = 0
        self.copying: set[Storage] = set()
        """Storages that are being copied, in either direction."""
        self.fetching: set[Storage] = set()
        """Storages that are being copied to the device."""
        self.stored: dict[Storage, str] = {
            offloaded.storage: offloaded.tier for offloaded in self.graph.offloaded_parameters
        }
        """The tier that holds a copy of a storage, or to which one is being copied."""
        self.changed: set[Storage] = set()
        """Offloaded storages whose tier does not have what an optimizer made of them."""
        self.last_fetch = {i.storage: k for k, i in enumerate(self.instructions) if isinstance(i, Fetch)}
        self.held_bytes = dict.fromkeys(capacity_bytes, 0)
        for offloaded in self.graph.offloaded_parameters:
            self.hold(offloaded.storage, offloaded.tier)

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
        """Returns what the other calls in flight hold after `finished` of them have run their backward."""
        waiting = self.graph.forwards_in_flight - 1 - finished
        loss_bytes = self.graph.loss_held_bytes + self.graph.loss_tangent_bytes
        left_bytes = sum(s.nbytes for s in self.facts.left) + loss_bytes
        nbytes = waiting * self.waiting_bytes + finished * left_bytes
        return nbytes + (sum(self.facts.gradients.values()) if finished else 0)

    def compute(self, node: Node, retained: frozenset[Storage]) -> None:
        if node not in self.facts.allocates:
            why = "a view, which no schedule runs" if node.is_view else "not a node of the graph"
            self.fail("IRC125", f"{node.name} is {why}", node)
        if node.region is Region.BACKWARD and not self.lost:
            self.fail("IRC125", f"backward node {node.name} runs before the loss", node)
        self.operands(node)
        self.order(node)
        allocated = self.facts.allocates[node]
        self.during_bytes.append(
            self.alive_bytes + sum(s.nbytes for s in allocated) + self.workspace_bytes.get(node, 0)
        )
        for storage in by_name(retained):
            if storage not in allocated:
                self.fail("IRC122", f"{node.name} retains {show(storage)}, which it does not allocate", node)
            if storage in self.resident:
                self.fail("IRC122", f"{node.name} retains {show(storage)}, which is resident already", node)
            self.resident.add(storage)
            self.alive_bytes += storage.nbytes
        for value in overwritten(node):
            if value.storage in self.copying:
                message = f"{node.name} overwrites {value} before the copy of {show(value.storage)} has ended"
                self.fail("IRC138", message, node)
            self.gone[value.storage] = node
            self.alive_bytes -= value.storage.nbytes
        self.ran.add(node)
        if node.releases is Gradients.APPLIED:
            self.applied[node.operands[0].storage] = node
            self.changed |= self.facts.changes[node]

    def operands(self, node: Node) -> None:
        for storage in by_name(frozenset(self.facts.changes.get(node, ()))):
            if storage not in self.resident:
                self.fail("IRC120", f"{node.name} changes {show(storage)}, which is not resident", node)
            if storage in self.fetching:
                message = f"{node.name} changes {show(storage)} before its copy has arrived"
                self.fail("IRC138", message, node)
        for value in node.operands:
            if value.storage not in self.resident:
                message = f"{node.name} reads {value} in {show(value.storage)}, which is not resident"
                self.fail("IRC120", message, node)
            if value.storage in self.gone:
                by = self.gone[value.storage].name
                message = f"{node.name} reads {value} in {show(value.storage)}, which {by} has overwritten"
                self.fail("IRC120", message, node)
            if value.storage in self.fetching:
                message = f"{node.name} reads {value} in {show(value.storage)} before its copy has arrived"
                self.fail("IRC138", message, node)
            if value.storage in self.applied and node.releases is None:
                message = f"{node.name} reads {value}, which {self.applied[value.storage].name} has updated"
                self.fail("IRC134", message, node)
        for effect in self.facts.effects_read(node) - self.ran:
            self.fail("IRC124", f"{node.name} reads what {effect.name} writes, which has not run yet", node)

    def order(self, node: Node) -> None:
        if node.region is Region.BACKWARD and node in self.ran:
            self.fail("IRC123", f"{node.name} is a backward operation and runs a second time", node)
        if node in self.ran:
            if node.is_recomputable:
                return
            if node.run_once or node.annotation is None:
                self.fail("IRC123", f"{node.name} {_why_once(node)} and runs a second time", node)
            self.fail("IRC551", f"{node.name} runs a second time, against {node.annotation.by}", node)
        for reader in self.facts.runs_before.get(node, ()):
            if reader not in self.ran:
                self.fail(
                    "IRC124",
                    f"effect {node.name} runs before {reader.name}, which reads the old values",
                    node,
                )
        if node.releases is None and node.traits & IN_ORDER:
            following = self.facts.in_order[self.in_order_done]
            if following is not node:
                self.fail(
                    "IRC124", f"{node.name} runs before {following.name}: not the order of the graph", node
                )
            self.in_order_done += 1

    def free(self, storage: Storage) -> None:
        producer = self.facts.producer.get(storage)
        for kept, why in (
            (self.facts.static, "exists before and after the step"),
            (self.facts.tangents, "is a tangent, held by the caller"),
            (self.facts.delivered, "is delivered to the caller"),
        ):
            if storage in kept:
                self.fail("IRC121", f"{show(storage)} is freed, but {why}", producer)
        if storage not in self.resident:
            self.fail("IRC121", f"{show(storage)} is freed, but not resident", producer)
        if storage in self.copying:
            self.fail("IRC138", f"{show(storage)} is freed before its copy has ended", producer)
        if storage in self.changed:
            tier = self.facts.offloaded[storage]
            message = f"{show(storage)} is freed, and {tier} does not have its new numbers"
            self.fail("IRC121", message, producer)
        self.during_bytes.append(self.alive_bytes)
        self.resident.remove(storage)
        if self.gone.pop(storage, None) is None:
            self.alive_bytes -= storage.nbytes

    def offload(self, storage: Storage, tier: str) -> None:
        self.during_bytes.append(self.alive_bytes)
        producer = self.facts.producer.get(storage)
        if storage in self.facts.offloaded:
            return self.offload_parameter(storage, tier)
        if storage not in self.resident - self.gone.keys() or storage not in self.graph.copyable_storages:
            message = f"{show(storage)} cannot be copied to {tier}: {self.why_fixed(storage)}"
            self.fail("IRC135", message, producer)
        if storage in self.copying or storage in self.stored:
            self.fail("IRC135", f"{show(storage)} is copied to {tier}, but was copied before", producer)
        self.copying.add(storage)
        self.stored[storage] = tier
        self.hold(storage, tier)

    def offload_parameter(self, storage: Storage, tier: str) -> None:
        if storage not in self.changed or storage in self.copying or tier != self.facts.offloaded[storage]:
            message = f"{show(storage)} cannot be copied to {tier}: {self.why_offloaded(storage)}"
            self.fail("IRC135", message)
        self.copying.add(storage)

    def why_offloaded(self, storage: Storage) -> str:
        tier = self.facts.offloaded[storage]
        if storage in self.copying:
            return f"it is being copied to {tier} already"
        if storage in self.changed:
            return f"it is offloaded to {tier}"
        return f"{tier} has the same numbers"

    def hold(self, storage: Storage, tier: str) -> None:
        """Counts one more storage in a tier."""
        producer = self.facts.producer.get(storage)
        if tier not in self.capacity_bytes:
            self.fail("IRC139", f"{show(storage)} is copied to {tier}, and there is no such tier", producer)
        self.held_bytes[tier] += storage.nbytes
        if self.held_bytes[tier] > self.capacity_bytes[tier]:
            message = f"{tier} would hold {self.held_bytes[tier]} B; it takes {self.capacity_bytes[tier]} B"
            self.fail("IRC139", message, producer)

    def why_fixed(self, storage: Storage) -> str:
        if storage in self.facts.delivered:
            return "it is delivered to the caller"
        if storage not in self.facts.producer:
            return "no operation makes it"
        return (
            "it is not made as one tensor that fills it" if storage in self.resident else "it is not resident"
        )

    def fetch(self, storage: Storage, tier: str) -> None:
        producer = self.facts.producer.get(storage)
        if self.stored.get(storage) != tier or storage in self.copying:
            self.fail("IRC136", f"{show(storage)} is fetched from {tier}, which does not hold it", producer)
        if storage in self.resident:
            self.fail("IRC136", f"{show(storage)} is fetched from {tier}, but resident already", producer)
        self.during_bytes.append(self.alive_bytes + storage.nbytes)
        self.copying.add(storage)
        self.fetching.add(storage)
        self.resident.add(storage)
        self.alive_bytes += storage.nbytes

    def wait(self, storage: Storage) -> None:
        self.during_bytes.append(self.alive_bytes)
        if storage not in self.copying:
            self.fail(
                "IRC137",
                f"nothing copies {show(storage)}, and it is waited for",
                self.facts.producer.get(storage),
            )
        self.copying.remove(storage)
        if storage in self.facts.offloaded:
            if storage not in self.fetching:
                self.changed.discard(storage)
            self.fetching.discard(storage)
            return
        self.fetching.discard(storage)
        if self.last_fetch.get(storage, -1) < self.step:
            self.held_bytes[self.stored.pop(storage)] -= storage.nbytes

    def loss(self) -> None:
        if self.lost:
            self.fail("IRC125", "the loss occurs twice")
        self.deliver([o for o in self.graph.outputs if o.role is OutputRole.OUTPUT], "at the loss")
        self.crossing()
        for node in self.facts.in_order[self.in_order_done :]:
            if node.region is Region.FORWARD:
                self.fail(
                    "IRC124",
                    f"the loss is computed before {node.name} runs: not the order of the graph",
                    node,
                )
        self.lost = True
        arriving_bytes = sum(storage.nbytes for storage in self.facts.tangents)
        after_loss_bytes = arriving_bytes + self.graph.loss_held_bytes
        self.waiting_bytes = self.alive_bytes - self.static_bytes
        self.waiting_bytes += max(after_loss_bytes, self.graph.loss_saved_bytes)
        self.loss_step = self.step
        self.during_bytes.append(self.alive_bytes + arriving_bytes + self.graph.loss_bytes)
        self.resident |= self.facts.tangents
        self.alive_bytes += after_loss_bytes

    def crossing(self) -> None:
        """Refuses a storage that stays for backward against an annotation."""
        made = self.resident - self.facts.static - self.facts.delivered - self.facts.offloaded.keys()
        for storage in by_name(frozenset(made)):
            node = self.facts.producer[storage]
            annotation = node.annotation
            if annotation is not None and annotation.policy is Policy.RECOMPUTE and not node.run_once:
                message = f"{show(storage)} of {node.name} stays for backward, against {annotation.by}"
                self.fail("IRC552", message, node)

    def deliver(self, outputs: Sequence[Output], when: str) -> None:
        for output in outputs:
            if output.value is None:
                continue
            storage = output.value.storage
            if storage not in self.resident:
                message = f"{describe(output)} in {show(storage)} is not resident {when}"
                self.fail("IRC126", message, self.facts.producer.get(storage))
            for effect in self.facts.effects_behind.get(output.value, frozenset()) - self.ran:
                self.fail(
                    "IRC126",
                    f"{describe(output)} is written by {effect.name}, which has not run {when}",
                    effect,
                )

    def finish(self) -> None:
        self.step = len(self.instructions)
        if not self.lost:
            self.fail("IRC125", "there is no loss")
        for node in self.facts.allocates:
            if node.traits & RUN_ONCE and node not in self.ran:
                self.fail("IRC123", f"{node.name} {_why_once(node)} and does not run", node)
        self.deliver(self.graph.outputs, "at the end")
        for storage in by_name(frozenset(self.copying)):
            self.fail(
                "IRC138", f"the copy of {show(storage)} is never waited for", self.facts.producer.get(storage)
            )
        left = self.resident - self.facts.static - self.facts.tangents - self.facts.delivered
        for storage in sorted(left, key=lambda s: (-s.nbytes, s.name)):
            more = f", and {len(left) - 1} more" if len(left) > 1 else ""
            self.fail("IRC127", f"{show(storage)} is never freed{more}", self.facts.producer.get(storage))

    def node_at(self, step: int) -> Node | None:
        instruction = self.instructions[step]
        return instruction.node if isinstance(instruction, Compute) else None

    def fail(self, code: str, message: str, node: Node | None = None) -> NoReturn:
        where = (
            f"instruction {self.step}" if self.step < len(self.instructions) else "after the last instruction"
        )
        fail(code, f"{where}: {message}", node)


def _why_once(node: Node) -> str:
    traits = ", ".join(sorted(t.value for t in node.traits & RUN_ONCE))
    return f"must run {'once' if node.is_recomputable else 'exactly once'} ({traits})"
