"""From a graph to a module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import Tensor, nn

from ...ir.errors import IrcError, Location, UnsupportedError, UsageError
from ..quiet import quiet_tracer
from .binding import Constant, InputSpec, bind_constants, bind_inputs
from .bounds import Account, too_large
from .checking import MOST_NODES
from .control_flow import ControlFlow
from .coverage import check_covered, domain_of, title
from .lists import OPTIONALS, SEQUENCES, import_optional, import_sequence
from .module import OnnxModule, Stored
from .nodes import check_nodes
from .program import with_frees
from .reader import node_name, normalise
from .rebatch import fixed_batch, rebatch
from .tensors import Static, torch_dtype, torch_tensor
from .tracing import Known, Tracer
from .weights import Leaf, Leaves, Role

__all__ = ["from_model"]


def from_model(
    model: ir.Model,
    batch: int | None = None,
    inputs: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Constant] | None = None,
    roles: Mapping[str, str] | None = None,
) -> OnnxModule:
    """The module for a model in memory, which is normalised in place.

    Args:
        model: The model.
        batch: See `from_onnx`.
        inputs: See `from_onnx`.
        constants: See `from_onnx`.
        roles: See `from_onnx`.

    Raises:
        UnsupportedError: IRC301 to IRC304, IRC307.
        UsageError: IRC305, IRC308, IRC314 to IRC319.
    """
    check_nodes(model)
    normalise(model)
    check_covered(model)
    settled = bind_constants(model.graph, constants or {})
    shapes = {**(inputs or {}), **{name: tuple(t.shape) for name, t in settled.items()}}
    fixed = None if inputs or settled else fixed_batch(model.graph, batch)
    if fixed is not None and batch is not None:
        rebatch(model.graph, fixed, batch)
    specs = bind_inputs(model.graph, batch, shapes)
    leaves = Leaves(roles or {})
    module = _module(model, leaves, [s for s in specs if s[0] not in settled], settled)
    leaves.check_given()
    return module


def _module(
    model: ir.Model, leaves: Leaves, specs: Sequence[InputSpec], given: Mapping[str, Tensor]
) -> OnnxModule:
    graph, tracer = model.graph, Tracer(model, leaves)
    by_name = {v.name: v for v in graph.inputs}
    for name, shape, dtype in specs:
        fake = None if shape is None else tracer.fake_empty(shape, dtype)
        tracer.bind(by_name[name], tracer.new_slot(fake))
    for name, tensor in given.items():
        tracer.bind(by_name[name], Known(tensor))
    with torch.no_grad(), quiet_tracer():
        _Nodes(tracer).run(graph)
        outputs = {v.name or f"output_{i}": tracer.output(v) for i, v in enumerate(graph.outputs)}
        return OnnxModule(
            input_specs=specs,
            weights={name: _materialise(leaf, tracer.account) for name, leaf in tracer.weights.items()},
            stored=[_stored(leaf) for leaf in tracer.read.values()],
            not_saved={name for name, leaf in tracer.weights.items() if not leaf.persistent},
            constants=[Static.of(t) for t in tracer.constants],
            as_tensors={i: tracer.constants[i] for i in sorted(tracer.as_tensors)},
            steps=with_frees(tracer.steps, outputs.values()),
            outputs=outputs,
            settled=list(given),
        )


class _Nodes:
    """Imports nodes one after the other, each by what it is."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.control_flow = ControlFlow(tracer, self.run)
        self._imported = 0

    def run(self, graph: ir.Graph) -> None:
        """Import the nodes of a graph, in order."""
        for node in graph:
            self._count(node)
            try:
                if domain_of(node) == "":
                    self.default(node)
                else:
                    self.tracer.node(node)
            except IrcError:
                raise
            except Exception as error:
                raise UsageError(
                    "IRC318",
                    f"{title(self.tracer.model, node)} cannot be imported: {_first_line(error)}",
                    at=Location(onnx_node=node_name(node)),
                    help="`onnx.checker.check_model(path, full_check=True)` says more about the file",
                ) from error

    def _count(self, node: ir.Node) -> None:
        self._imported += 1
        if self._imported > MOST_NODES:
            raise too_large(
                f"the graph, with its loops unrolled, has more than {MOST_NODES:,} nodes",
                node_name(node),
                "export the model with fewer iterations",
            )

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
            _check_constant(self.tracer.leaves, node)
        elif not (op == "ConstantOfShape" and self.tracer.leaves.of(node.outputs[0]) is not None):
            self.tracer.node(node)


def _check_constant(leaves: Leaves, node: ir.Node) -> None:
    if leaves.of(node.outputs[0]) is None:
        raise UnsupportedError(
            "IRC302",
            "ai.onnx::Constant of strings or of sparse values is not supported",
            at=Location(onnx_node=node_name(node)),
            help="export the model with dense numbers",
        )


def _stored(leaf: Leaf) -> Stored:
    dtype = torch_dtype(leaf.tensor.dtype)
    return Stored(leaf.name, leaf.role.value, leaf.shape, str(dtype).removeprefix("torch."), leaf.why)


def _materialise(leaf: Leaf, account: Account) -> Tensor:
    try:
        tensor = torch_tensor(leaf.tensor)
    except Exception as error:
        raise UsageError(
            "IRC312",
            f"the weight {leaf.value.name!r} cannot be read: {_first_line(error)}",
            help="keep the model's external data beside it, under the same names",
        ) from error
    assert tensor is not None
    if tuple(tensor.shape) != leaf.shape:
        size = math.prod(leaf.shape) * tensor.element_size()
        account.add(f"the weight {leaf.value.name!r}", leaf.shape, size)
        tensor = tensor.reshape(()).expand(leaf.shape).clone()
    return nn.Parameter(tensor) if leaf.role is Role.PARAMETER else tensor


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
