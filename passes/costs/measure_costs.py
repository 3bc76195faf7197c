"""The pass that finds out what operations cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...ir import Graph
from ..program import Program
from .machines import machine_named
from .table import Costs, analytic_costs

if TYPE_CHECKING:
    from .profiling import Level, Measured

__all__ = ["Cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Fills in the costs of a program.

    Args:
        profile: `device` measures each distinct operation on the device that its tensors live on (on the
            device `meta`, where nothing runs, it is `cpu`);
            the name of a described machine (`cpu`, `a100`, `gtx1080`), or the path of a machine's file,
            computes costs from its roofline.
        repeats: Timed runs of an operation, if they are measured.
        cache: Whether measurements are kept on disk and taken from there.
        most_bytes: The operands and results of the largest operation that may run to be measured; the costs
            of larger ones are those of the machine `cpu`. None lets all run.
        times: Whether operations are timed too, and not only their workspaces measured.
    """

    name: ClassVar[str] = "cost"

    profile: str = "device"
    repeats: int = 5
    cache: bool = True
    most_bytes: int | None = field(default=None, metadata={"in_text": False})
    times: bool = field(default=True, metadata={"in_text": False})

    def check(self) -> None:
        """Refuses what names no machine.

        Raises:
            UsageError: IRC410; IRC414 to IRC418 for a file.
        """
        if self.profile != "device":
            machine_named(self.profile)

    def run(self, program: Program, /) -> Program:
        """The program with the costs of its graph, and of the graph as it was captured."""
        graphs = [program.graph, *([program.original] if program.original is not None else [])]
        return replace(program, costs=self._costs(graphs, program.measured))

    @property
    def measure(self) -> Callable[[Iterable[Callable[[], Any]], str, int], list[Level] | None] | None:
        """Measures the levels of a device's allocator in runs; None if the costs are those of a machine.

        It is given the runs, the device, and the bytes that the largest run touches, and returns None if
        there is no room for it.
        """
        return self._levels if self.profile == "device" else None

    def _levels(self, runs: Iterable[Callable[[], Any]], device: str, nbytes: int) -> list[Level] | None:
        import torch

        from .profiling import allocation_levels

        if self.most_bytes is not None and nbytes > self.most_bytes:
            return None
        try:
            return allocation_levels(runs, device)
        except torch.OutOfMemoryError:
            return None

    def _costs(self, graphs: Sequence[Graph], measured: Mapping[str, Measured]) -> Costs:
        if self.profile != "device":
            return Costs.united([analytic_costs(graph, machine_named(self.profile)) for graph in graphs])
        if any(storage.device == "meta" for graph in graphs for storage in graph.storages):
            on_cpu = machine_named("cpu")  # nothing runs there
            return Costs.united([analytic_costs(graph, on_cpu) for graph in graphs])
        from .profiling import ProfileStore, profile_costs

        return profile_costs(
            *graphs,
            store=ProfileStore.default() if self.cache else None,
            measured=measured,
            repeats=self.repeats,
            most_bytes=self.most_bytes,
            with_times=self.times,
        )
