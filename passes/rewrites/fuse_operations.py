"""The pass that makes one operation of each run of operations that one kernel computes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import ClassVar

import networkx as nx

from ...ir import (
    Graph,
    Kernel,
    UsageError,
)
from ...torch_support.kernels import compile_kernels
from ..costs.measure_costs import Cost
from ..costs.table import Costs
from ..program import Program
from ..progress import Progress, report
from .decompose import with_parts
from .fused_graph import Covered, Fusion
from .fusion_groups import FusionGroups
from .overwrite import with_overwrites
from .real_layouts import misread

__all__ = ["FuseOperations"]


_LOG = logging.getLogger("irc")

_NOISE = 1.02
"""A kernel that is measured to take up to this much of the time of its operations is taken as fast."""


@dataclass(frozen=True, slots=True)
class FuseOperations:
    """Fuses runs of operations that go element by element, reduce or move data: each is one node then.

    A fused node is compiled as one kernel, and planned as one operation. What only its own operations read is
    never in memory: it is no storage of the graph any more. Kernels of backward make cheap values of forward
    again within, if that leaves fewer bytes for forward to keep.

    Args:
        measure: Whether kernels are compiled and run here, operations left whole that are faster so, and the
            plan compared with the step by whole operations.
        overwrite: Whether kernels of backward may write results over operands that nothing needs any more.
        time_limit: Seconds of the clock after which no other kernel is compiled; their operations stay as
            they are.
        cost: Finds the times of kernels and operations. Not part of the text form.
    """

    name: ClassVar[str] = "fuse-operations"

    measure: bool = True
    overwrite: bool = True
    time_limit: float = 300.0
    cost: Cost = field(default=Cost(), metadata={"in_text": False})

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph; returns the same program if nothing in it is worth a kernel.

        Raises:
            UnsupportedError: IRC470 if Inductor does not compile a kernel.
            UsageError: IRC413 after a pass that looked at the operations.
        """
        if program.costs is not None or program.schedule is not None:
            raise UsageError(
                "IRC413",
                f"{self.name} comes after the operations' costs were found",
                help="put it before them: fuse-operations,cost{...},plan-memory{...}",
            )
        misfits = misread(program.graph)
        graph, covered = self._fused(program.graph, misfits)
        kernels = program.kernels
        if self.measure and covered:
            uncompiled = self._without_kernel(graph, covered)
            whole = misfits | uncompiled
            if uncompiled:
                graph, covered = self._fused(program.graph, whole)
            costs = self._costs(program, graph)
            kernels = kernels or replace(program, costs=costs)
            faster = _faster_whole(program.graph, graph, covered, costs)
            if faster:
                graph, covered = self._fused(program.graph, whole | faster)
        if not covered:
            return program
        return replace(program, graph=graph, original=None, eager=None, kernels=kernels)

    def _fused(self, graph: Graph, whole: AbstractSet[str]) -> tuple[Graph, Mapping[str, Covered]]:
        """The graph with its fused nodes, and the operations that each of them runs, by its name.

        Args:
            graph: The graph.
            whole: Operations, by name, that are left as they are.
        """
        in_parts, wholes = with_parts(graph, FusionGroups(graph, whole).is_fusible)
        fused, covered = Fusion(FusionGroups(in_parts, whole), wholes).graph()
        return with_overwrites(fused) if self.overwrite else fused, covered

    def _without_kernel(self, graph: Graph, covered: Mapping[str, Covered]) -> frozenset[str]:
        """The operations, by name, whose kernels do not compile, or not in time.

        Kernels that move most bytes in a step, all in all, are compiled first.
        """
        kernels = {node.name: Kernel.of(node) for node in graph.operations if node.name in covered}
        moved_bytes: Counter[Kernel] = Counter()
        for node in graph.operations:
            if node.name in kernels:
                moved = {*graph.reads(node), *graph.allocates(node)}
                moved_bytes[kernels[node.name]] += sum(storage.nbytes for storage in moved)
        order = sorted(moved_bytes, key=lambda kernel: -moved_bytes[kernel])
        found = compile_kernels(
            order, self.time_limit, lambda *kernel: report(Progress("compile", kernel=kernel))
        )
        errors = [error for error in found.values() if error is not None]
        if errors and len(errors) == len(found):
            raise errors[0]
        for error in errors:
            _LOG.warning("operations run by themselves: %s", error.message)
        if len(found) < len(order):
            _LOG.info("%d of %d kernels were compiled in time", len(found), len(order))
        there = {kernel for kernel, error in found.items() if error is None}
        names = (covered[name].own for name, kernel in kernels.items() if kernel not in there)
        return frozenset[str]().union(*names)

    def _costs(self, program: Program, fused: Graph) -> Costs:
        """The costs of a program's operations as they are, as they were captured, and fused."""
        graphs = [program.original, program.graph, fused]
        tables = [
            self.cost.run(replace(program, graph=graph, original=None)).costs for graph in graphs if graph
        ]
        return Costs.united([table for table in tables if table is not None])


def _faster_whole(graph: Graph, fused: Graph, covered: Mapping[str, Covered], costs: Costs) -> frozenset[str]:
    """The operations, by name, that take less time by themselves than in kernels.

    Operations and kernels between which an operation is divided are compared as a whole. A kernel that makes
    something again is compared with what making it again takes.
    """
    kernel_seconds = {node.name: costs.seconds[node] for node in fused.operations if node.name in covered}
    seconds = {node.name: costs.seconds[node] for node in graph.operations}
    links = nx.Graph()
    for kernel, runs in covered.items():
        links.add_edges_from((("kernel", kernel), ("operation", name)) for name in runs.own)
    found: set[str] = set()
    for parts in nx.connected_components(links):
        names = {name for kind, name in parts if kind == "operation"}
        kernels = [name for kind, name in parts if kind == "kernel"]
        again = sum(seconds[name] for kernel in kernels for name in covered[kernel].again)
        if sum(map(kernel_seconds.__getitem__, kernels)) > _NOISE * (
            again + sum(map(seconds.__getitem__, names))
        ):
            found |= names
    return frozenset(found)
