"""The pass that finds out what operations cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ir import Graph
from ..program import Program
from .machines import machine_named
from .table import Costs, analytic_costs

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
    """

    name: ClassVar[str] = "cost"

    profile: str = "device"
    repeats: int = 5
    cache: bool = True
    most_bytes: int | None = field(default=None, metadata={"in_text": False})

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
        tables = [self._costs(graph) for graph in graphs]
        return replace(
            program,
            costs=Costs(
                {node: seconds for table in tables for node, seconds in table.seconds.items()},
                {node: nbytes for table in tables for node, nbytes in table.workspace_bytes.items()},
                tables[0].source,
            ),
        )

    def _costs(self, graph: Graph) -> Costs:
        if self.profile != "device":
            return analytic_costs(graph, machine_named(self.profile))
        if any(storage.device == "meta" for storage in graph.storages):  # nothing runs there
            return analytic_costs(graph, machine_named("cpu"))
        from .profiling import ProfileStore, profile_costs

        store = ProfileStore.default() if self.cache else None
        return profile_costs(graph, store=store, repeats=self.repeats, most_bytes=self.most_bytes)
