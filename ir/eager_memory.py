"""The memory of a step of the model as its user wrote it: what budgets in percent are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .graph import Graph, Node

__all__ = ["EagerMemory", "OperandKind", "OperationKind"]

OperandKind = tuple[tuple[int, ...], str, tuple[int, ...]]
"""The shape, element type and strides of a tensor."""

OperationKind = tuple[str, tuple[OperandKind, ...]]
"""The name of an operation, with the different tensors that it reads."""


@dataclass(frozen=True)
class EagerMemory:
    """Bytes alive while autograd runs a model as it is written, with its own checkpoints, if it has any.

    Workspaces are not known while a model is captured. Bytes are those of each kind of operation, and its
    workspace is added later.

    Args:
        static_bytes: Parameters, buffers, inputs and constants.
        loss_bytes: The most that is alive at a loss that is not known, beside the static bytes.
        alive_bytes: For each kind of operation, the most that is alive while one runs, with its results and
            without its workspace, beside the static bytes. The caller holds all outputs.
        alive_without_unused_bytes: The same of a caller who drops the outputs that the loss does not use
            before backward.
    """

    static_bytes: int
    loss_bytes: int
    alive_bytes: Mapping[OperationKind, int]
    alive_without_unused_bytes: Mapping[OperationKind, int]

    def peak_bytes(
        self, graph: Graph, workspace_bytes: Mapping[Node, int], *, without_unused: bool = False
    ) -> int:
        """The peak of the step in bytes.

        Args:
            graph: The step as it was captured, whose operations tell the workspaces.
            workspace_bytes: The workspace of each operation.
            without_unused: Whether the caller drops the outputs that the loss does not use before backward.
        """
        workspaces: dict[OperationKind, int] = {}
        for node in graph.operations:
            kind = (
                node.op,
                tuple((t.shape, t.dtype.value, t.strides) for t in (v.type for v in node.operands)),
            )
            workspaces[kind] = max(workspaces.get(kind, 0), workspace_bytes.get(node, 0))
        alive = self.alive_without_unused_bytes if without_unused else self.alive_bytes
        most = max((nbytes + workspaces.get(kind, 0) for kind, nbytes in alive.items()), default=0)
        return self.static_bytes + max(most, self.loss_bytes)
