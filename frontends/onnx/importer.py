"""From a graph to a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import Tensor, nn

from ...ir.errors import Location, UnsupportedError, UsageError
from .binding import InputSpec, bind_inputs
from .control_flow import ControlFlow
from .coverage import check_covered, domain_of
from .lists import OPTIONALS, SEQUENCES, import_optional, import_sequence
from .module import OnnxModule
from .program import with_frees
from .reader import node_name, normalise, subgraphs
from .rebatch import fixed_batch, rebatch
from .tensors import Static, torch_tensor
from .tracing import Known, Tracer
from .weights import Kind, Leaf, leaf_of

__all__ = ["from_model"]


def from_model(
    model: ir.Model,
    batch: int | None = None,
    inputs: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Tensor] | None = None,
) -> OnnxModule:
    """The module for a model in memory, which is normalised in place.

    Args:
        model: The model.
        batch: See `from_onnx`.
        inputs: See `from_onnx`.
        constants: Inputs whose values are already known; they fold, and are no inputs of the module.

    Raises:
        UnsupportedError: IRC301 to IRC304.
        UsageError: IRC314 to IRC318.
    """
    normalise(model)
    check_covered(model)
    constants = constants or {}
    shapes = {**(inputs or {}), **{name: tuple(t.shape) for name, t in constants.items()}}
    fixed = None if inputs or constants else fixed_batch(model.graph, batch)
    if fixed is not None and batch is not None:
        rebatch(model.graph, fixed, batch)
    specs = bind_inputs(model.graph, batch, shapes)
    return _module(model, [s for s in specs if s[0] not in constants], constants)


def _module(model: ir.Model, specs: Sequence[InputSpec], given: Mapping[str, Tensor]) -> OnnxModule:
    graph, tracer = model.graph, Tracer(model)
    by_name = {v.name: v for v in graph.inputs}
    for name, shape, dtype in specs:
        fake = None if shape is None else tracer.fake_empty(shape, dtype)
        tracer.bind(by_name[name], tracer.new_slot(fake))
    for name, tensor in given.items():
        tracer.bind(by_name[name], Known(tensor))
    with torch.no_grad():
        _Nodes(tracer).run(graph)
        outputs = {v.name or f"output_{i}": tracer.output(v) for i, v in enumerate(graph.outputs)}
        return OnnxModule(
            input_specs=specs,
            weights={name: _materialise(leaf) for name, leaf in tracer.weights.items()},
            not_saved={name for name, leaf in tracer.weights.items() if not leaf.persistent},
            constants=[Static.of(t) for t in tracer.constants],
            as_tensors={i: tracer.constants[i] for i in sorted(tracer.as_tensors)},
            steps=with_frees(tracer.steps, outputs.values()),
            outputs=outputs,
        )


class _Nodes:
    """Imports nodes one after the other, each by what it is."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.control_flow = ControlFlow(tracer, self.run)

    def run(self, graph: ir.Graph) -> None:
        """Import the nodes of a graph, in order."""
        for node in graph:
            if domain_of(node) == "":
                self.default(node)
            elif node.op_type == "FlexAttention" and any(subgraphs(node)):
                self.control_flow.flex_attention(node)
            else:
                self.tracer.node(node)

    def default(self, node: ir.Node) -> None:
        """A node of the default domain."""
        op = node.op_type
        if op == "If":
            self.control_flow.branch(node)
        elif op == "Loop":
            self.control_flow.loop(node)
        elif op == "Scan":
            self.control_flow.scan(node)
        elif op == "SequenceMap":
            self.control_flow.sequence_map(node)
        elif op in SEQUENCES:
            import_sequence(self.tracer, node)
        elif op in OPTIONALS:
            import_optional(self.tracer, node)
        elif op == "Identity" and node.inputs[0] is not None and self.tracer.list_of(node.inputs[0]):
            self.tracer.alias(node.outputs[0], node.inputs[0])
        elif op == "Constant":
            _check_constant(node)
        elif not (op == "ConstantOfShape" and leaf_of(node.outputs[0]) is not None):
            self.tracer.node(node)


def _check_constant(node: ir.Node) -> None:
    if leaf_of(node.outputs[0]) is None:
        raise UnsupportedError(
            "IRC302",
            "ai.onnx::Constant of strings or of sparse values is not supported",
            at=Location(onnx_node=node_name(node)),
            help="export the model with dense numbers",
        )


def _materialise(leaf: Leaf) -> Tensor:
    try:
        tensor = torch_tensor(leaf.tensor)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            "IRC312",
            f"the weight {leaf.value.name!r} cannot be read: {lines[0][:200]}",
            help="keep the model's external data beside it, under the same names",
        ) from error
    assert tensor is not None
    if tuple(tensor.shape) != leaf.shape:
        tensor = tensor.reshape(()).expand(leaf.shape).clone()
    return nn.Parameter(tensor) if leaf.kind is Kind.PARAMETER else tensor
