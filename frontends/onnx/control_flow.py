"""Branches, loops and scans: taken or unrolled if constants decide, else left to each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from ...ir.errors import IrcError, Location, UnsupportedError
from .blocks import Branch, Loop, Map, Scan, Scanned
from .coverage import check_covered, refusal, title, version_of
from .graphs import inputs_behind, node_name, wanted
from .lowerings.attention import flex_mix, flex_scores
from .lowerings.table import settle
from .partial_evaluation import PartialValue, Tracer
from .program import Operand
from .tensors import Static, torch_dtype

__all__ = ["ControlFlow"]

_MOST_UNROLLED = 100_000
"""Nodes that the unrolled loops of a model may have in all."""


@dataclass
class ControlFlow:
    """Imports the nodes that carry graphs.

    Args:
        tracer: Holds what is known so far, and the steps.
        run_nodes: Imports the nodes of a graph.
    """

    tracer: Tracer
    run_nodes: Callable[[ir.Graph], None]
    unrolled: int = 0

    @property
    def _model(self) -> ir.Model:
        return self.tracer.model

    def _body(self, node: ir.Node, name: str) -> ir.Graph:
        graph = node.attributes[name].as_graph()
        check_covered(self._model, graph)
        return graph

    # If

    def branch(self, node: ir.Node) -> None:
        """Run the branch that a constant condition takes; else keep both."""
        assert node.inputs[0] is not None
        condition = self.tracer.known(node.inputs[0])
        if condition.constant:
            assert condition.tensor is not None
            name = "then_branch" if bool(condition.tensor.item()) else "else_branch"
            taken = self._body(node, name)
            self.run_nodes(taken)
            for outer, inner in zip(node.outputs, taken.outputs, strict=True):
                self.tracer.alias(outer, inner)
            return
        operand = self.tracer.operand(node.inputs[0])
        inputs = self._deciding_inputs(node.inputs[0])
        try:
            then, otherwise = (self._body(node, name) for name in ("then_branch", "else_branch"))
            first = self.tracer.block([], lambda: self._outputs(then))
            second = self.tracer.block([], lambda: self._outputs(otherwise))
        except IrcError as error:
            if not inputs or error.help == settle(inputs):  # a branch in this one has said so
                raise
            inner = f" ({error.at})" if error.at is not None else ""
            raise UnsupportedError(
                "IRC302",
                f"{title(self._model, node)} on the condition {node.inputs[0].name!r}, which depends on"
                f" the input {' and '.join(map(repr, inputs))}, keeps both branches, and one is refused:"
                f" {error.code}{inner}: {error.message}",
                at=Location(onnx_node=node_name(node)),
                help=settle(inputs),
            ) from error
        types = [self._common(a, b) for a, b in zip(then.outputs, otherwise.outputs, strict=True)]
        results = self.tracer.new_results(node.outputs, wanted(node), types)
        self.tracer.steps.append(
            Branch(
                node_name(node), title(self._model, node), operand, first, second, results, decided_by=inputs
            )
        )

    def _deciding_inputs(self, value: ir.Value) -> tuple[str, ...]:
        """The names of the inputs of the model whose elements decide a value."""
        reached = inputs_behind(value)
        inputs = (v for v in self._model.graph.inputs if v in reached and not self.tracer.known(v).constant)
        return tuple(v.name or "" for v in inputs)

    def _outputs(self, graph: ir.Graph) -> Sequence[ir.Value]:
        self.run_nodes(graph)
        return graph.outputs

    def _common(self, a: ir.Value, b: ir.Value) -> torch.Tensor | None:
        """A fake of the type that two values share."""
        if self.tracer.list_of(a) is not None or self.tracer.list_of(b) is not None:
            return None
        one, other = self.tracer.known(a).tensor, self.tracer.known(b).tensor
        if one is None or other is None or one.shape != other.shape or one.dtype is not other.dtype:
            return None
        return self.tracer.fake_empty(one.shape, one.dtype)

    # Loop

    def loop(self, node: ir.Node) -> None:
        """Unroll a loop whose end constants decide; else keep its body."""
        inputs = [*node.inputs, None, None][: max(len(node.inputs), 2)]
        count, condition, *carried = [v if v is not None and v.name else None for v in inputs]
        loop = _LoopNode(node, self._body(node, "body"), count, condition, carried)
        with self.tracer.undone() as undo:
            if self._unroll(loop):
                return
            undo()
        self._keep_loop(loop)

    def _constant(self, value: ir.Value | None, absent: int) -> int | None:
        """The number that a value is, or `None` when only a run tells."""
        if value is None:
            return absent
        known = self.tracer.known(value)
        if not known.constant or known.tensor is None:
            return None
        return int(known.tensor.item())

    def _unroll(self, loop: _LoopNode) -> bool:
        node, body, carried = loop.node, loop.body, loop.carried
        most, goes_on = self._constant(loop.count, -1), self._constant(loop.condition, 1)
        if most is None or goes_on is None:
            return False
        if loop.count is not None:
            most = max(most, 0)
        if goes_on and _never_ends(body):
            self._count(node, body, math.inf if most < 0 else most)
        now, stacks = list(carried), [list[ir.Value]() for _ in body.outputs[1 + len(carried) :]]
        iteration = 0
        while goes_on and (most < 0 or iteration < most):
            self._count(node, body)
            self.tracer.bind(body.inputs[0], PartialValue(torch.tensor(iteration)))
            self.tracer.bind(body.inputs[1], PartialValue(torch.tensor(True)))
            for inner, outer in zip(body.inputs[2:], now, strict=True):
                self._enter(inner, outer)
            self.run_nodes(body)
            goes_on = self._constant(body.outputs[0], 1)
            if goes_on is None:
                return False
            outputs = [self.tracer.bound_at_import(value) for value in body.outputs[1:]]
            now = list[ir.Value | None](outputs[: len(carried)])
            for stack, value in zip(stacks, outputs[len(carried) :], strict=True):
                stack.append(value)
            iteration += 1
        for outer, value in zip(node.outputs, now, strict=False):
            self._enter(outer, value)
        for outer, stack, inner in zip(
            node.outputs[len(carried) :], stacks, body.outputs[1 + len(carried) :], strict=False
        ):
            self._stack(node, outer, stack, inner)
        return True

    def _count(self, node: ir.Node, body: ir.Graph, times: float | None = None) -> None:
        """Count one more iteration, or look ahead at as many as `times`."""
        nodes = self.unrolled + (len(body) + 1) * (1 if times is None else times)
        if times is None:
            self.unrolled += len(body) + 1
        if nodes > _MOST_UNROLLED:
            raise refusal(
                self._model,
                node,
                f"that unrolls to more than {_MOST_UNROLLED:,} nodes",
                "export the model with fewer iterations",
            )

    def _enter(self, inner: ir.Value, outer: ir.Value | None) -> None:
        if outer is None:
            self.tracer.bind(inner, PartialValue(None, Operand("absent")))
        else:
            self.tracer.alias(inner, outer)

    def _stack(
        self, node: ir.Node, outer: ir.Value, stack: Sequence[ir.Value], inner: ir.Value, axis: int = 0
    ) -> None:
        if stack:
            name = outer.name or node_name(node)
            self.tracer.alias(
                outer, self.tracer.apply(name, "ConcatFromSequence", stack, axis=axis, new_axis=1)
            )
            return
        empty = _empty(inner)
        if empty is None:
            raise refusal(
                self._model, node, "of no iteration, without the shape of its results,", "export with shapes"
            )
        self.tracer.bind(outer, PartialValue(torch.from_numpy(empty.array).to(empty.dtype).movedim(0, axis)))

    def _keep_loop(self, loop: _LoopNode) -> None:
        tracer, node, body = self.tracer, loop.node, loop.body
        operands = [tracer.tensor_operand(v) for v in (loop.count, loop.condition, *loop.carried)]
        number = tracer.new_slot(tracer.fake_empty((), torch.int64))
        again = tracer.new_slot(tracer.fake_empty((), torch.bool))
        inputs = [(value, tracer.new_slot(None)) for value in body.inputs[2:]]
        block = tracer.block(
            [(body.inputs[0], number), (body.inputs[1], again), *inputs], lambda: self._outputs(body)
        )
        empty = tuple(_empty(value) for value in body.outputs[1 + len(loop.carried) :])
        results = tracer.new_results(node.outputs, wanted(node))
        tracer.steps.append(
            Loop(
                node_name(node),
                title(self._model, node),
                operands[0],
                operands[1],
                tuple(operands[2:]),
                block,
                empty,
                results,
            )
        )

    # Scan

    def scan(self, node: ir.Node) -> None:
        """Unroll a scan whose length the shapes of its inputs give; else keep its body."""
        body = self._body(node, "body")
        inputs = [v for v in node.inputs if v is not None and v.name]
        if version_of(self._model, "") < 9:
            self._scan_batches(node, body, inputs)
            return
        scanned = node.attributes["num_scan_inputs"].as_int()
        states, sequences = inputs[: len(inputs) - scanned], inputs[len(inputs) - scanned :]
        reads_as = _scanned(node, "scan_input", scanned)
        stacks_as = _scanned(node, "scan_output", len(body.outputs) - len(states))
        scan = _ScanNode(node, body, states, sequences, reads_as, stacks_as)
        if any(self.tracer.known(value).tensor is None for value in sequences):
            self._keep_scan(scan)
            return
        for outer, value in zip(node.outputs, self._scan(scan), strict=False):
            self.tracer.alias(outer, value)

    def _scan_batches(self, node: ir.Node, body: ir.Graph, inputs: Sequence[ir.Value]) -> None:
        """The first version: each sample of a batch is scanned on its own."""
        if node.inputs[0] is not None and node.inputs[0].name:
            raise refusal(self._model, node, "with sequence lengths", "export with opset 9 or newer")
        scanned = node.attributes["num_scan_inputs"].as_int()
        count = len(inputs) - scanned
        reads_as = [Scanned(0, bool(backward)) for backward in _ints(node, "directions", scanned)]
        stacks_as = [Scanned(0, False)] * (len(body.outputs) - count)
        columns: list[list[ir.Value]] = [[] for _ in body.outputs]
        for sample in range(self._length(node, inputs[0], 0)):
            mine = [self._pick(node, value, 0, sample) for value in inputs]
            scan = _ScanNode(node, body, mine[:count], mine[count:], reads_as, stacks_as)
            for column, value in zip(columns, self._scan(scan), strict=True):
                column.append(value)
        for outer, column, inner in zip(node.outputs, columns, body.outputs, strict=False):
            self._stack(node, outer, column, inner)

    def _length(self, node: ir.Node, value: ir.Value, axis: int) -> int:
        tensor = self.tracer.known(value).tensor
        if tensor is None:
            raise refusal(
                self._model,
                node,
                "over an input whose length only a run tells",
                "give the shapes of the inputs at import",
            )
        return tensor.shape[axis]

    def _pick(self, node: ir.Node, value: ir.Value, axis: int, index: int) -> ir.Value:
        position = ir.Value(name=f"{value.name}_index")
        self.tracer.bind(position, PartialValue(torch.tensor(index)))
        return self.tracer.apply(f"{value.name}_{index}", "Gather", [value, position], axis=axis)

    def _scan(self, scan: _ScanNode) -> list[ir.Value]:
        node, body = scan.node, scan.body
        axes = [how.axis for how in scan.reads_as]
        lengths = [self._length(node, v, axis) for v, axis in zip(scan.sequences, axes, strict=True)]
        if len(set(lengths)) > 1:
            what = f"over inputs of {' and '.join(map(str, lengths))} elements"
            raise refusal(self._model, node, what, "check the shapes of the inputs")
        now, stacks = list(scan.states), [list[ir.Value]() for _ in scan.stacked]
        self._count(node, body, lengths[0])
        for step in range(lengths[0]):
            self._count(node, body)
            for inner, outer in zip(body.inputs, now, strict=False):
                self.tracer.alias(inner, outer)
            elements = body.inputs[len(now) :]
            for inner, whole, how in zip(elements, scan.sequences, scan.reads_as, strict=True):
                index = lengths[0] - 1 - step if how.is_backward else step
                self.tracer.alias(inner, self._pick(node, whole, how.axis, index))
            self.run_nodes(body)
            outputs = [self.tracer.bound_at_import(value) for value in body.outputs]
            now = outputs[: len(scan.states)]
            for stack, value in zip(stacks, outputs[len(scan.states) :], strict=True):
                stack.append(value)
        results = now
        for stack, inner, how in zip(stacks, scan.stacked, scan.stacks_as, strict=True):
            whole = ir.Value(name=f"{node_name(node)}_{inner.name}")
            self._stack(node, whole, stack[::-1] if how.is_backward else stack, inner, how.axis)
            results.append(whole)
        return results

    def _keep_scan(self, scan: _ScanNode) -> None:
        tracer, node, body = self.tracer, scan.node, scan.body
        states, sequences = (
            tuple(tracer.tensor_operand(v) for v in values) for values in (scan.states, scan.sequences)
        )
        slots = [(value, tracer.new_slot(None)) for value in body.inputs]
        block = tracer.block(slots, lambda: self._outputs(body))
        tracer.steps.append(
            Scan(
                node_name(node),
                title(self._model, node),
                states,
                sequences,
                tuple(scan.reads_as),
                block,
                tuple(scan.stacks_as),
                tuple(_empty(value) for value in scan.stacked),
                tracer.new_results(node.outputs, wanted(node)),
            )
        )

    # FlexAttention

    def flex_attention(self, node: ir.Node) -> None:
        """Attention whose scores and shares pass through the graphs that the node carries."""
        q, k, v = (value for value in node.inputs if value is not None)
        scores = self._modified(node, "score_mod", self.tracer.part(node, flex_scores, [q, k]))
        shares = self.tracer.apply(node_name(node), "Softmax", [scores], axis=-1)
        shares = self._modified(node, "prob_mod", shares)
        self.tracer.alias(node.outputs[0], self.tracer.part(node, flex_mix, [shares, v]))

    def _modified(self, node: ir.Node, name: str, value: ir.Value) -> ir.Value:
        if name not in node.attributes:
            return value
        body = self._body(node, name)
        self.tracer.alias(body.inputs[0], value)
        self.run_nodes(body)
        return body.outputs[0]

    # SequenceMap

    def sequence_map(self, node: ir.Node) -> None:
        """Run the body for each element of a list of known length."""
        body = self._body(node, "body")
        inputs = [v for v in node.inputs if v is not None]
        items = self.tracer.list_of(inputs[0])
        if items is None:
            self._map_late(node, body, inputs)
            return
        columns: list[list[ir.Value]] = [[] for _ in body.outputs]
        for i, item in enumerate(items):
            self._count(node, body)
            self.tracer.alias(body.inputs[0], item)
            for inner, outer in zip(body.inputs[1:], inputs[1:], strict=True):
                elements = self.tracer.list_of(outer)
                self.tracer.alias(inner, outer if elements is None else elements[i])
            self.run_nodes(body)
            for column, value in zip(columns, body.outputs, strict=True):
                column.append(self.tracer.bound_at_import(value))
        for outer, column in zip(node.outputs, columns, strict=False):
            self.tracer.bind_list(outer, column)

    def _map_late(self, node: ir.Node, body: ir.Graph, inputs: Sequence[ir.Value]) -> None:
        operands = tuple(self.tracer.tensor_operand(value) for value in inputs)
        slots = [(value, self.tracer.new_slot(None)) for value in body.inputs]
        block = self.tracer.block(slots, lambda: self._outputs(body))
        results = self.tracer.new_results(node.outputs, wanted(node))
        self.tracer.steps.append(Map(node_name(node), title(self._model, node), operands, block, results))


@dataclass(frozen=True)
class _LoopNode:
    """A `Loop` of the graph.

    Args:
        node: The node.
        body: The block that it repeats.
        count: The most iterations.
        condition: Whether to begin.
        carried: The values that the first iteration gets.
    """

    node: ir.Node
    body: ir.Graph
    count: ir.Value | None
    condition: ir.Value | None
    carried: Sequence[ir.Value | None]


@dataclass(frozen=True)
class _ScanNode:
    """A `Scan` of the graph, or of one sample of its batch.

    Args:
        node: The node.
        body: The block that it repeats.
        states: The states that the first iteration gets.
        sequences: The tensors that it goes through, an element in each iteration.
        reads_as: Along which axis and in which direction, for each sequence.
        stacks_as: The same for each result that is stacked.
    """

    node: ir.Node
    body: ir.Graph
    states: Sequence[ir.Value]
    sequences: Sequence[ir.Value]
    reads_as: Sequence[Scanned]
    stacks_as: Sequence[Scanned]

    @property
    def stacked(self) -> Sequence[ir.Value]:
        """The outputs of the body that are stacked."""
        return self.body.outputs[len(self.states) :]


def _never_ends(body: ir.Graph) -> bool:
    """Whether the body of a loop only hands its condition on."""
    value = body.outputs[0]
    node = value.producer()
    if node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value is body.inputs[1]


def _empty(value: ir.Value) -> Static | None:
    """Returns the result of stacking zero values, as far as the file says what one would be."""
    dtype = torch_dtype(value.dtype)
    if dtype is None or value.shape is None or any(not isinstance(n, int) for n in value.shape):
        return None
    return Static(np.zeros((0, *value.shape.numpy()), np.float32), dtype)


def _scanned(node: ir.Node, what: str, count: int) -> list[Scanned]:
    axes, directions = _ints(node, f"{what}_axes", count), _ints(node, f"{what}_directions", count)
    return [Scanned(axis, bool(backward)) for axis, backward in zip(axes, directions, strict=True)]


def _ints(node: ir.Node, name: str, count: int) -> list[int]:
    attribute = node.attributes.get(name)
    return [0] * count if attribute is None else [int(n) for n in attribute.as_ints()]
