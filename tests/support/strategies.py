"""Random training graphs for property tests: small, but with every shape of reuse that real ones have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from irc.ir import (
    Annotation,
    DType,
    Graph,
    Input,
    InputRole,
    Node,
    Output,
    OutputRole,
    Policy,
    Region,
    Storage,
    TensorType,
    Trait,
    Value,
)

__all__ = ["Sample", "graphs", "with_annotations"]

# Elements of a value: mostly small and distinct, so that sums of them tell which storages are alive.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 0, 1000)
_DTYPES = (DType.FLOAT8_E5M2, DType.FLOAT8_E5M2, DType.FLOAT16, DType.FLOAT32)
_FORWARD_OPS = ("op",) * 6 + ("add", "add", "pair", "pair", "view", "view", "mask")
_WORKSPACES = (0, 0, 0, 1, 4, 10, 100)


@dataclass(frozen=True)
class Sample:
    """A training graph with what each of its operations costs.

    Args:
        graph: Accepted by `verify_graph`; keep-all order is the order of its nodes.
        seconds: Positive, for every operation.
        workspace_bytes: For every operation; often zero.
    """

    graph: Graph
    seconds: Mapping[Node, float]
    workspace_bytes: Mapping[Node, int]

    def __repr__(self) -> str:
        costs = (f"{n.name}: {self.seconds[n]} s, {self.workspace_bytes[n]} B" for n in self.graph.operations)
        return f"{self.graph}{'; '.join(costs)}"


@st.composite
def graphs(
    draw: st.DrawFn,
    max_forward: int = 9,
    *,
    max_elements: int = 1000,
    zero_sizes: bool = True,
    effects: bool = True,
    pinned: bool = True,
) -> Sample:
    """Random training graphs with costs.

    Args:
        draw: Given by hypothesis.
        max_forward: The most forward nodes before an effect is added; dead ones are dropped.
        max_elements: The most elements in one value.
        zero_sizes: Whether values without elements are drawn.
        effects: Whether a buffer may be overwritten at the end of forward.
        pinned: Whether random nodes are drawn, and pinned ones beyond the readers of an overwritten buffer.
    """
    sizes = tuple(n for n in _SIZES if n <= max_elements and (n or zero_sizes))
    builder = _Builder(draw, sizes, pinned)
    builder.draw_inputs(effects)
    for _ in range(draw(st.integers(1, max_forward))):
        builder.draw_forward()
    builder.draw_outputs()
    builder.drop_dead()
    if effects:
        builder.draw_effect()
    builder.draw_backward()
    loss_bytes = draw(st.sampled_from((0, 0, 3, 50)))
    graph = Graph(tuple(builder.inputs), tuple(builder.nodes), tuple(builder.outputs), loss_bytes)
    count = len(graph.operations)
    seconds = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    workspaces = draw(st.lists(st.sampled_from(_WORKSPACES), min_size=count, max_size=count))
    return Sample(
        graph,
        {node: float(cost) for node, cost in zip(graph.operations, seconds, strict=True)},
        dict(zip(graph.operations, workspaces, strict=True)),
    )


@st.composite
def with_annotations(draw: st.DrawFn, samples: st.SearchStrategy[Sample]) -> Sample:
    """The samples, with annotations for about half of their forward operations.

    Args:
        draw: Given by hypothesis.
        samples: Without annotations.
    """
    sample = draw(samples)
    annotations = tuple(Annotation(policy, f"irc.{policy.value}(a)") for policy in Policy)
    weighed = (None, None, None, annotations[0], annotations[1], annotations[1], *annotations[2:])
    made = {
        node: replace(node, annotation=draw(st.sampled_from(weighed)))
        if node.region is Region.FORWARD and not node.is_view
        else node
        for node in sample.graph.nodes
    }
    return Sample(
        replace(sample.graph, nodes=tuple(made.values()), annotations=annotations),
        {made[node]: seconds for node, seconds in sample.seconds.items()},
        {made[node]: nbytes for node, nbytes in sample.workspace_bytes.items()},
    )


@dataclass
class _Builder:
    """A training graph in the making: forward first, then its backward in reverse."""

    draw: st.DrawFn
    sizes: tuple[int, ...]
    pinned: bool
    inputs: list[Input] = field(default_factory=list[Input])
    nodes: list[Node] = field(default_factory=list[Node])
    outputs: list[Output] = field(default_factory=list[Output])
    available: list[Value] = field(default_factory=list[Value])
    unread: list[Value] = field(default_factory=list[Value])
    differentiable: set[Value] = field(default_factory=set[Value])
    """Values through which a gradient reaches an input that asks for one."""
    overwritten: Storage | None = None
    """The buffer that an effect overwrites at the end of forward."""
    gradients: dict[Value, list[Value]] = field(default_factory=dict[Value, list[Value]])
    counter: int = 0

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def fresh(self, prefix: str) -> str:
        self.counter += 1
        return f"{prefix}{self.counter}"

    def value(self, prefix: str, like: Value | None = None) -> Value:
        """A value in a storage of its own, of a size drawn or like another's."""
        name = self.fresh(prefix)
        if like is not None:
            kind = like.type
        else:
            size, dtype = self.draw(st.sampled_from(self.sizes)), self.draw(st.sampled_from(_DTYPES))
            kind = TensorType.contiguous((size,), dtype)
        return Value(name, kind, Storage(f"s_{name}", kind.nbytes))

    def add(
        self,
        op: str,
        operands: list[Value],
        results: list[Value | None],
        region: Region,
        *traits: Trait,
    ) -> Node:
        is_sequence = len(results) > 1
        name = self.fresh(op)
        node = Node(
            name,
            f"test.{op}",
            tuple(operands),
            tuple(results),
            is_sequence=is_sequence,
            region=region,
            traits=frozenset(traits),
        )
        self.nodes.append(node)
        return node

    # Forward.

    def draw_inputs(self, effects: bool) -> None:
        roles = [InputRole.INPUT, InputRole.PARAMETER]
        roles += [InputRole.PARAMETER] * self.draw(st.integers(0, 2))
        if effects and self.chance(3):
            roles.append(InputRole.BUFFER)
        for index, role in enumerate(roles):
            value = self.value("in")
            asks = role is InputRole.PARAMETER or (role is InputRole.INPUT and self.chance(4))
            self.inputs.append(Input(value, role, f"{role.value}{index}", asks))
            self.available.append(value)
            if role is InputRole.BUFFER:
                self.overwritten = value.storage
            elif role is InputRole.PARAMETER:
                self.unread.append(value)
            if asks:
                self.differentiable.add(value)

    def operand(self) -> Value:
        """Most often the newest value or one that nothing has read yet; else any, which makes a skip."""
        if self.unread and not self.chance(3):
            found = self.unread[self.draw(st.sampled_from((-1, -1, 0)))]
        else:
            found = self.draw(st.sampled_from(self.available))
        if found in self.unread:
            self.unread.remove(found)
        return found

    def draw_forward(self) -> None:
        op = self.draw(st.sampled_from(_FORWARD_OPS))
        operands = [
            self.operand() for _ in range(1 if op in ("view", "mask") else self.draw(st.integers(1, 2)))
        ]
        if op == "add":
            operands = [*operands, self.operand()][:2]
        if op == "view":
            base = operands[0]
            results: list[Value | None] = [self.view_of(base, self.chance(3))]
        else:
            results = [self.value("v")]
            if op == "pair":
                results.append(None if self.chance(5) else self.value("v"))
        node = self.add(op, operands, results, Region.FORWARD, *self.traits(op, operands))
        self.available.extend(node.values)
        self.unread.extend(node.values)
        if op != "mask" and any(value in self.differentiable for value in operands):
            self.differentiable.update(node.values)

    def view_of(self, base: Value, part: bool) -> Value:
        shape = (base.type.numel // 2,) if part else (1, base.type.numel)
        kind = TensorType.contiguous(shape, base.type.dtype)
        return Value(self.fresh("w"), kind, base.storage)

    def traits(self, op: str, operands: list[Value]) -> list[Trait]:
        if op == "view":
            return [Trait.VIEW]
        reads_overwritten = any(value.storage is self.overwritten for value in operands)
        if op == "mask" and self.pinned:
            return [Trait.RANDOM]
        # Batch norm reads its running statistics without using them: it need not be pinned.
        if (reads_overwritten and not self.chance(4)) or (self.pinned and self.chance(16)):
            return [Trait.PINNED]
        return []

    def draw_outputs(self) -> None:
        """The newest value that a gradient flows into, and now and then a second one, with their tangents."""
        written = [value for node in self.nodes for value in node.values]
        candidates = [value for value in written if value in self.differentiable]
        if not candidates:
            operands = [written[-1], next(i.value for i in self.inputs if i.requires_grad)]
            candidates = [self.value("v")]
            self.add("op", operands, [candidates[0]], Region.FORWARD, *self.traits("op", operands))
            self.differentiable.add(candidates[0])
        chosen = candidates[-1:]
        if self.chance(3):
            chosen.append(self.draw(st.sampled_from(candidates)))
        for index, value in enumerate(dict.fromkeys(chosen)):
            self.outputs.append(Output(value, OutputRole.OUTPUT, str(index)))

    def drop_dead(self) -> None:
        needed = {output.value for output in self.outputs}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if Trait.RANDOM in node.traits or not needed.isdisjoint(node.values):
                kept.append(node)
                needed.update(node.operands)
        self.nodes = kept[::-1]

    def draw_effect(self) -> None:
        buffer = next((i.value for i in self.inputs if i.role is InputRole.BUFFER), None)
        if buffer is None:
            return
        computed = [value for node in self.nodes for value in node.values]
        source = self.draw(st.sampled_from(computed))
        written = Value(self.fresh("new"), buffer.type, buffer.storage)
        results: list[Value | None] = [written] if self.chance(2) else []
        self.add("write", [buffer, source], results, Region.FORWARD, Trait.EFFECT)

    # Backward.

    def draw_backward(self) -> None:
        for output in self.outputs[:]:
            assert output.value is not None
            tangent = self.value("t", like=output.value)
            self.inputs.append(Input(tangent, InputRole.TANGENT, output.target))
            self.gradients.setdefault(output.value, []).append(tangent)
        for node in reversed([n for n in self.nodes if Trait.EFFECT not in n.traits]):
            self.differentiate(node)
        for entry in self.inputs:
            if entry.requires_grad:
                gradient = self.total(entry.value)
                self.outputs.append(
                    Output(gradient, OutputRole.GRADIENT, f"{entry.role.value}:{entry.target}")
                )

    def total(self, value: Value) -> Value | None:
        """The gradient of `value`: the sum of what its readers contribute."""
        parts = self.gradients.pop(value, [])
        while len(parts) > 1:
            left, right, *rest = parts
            result = self.value("g", like=left)
            self.add("sum", [left, right], [result], Region.BACKWARD)
            parts = [result, *rest]
        return parts[0] if parts else None

    def differentiate(self, node: Node) -> None:
        incoming = [gradient for value in node.values if (gradient := self.total(value)) is not None]
        wanted = [value for value in node.operands if value in self.differentiable]
        if not incoming or not wanted:
            return
        if node.is_view and self.chance(2):
            self.gradient_view(node, incoming[0], wanted[0])
        elif node.op == "test.add" and self.chance(2):
            for value in wanted:
                if value.type == incoming[0].type:
                    self.gradients.setdefault(value, []).append(incoming[0])
                else:
                    self.gradient_nodes([*incoming], [value])
        else:
            self.gradient_nodes([*incoming, *self.saved(node)], wanted)

    def gradient_view(self, node: Node, incoming: Value, wanted: Value) -> None:
        """A gradient through a view: itself a view where nothing was cut away, else a new value."""
        if wanted.type.numel != incoming.type.numel:
            return self.gradient_nodes([incoming], [wanted])
        result = Value(self.fresh("g"), wanted.type, incoming.storage)
        self.add("view", [incoming], [result], Region.BACKWARD, Trait.VIEW)
        self.gradients.setdefault(wanted, []).append(result)

    def saved(self, node: Node) -> list[Value]:
        """A random part of what forward read and wrote, the overwritten buffer excepted."""
        candidates = [v for v in (*node.operands, *node.values) if v.storage is not self.overwritten]
        return [value for value in dict.fromkeys(candidates) if self.chance(2)]

    def gradient_nodes(self, operands: list[Value], wanted: list[Value]) -> None:
        """One backward node for all gradients, or one for each."""
        together = len(wanted) == 1 or self.chance(2)
        for group in [wanted] if together else [[value] for value in wanted]:
            results = [self.value("g", like=value) for value in group]
            self.add("grad", operands, list(results), Region.BACKWARD)
            for value, result in zip(group, results, strict=True):
                self.gradients.setdefault(value, []).append(result)
