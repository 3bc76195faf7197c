"""The memory of a schedule, tensor by tensor and step by step: who is on the device when, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from .errors import Location
from .fused import operation_of, overwritten
from .graph import Gradients, Graph, InputRole, Node, OutputRole, Region
from .liveness import liveness
from .printable import printable
from .schedule import Compute, Fetch, Free, Loss, Offload, Schedule, Wait
from .tiers import Tier
from .timing import step_times
from .types import Storage

__all__ = ["Kind", "MemoryTimeline", "Resident", "StepMemory", "TierCopy", "TimelineStep", "memory_timeline"]


class Kind(StrEnum):
    """The reason for which bytes are on the device."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    CONSTANTS = "constants"
    INPUTS = "inputs"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    SAVED = "saved"
    OUTPUTS = "outputs"
    RECOMPUTED = "recomputed"
    FETCHED = "fetched"
    FORWARD = "forward"
    BACKWARD = "backward"
    WORKSPACE = "workspace"
    OTHER = "loss and other forwards"


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """An operation that runs, the loss, the begin of a copy to the device, or a wait for a copy.

    Args:
        name: The name of the node; `loss`, or the name of the storage that is waited for.
        op: The operation.
        phase: `forward`, `loss`, `backward`, `recompute`, `fetch` (a tensor comes back) or `wait`.
        start_seconds: When it begins, from the beginning of the step.
        end_seconds: When it ends.
        workspace_bytes: The bytes that it takes while it runs, beyond its results.
        other_bytes: The bytes of the loss, and of the other forwards in flight, at that time.
        module: The module that it belongs to, or "".
        source: The line of the user's code, or the ONNX node; or "".
    """

    name: str
    op: str
    phase: str
    start_seconds: float
    end_seconds: float
    workspace_bytes: int
    other_bytes: int
    module: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Resident:
    """One stay of a storage on the device.

    Args:
        name: The name of the parameter, buffer, input or output that lies in it, or of the first value.
        kind: The reason: the value of a `Kind`.
        nbytes: Its bytes.
        first: The step that brings it.
        last: The last step at whose time it is there.
        maker: The step that computed it; -1 for what is there before.
    """

    name: str
    kind: str
    nbytes: int
    first: int
    last: int
    maker: int = -1


@dataclass(frozen=True, slots=True)
class TierCopy:
    """A copy between the device and a tier.

    Args:
        name: The name of the storage.
        nbytes: Its bytes.
        tier: The name of the tier.
        direction: `out` or `in`.
        start_seconds: When it begins.
        end_seconds: When its last byte has arrived.
    """

    name: str
    nbytes: int
    tier: str
    direction: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class MemoryTimeline:
    """The memory of one step.

    At each step the stays that cover it, its workspace and its other bytes are all that is on the device:
    their sum is what `liveness` counts while the step runs.

    Args:
        steps: Operations in order, with the loss and the waits between them.
        residents: The stays of storages, in order of their first steps.
        copies: The copies to tiers and back.
        has_seconds: Whether the operations were timed; else each takes one second.
    """

    steps: tuple[TimelineStep, ...]
    residents: tuple[Resident, ...]
    copies: tuple[TierCopy, ...] = ()
    has_seconds: bool = True

    @cached_property
    def during_bytes(self) -> tuple[int, ...]:
        """The bytes on the device while each step runs."""
        change = [0] * (len(self.steps) + 1)
        for each in self.residents:
            change[each.first] += each.nbytes
            change[each.last + 1] -= each.nbytes
        found: list[int] = []
        alive = 0
        for step, more in zip(self.steps, change, strict=False):
            alive += more
            found.append(alive + step.workspace_bytes + step.other_bytes)
        return tuple(found)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are on the device at once."""
        return max(self.during_bytes, default=0)

    @property
    def peak_step(self) -> int:
        """The step at which the peak is first reached."""
        return self.during_bytes.index(self.peak_bytes) if self.steps else 0

    @property
    def step_seconds(self) -> float:
        """The time of the whole step."""
        return self.steps[-1].end_seconds if self.steps else 0.0

    def at(self, step: int) -> list[Resident]:
        """The stays that cover a step, the largest first."""
        return sorted((r for r in self.residents if r.first <= step <= r.last), key=lambda r: -r.nbytes)

    def by_kind(self, step: int) -> dict[str, int]:
        """The bytes of each kind at a step; kinds without any are left out."""
        found: Counter[str] = Counter()
        for each in self.at(step):
            found[each.kind] += each.nbytes
        found[Kind.WORKSPACE] += self.steps[step].workspace_bytes
        found[Kind.OTHER] += self.steps[step].other_bytes
        return {kind: found[kind] for kind in Kind if found[kind]}

    def to_json(self) -> dict[str, Any]:
        """The timeline as JSON-ready data: rows of values, in the order of the fields."""
        return {
            "has_seconds": self.has_seconds,
            **{name: [list(astuple(row)) for row in getattr(self, name)] for name in _ROWS},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> MemoryTimeline:
        """Reads what `to_json` gives.

        Raises:
            ValueError: For rows that are none, or that name steps which are not there.
            LookupError: When something is missing.
            TypeError: For rows of another length.
        """
        steps, residents, copies = (
            tuple(_row(kind, row) for row in data[name]) for name, kind in _ROWS.items()
        )
        timeline = MemoryTimeline(steps, residents, copies, bool(data["has_seconds"]))
        for each in residents:
            Kind(each.kind)
            if not (0 <= each.first <= each.last < len(steps) and -1 <= each.maker < len(steps)):
                raise ValueError(f"{each.name} is there from step {each.first} to {each.last}")
        return timeline


_ROWS: dict[str, type[Any]] = {"steps": TimelineStep, "residents": Resident, "copies": TierCopy}
_MOST = 1 << 63


def _row(kind: type[Any], row: Any) -> Any:
    wanted = [each.type for each in fields(kind)]
    if not isinstance(row, list) or len(row) != len(wanted):
        raise ValueError(f"a row of {kind.__name__} is {row!r}")
    for value, type in zip(row, wanted, strict=True):
        is_known = isinstance(value, _TYPES[str(type)]) and not isinstance(value, bool)
        if not is_known or (not isinstance(value, str) and not -1 <= value < _MOST):
            raise ValueError(f"a row of {kind.__name__} holds {value!r}")
    return kind(*row)


_TYPES: dict[Any, Any] = {"str": str, "int": int, "float": (int, float)}


_FORMAT = "irc-timeline-1"


@dataclass(frozen=True)
class StepMemory:
    """The memory of a planned step, and of the original's.

    Args:
        planned: The step as it was planned.
        original: The step that computes nothing twice, of the model as it was captured.
    """

    planned: MemoryTimeline
    original: MemoryTimeline

    def to_json(self) -> dict[str, Any]:
        """Both as JSON-ready data."""
        return {"format": _FORMAT, "planned": self.planned.to_json(), "original": self.original.to_json()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StepMemory:
        """Reads what `to_json` gives.

        Raises:
            ValueError: For data of another format, or as `MemoryTimeline.from_json`.
            LookupError: As `MemoryTimeline.from_json`.
            TypeError: The same.
        """
        if data.get("format") != _FORMAT:
            found = printable(repr(data.get("format")))
            raise ValueError(f"its format is {found}, not {_FORMAT}: another version of irc wrote it")
        return StepMemory(*(MemoryTimeline.from_json(data[name]) for name in ("planned", "original")))


# ---------------------------------------------------------------------- from a schedule


def memory_timeline(
    schedule: Schedule,
    workspace_bytes: Mapping[Node, int],
    seconds: Mapping[Node, float] | None = None,
    tiers: Sequence[Tier] = (),
) -> MemoryTimeline:
    """Returns the memory of a schedule, tensor by tensor.

    Args:
        schedule: A valid schedule.
        workspace_bytes: As in `liveness`.
        seconds: The time of each operation; None if none was timed.
        tiers: Those that the schedule names.
    """
    return _Walk(schedule, workspace_bytes, seconds, tiers).timeline()


class _Walk:
    """Follows a schedule, and notes each stay of each storage."""

    def __init__(
        self,
        schedule: Schedule,
        workspace_bytes: Mapping[Node, int],
        seconds: Mapping[Node, float] | None,
        tiers: Sequence[Tier],
    ) -> None:
        self.schedule, self.graph = schedule, schedule.graph
        self.workspace_bytes, self.has_seconds = workspace_bytes, seconds is not None
        self.during_bytes = liveness(schedule, workspace_bytes).during_bytes
        self.times = step_times(schedule, seconds or dict.fromkeys(self.graph.operations, 1.0), tiers)
        self.kinds = _Kinds(self.graph)
        self.steps: list[TimelineStep] = []
        self.instructions: list[int] = []
        """The instruction of each step."""
        self.residents: list[Resident] = []
        self.open: dict[Storage, tuple[int, int, Kind]] = {}
        """The storages that are there: the step that brought each, the one that made it, and its kind."""
        self.made: dict[Storage, int] = {}
        self.loss: int | None = None

    def timeline(self) -> MemoryTimeline:
        ran: set[Node] = set()
        for index, instruction in enumerate(self.schedule.instructions):
            now = len(self.steps)
            match instruction:
                case Compute(node, retained):
                    again = node in ran or (self.loss is not None and node.region is Region.FORWARD)
                    phase = "recompute" if again else node.region.value
                    self.step(index, node.name, operation_of(node), phase, node)
                    self.compute(node, retained, now, Kind.RECOMPUTED if again else None)
                    ran.add(node)
                case Loss():
                    self.loss = now
                    self.step(index, "loss", "", "loss")
                    for storage in self.graph.tangent_storages:
                        self.open.setdefault(storage, (now, -1, Kind.OTHER))
                case Fetch(storage):
                    self.step(index, storage.name, "", "fetch")
                    self.open.setdefault(
                        storage, (now, self.made.get(storage, -1), self.kinds.fetched(storage))
                    )
                case Wait(storage) if self.times.end_seconds[index] > self.times.start_seconds[index]:
                    self.step(index, storage.name, "", "wait")
                case Free(storage):
                    self.close(storage, now - 1)
                case Offload() | Wait():
                    pass
        for storage in list(self.open):
            self.close(storage, len(self.steps) - 1)
        self.residents += self.kinds.static(len(self.steps) - 1)
        order = {kind: place for place, kind in enumerate(Kind)}
        self.residents.sort(key=lambda r: (r.first, order[Kind(r.kind)], -r.nbytes, r.name))
        plain = MemoryTimeline(tuple(self.steps), tuple(self.residents))
        steps = tuple(
            replace(step, other_bytes=self.during_bytes[index] - nbytes)
            for step, index, nbytes in zip(self.steps, self.instructions, plain.during_bytes, strict=True)
        )
        return replace(plain, steps=steps, copies=self.copies(), has_seconds=self.has_seconds)

    def step(self, index: int, name: str, op: str, phase: str, node: Node | None = None) -> None:
        at = node.at if node is not None and node.at is not None else Location()
        freed = sum(value.storage.nbytes for value in overwritten(node)) if node is not None else 0
        workspace_bytes = self.workspace_bytes.get(node, 0) + freed if node is not None else 0
        start, end = self.times.start_seconds[index], self.times.end_seconds[index]
        source = at.source or (at.onnx_node and f"ONNX node {at.onnx_node}") or ""
        self.steps.append(
            TimelineStep(name, op, phase, start, end, workspace_bytes, 0, at.module or "", source)
        )
        self.instructions.append(index)

    def compute(self, node: Node, retained: frozenset[Storage], now: int, kind: Kind | None) -> None:
        for value in overwritten(node):
            self.close(value.storage, now - 1)
        for storage in self.graph.allocates(node):
            self.made[storage] = now
            if storage in retained and storage not in self.open:
                self.open[storage] = now, now, self.kinds.of(storage) or kind or _REGIONS[node.region]
            else:
                self.add(storage, now, now, now, kind or _REGIONS[node.region])

    def close(self, storage: Storage, last: int) -> None:
        if storage in self.open:
            first, maker, kind = self.open.pop(storage)
            if kind is Kind.FORWARD and self.loss is not None and first < self.loss <= last:
                kind = Kind.SAVED
            self.add(storage, first, last, maker, kind)

    def add(self, storage: Storage, first: int, last: int, maker: int, kind: Kind) -> None:
        if storage.nbytes and first <= last:
            self.residents.append(
                Resident(self.kinds.name(storage), kind, storage.nbytes, first, last, maker)
            )

    def copies(self) -> tuple[TierCopy, ...]:
        return tuple(
            TierCopy(
                self.kinds.name(copy.storage),
                copy.storage.nbytes,
                copy.tier,
                copy.direction.value,
                copy.start_seconds,
                copy.end_seconds,
            )
            for copy in self.times.copies
        )


_REGIONS = {Region.FORWARD: Kind.FORWARD, Region.BACKWARD: Kind.BACKWARD}
_ROLES = {
    InputRole.PARAMETER: Kind.PARAMETERS,
    InputRole.BUFFER: Kind.BUFFERS,
    InputRole.CONSTANT: Kind.CONSTANTS,
    InputRole.INPUT: Kind.INPUTS,
}


class _Kinds:
    """Knows the storages of a graph by what they are for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.entries = {i.value.storage: i for i in reversed(graph.inputs) if i.role is not InputRole.TANGENT}
        self.delivered: dict[Storage, Kind] = {}
        self.names: dict[Storage, str] = {}
        for output in graph.outputs:
            if output.value is not None and output.value.storage in graph.output_storages:
                is_gradient = output.role is OutputRole.GRADIENT
                kind = Kind.GRADIENTS if is_gradient else Kind.OUTPUTS
                self.delivered.setdefault(output.value.storage, kind)
                named = f"gradient of {output.gradient_of[1]}" if is_gradient else f"output {output.target}"
                self.names.setdefault(output.value.storage, named)
        for node in graph.releases:
            parameter, gradient = node.operands
            self.delivered.setdefault(gradient.storage, Kind.GRADIENTS)
            entry = self.entries.get(parameter.storage)
            if entry is not None:
                self.names.setdefault(gradient.storage, f"gradient of {entry.target}")
        for node in graph.nodes:
            for value in node.values:
                self.names.setdefault(value.storage, value.name)
        for storage, entry in self.entries.items():
            self.names[storage] = (
                entry.label if entry.role is not InputRole.INPUT else f"input {entry.target}"
            )

    def of(self, storage: Storage) -> Kind | None:
        """The kind of what the caller gets; None for other storages."""
        return self.delivered.get(storage)

    def fetched(self, storage: Storage) -> Kind:
        """The kind of what comes from a tier."""
        return Kind.PARAMETERS if storage in self.graph.offloaded_of else Kind.FETCHED

    def name(self, storage: Storage) -> str:
        """The name that a person knows, or that of the storage."""
        return self.names.get(storage, storage.name)

    def static(self, last: int) -> Iterator[Resident]:
        """Yields what is there all the time."""
        if last < 0:
            return
        for storage, entry in self.entries.items():
            if storage in self.graph.static_storages and storage.nbytes:
                yield Resident(self.name(storage), _ROLES[entry.role], storage.nbytes, 0, last)
        offloaded = (each.storage.nbytes for each in self.graph.offloaded_parameters if each.is_state)
        reserved_bytes = self.graph.reserved_bytes - sum(offloaded)
        if reserved_bytes > 0 and self.graph.gradients is Gradients.APPLIED:
            yield Resident("optimizer state", Kind.OPTIMIZER, reserved_bytes, 0, last)
        elif reserved_bytes > 0:
            yield Resident("gradients that are there already", Kind.GRADIENTS, reserved_bytes, 0, last)
