"""Checks the gradients that a graph releases within backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Gradients, Graph, InputRole, Node, OutputRole, Region, Trait
from ..types import Storage, TensorType, Value
from .faults import describe, fail

__all__ = ["check_released"]


def check_released(graph: Graph) -> None:
    """Checks that the gradients that a graph releases are those of its parameters, each once and in time."""
    _ReleaseCheck(graph).run()


class _ReleaseCheck:
    """Follows the nodes of a graph, with the gradients that were released so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        trained = (i for i in graph.inputs if i.role is InputRole.PARAMETER and i.requires_grad)
        self.targets: dict[Value, str] = {}
        self.tied: dict[Value, list[str]] = {}
        """All names of each trained parameter."""
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
        """Storages that the caller holds, and those of gradients that were released."""
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
                self.reads((output.value,), describe(output), None)
        if self.taken_bytes != self.graph.reserved_bytes:
            message = f"{self.graph.reserved_bytes} B are reserved, and what is released takes"
            fail("IRC133", f"{message} {self.taken_bytes} B")

    def reads(self, values: Sequence[Value], reader: str, node: Node | None) -> None:
        for value in values:
            if value.storage in self.applied:
                by = self.applied[value.storage].name
                fail("IRC134", f"{reader} reads {value}, which {by} has updated before", node)

    def release(self, node: Node, kind: Gradients) -> None:
        parameter, gradient = self.operands(node)
        self.kinds.add(kind)
        if len(self.kinds) > 1:
            fail("IRC133", f"{node.name} releases its gradient in another way than the nodes before it", node)
        for name in self.tied[parameter]:
            if name in self.released:
                fail("IRC133", f"{node.name} releases the gradient of {parameter} again", node)
            if f"parameter:{name}" not in self.undelivered:
                fail("IRC133", f"{node.name} releases the gradient of {parameter}, which is delivered", node)
        self.released.update(self.tied[parameter])
        if gradient.storage in self.held:
            fail("IRC133", f"{node.name} releases {gradient}, whose storage somebody else holds", node)
        self.held.add(gradient.storage)
        if kind is Gradients.ACCUMULATED:
            self.taken_bytes += gradient.storage.nbytes
        else:
            self.taken_bytes += self.measured(node)
            self.applied[parameter.storage] = node

    def operands(self, node: Node) -> tuple[Value, Value]:
        """Returns the parameter and its gradient, after checking both."""
        if node.region is not Region.BACKWARD or Trait.EFFECT not in node.traits or node.results:
            fail("IRC133", f"{node.name} is not an effect of backward without results", node)
        match node.arguments:
            case (Value() as parameter, Value() as gradient) if parameter in self.targets:
                pass
            case _:
                message = f"{node.name} does not take a parameter that requires a gradient, and its gradient"
                fail("IRC133", message, node)
        mine, its = gradient.type, parameter.type
        if (mine.shape, mine.dtype) != (its.shape, its.dtype):
            fail("IRC133", f"{node.name} takes {gradient} as the gradient of {parameter}", node)
        return parameter, gradient

    def measured(self, node: Node) -> int:
        """Returns the bytes of state that an optimizer's step keeps."""
        keywords = dict(node.keywords)
        for key in ("state_bytes", "workspace_bytes", "seconds"):
            number = keywords.get(key)
            if not isinstance(number, int | float if key == "seconds" else int) or not number >= 0:
                fail("IRC133", f"{node.name} has {key}={number!r}", node)
        state_bytes = keywords["state_bytes"]
        assert isinstance(state_bytes, int)
        return state_bytes
