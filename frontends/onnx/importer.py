"""Turns a graph into a module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from ...ir.errors import IrcError, Location, UnsupportedError, UsageError, first_line
from ..quiet import quiet_tracer
from .binding import Constant, InputSpec, bind_constants, bind_inputs, declared_inputs, is_open
from .bounds import Account, too_large
from .checking import MOST_NODES
from .control_flow import ControlFlow
from .coverage import check_covered, domain_of, title
from .graphs import node_name, subgraphs
from .initializers import Initializer, Initializers
from .module import OnnxModule, Stored
from .nodes import check_nodes
from .partial_evaluation import PartialValue, Tracer
from .program import Program, Shapes, with_frees
from .reader import normalise
from .rebatch import fixed_batch, rebatch
from .roles import Role
from .sequences import OPTIONALS, SEQUENCES, import_optional, import_sequence
from .specializations import Specializations
from .tensors import Static, onnx_dtype, onnx_tensor, torch_dtype, torch_tensor

__all__ = ["from_model"]


def from_model(
    model: ir.Model,
    batch: int | None = None,
    inputs: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Constant] | None = None,
    roles: Mapping[str, str] | None = None,
) -> OnnxModule:
    """The module for a model in memory, which is normalised in place and belongs to the module from then on.

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
    bound_at_import = bind_constants(model.graph, constants or {})
    given = {name: tuple(tensor.shape) for name, tensor in bound_at_import.items()}
    fixed = None if inputs or bound_at_import else fixed_batch(model.graph, batch)
    if fixed is not None and batch is not None:
        rebatch(model.graph, fixed, batch)

    def free(specs: Sequence[InputSpec]) -> list[InputSpec]:
        return [spec for spec in specs if spec[0] not in bound_at_import]

    specs = free(bind_inputs(model.graph, batch, {**(inputs or {}), **given}))
    initializers = Initializers(roles or {})
    importer = _Importer(model, specs, bound_at_import, initializers)
    first, read, weights, tensors = importer.first()
    initializers.check_given()
    return OnnxModule(
        input_specs=specs,
        declared=free(declared_inputs(model.graph)),
        weights=tensors,
        stored=[_stored(initializer) for initializer in read],
        not_saved={name for name, initializer in weights.items() if not initializer.persistent},
        specializations=Specializations(first, importer.program),
        constants=first.tensors,
        bound_at_import={name: Static.of(tensor) for name, tensor in bound_at_import.items()},
        roles=roles,
    )


class _Importer:
    """Imports a graph: traces programs for any sizes of its inputs.

    Args:
        model: The model, normalised.
        specs: Its inputs, but for those in `given`.
        given: The inputs whose values are bound at import.
        initializers: The roles of its weights and constants.
    """

    def __init__(
        self,
        model: ir.Model,
        specs: Sequence[InputSpec],
        given: Mapping[str, Tensor],
        initializers: Initializers,
    ) -> None:
        self._model = model
        self._specs = list(specs)
        self._given = dict(given)
        self._initializers = initializers
        self._names: dict[ir.Value, str] | None = None

    def first(
        self,
    ) -> tuple[Program, list[Initializer], dict[str, Initializer], dict[str, Tensor | nn.Parameter]]:
        """The program for the specified inputs, what it reads of the file, and its weights by name."""
        shapes = [None if is_open(shape) else shape for _, shape, _ in self._specs]
        program, tracer = self._trace([cast("tuple[int, ...] | None", shape) for shape in shapes])
        self._names = {initializer.value: name for name, initializer in tracer.weights.items()}
        tensors: dict[str, Tensor | nn.Parameter] = {}
        for name, initializer in tracer.weights.items():
            tensors[name] = _materialise(initializer, tracer.account)
            self._initializers.let_go(initializer)
        for initializer in tracer.read.values():
            tensor = tracer.known(initializer.value).tensor if initializer.role is Role.CONSTANT else None
            if tensor is not None and onnx_dtype(tensor.dtype) is initializer.tensor.dtype:
                self._initializers.hold(initializer, onnx_tensor(tensor, initializer.name))
        self._hold_rest(self._model.graph)
        return program, list(tracer.read.values()), tracer.weights, tensors

    def _hold_rest(self, graph: ir.Graph) -> None:
        """Read what the first program had no use for: the file may be another one when a later one has."""
        values = [*graph.initializers.values()]
        for node in graph:
            if node.op_type == "Constant":
                values += node.outputs
            for inner in subgraphs(node):
                self._hold_rest(inner)
        for value in values:
            initializer = self._initializers.of(value)
            if initializer is None or not isinstance(initializer.tensor, ir.ExternalTensor):
                continue
            if initializer.role is Role.CONSTANT:
                array = np.array(initializer.tensor.numpy())
                self._initializers.hold(
                    initializer, ir.Tensor(array, dtype=initializer.tensor.dtype, name=initializer.name)
                )
            else:  # no program can read it, see `Tracer.names`
                self._initializers.let_go(initializer)

    def program(self, shapes: Shapes) -> Program:
        """The program for these shapes; `None` leaves the shape of an input to each run.

        Raises:
            UnsupportedError: IRC302 when a node cannot do without them.
        """
        return self._trace(shapes)[0]

    def _trace(self, shapes: Sequence[tuple[int, ...] | None]) -> tuple[Program, Tracer]:
        graph = self._model.graph
        tracer = Tracer(self._model, self._initializers, self._names)
        by_name = {v.name: v for v in graph.inputs}
        for (name, _, dtype), shape in zip(self._specs, shapes, strict=True):
            fake = None if shape is None or dtype is None else tracer.fake_empty(shape, dtype)
            tracer.bind(by_name[name], tracer.new_slot(fake))
        for name, tensor in self._given.items():
            tracer.bind(by_name[name], PartialValue(tensor))
        with torch.no_grad(), quiet_tracer():
            _Nodes(tracer).run(graph)
            outputs = {v.name or f"output_{i}": tracer.output(v) for i, v in enumerate(graph.outputs)}
            return Program(
                shapes=tuple(shapes),
                steps=tuple(with_frees(tracer.steps, outputs.values())),
                outputs=outputs,
                output_shapes=tuple(tracer.shape_of(value) for value in graph.outputs),
                weights=tuple(tracer.weights),
                statics=tuple(Static.of(t) for t in tracer.constants),
                tensors={i: tracer.constants[i] for i in sorted(tracer.as_tensors)},
            ), tracer


# Types that stand for themselves in torch; others may be held in a wider one.
_COMPARED = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool)


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
                elif node.op_type == "FlexAttention" and any(subgraphs(node)):
                    self.control_flow.flex_attention(node)
                else:
                    self.tracer.node(node)
            except IrcError:
                raise
            except Exception as error:
                raise UsageError(
                    "IRC318",
                    f"{title(self.tracer.model, node)} cannot be imported: {first_line(error)}",
                    at=Location(onnx_node=node_name(node)),
                    help="`onnx.checker.check_model(path, full_check=True)` says more about the file",
                ) from error
            self._check_declared(node)

    def _check_declared(self, node: ir.Node) -> None:
        """Refuse a result whose element type is not the one that the file declares.

        Raises:
            UsageError: IRC305.
        """
        for value in node.outputs:
            known = self.tracer.type_of(value)
            declared = None if value.dtype is None else torch_dtype(value.dtype)
            if known in _COMPARED and declared in _COMPARED and known is not declared:
                raise UsageError(
                    "IRC305",
                    f"{title(self.tracer.model, node)} makes {value.name!r} of {known}, and the file declares"
                    f" {declared}",
                    at=Location(onnx_node=node_name(node)),
                    help="mend the file: `onnx.shape_inference.infer_shapes` writes what nodes make",
                )

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
            _check_constant(self.tracer.initializers, node)
        elif not (op == "ConstantOfShape" and self.tracer.initializers.of(node.outputs[0]) is not None):
            self.tracer.node(node)


def _check_constant(initializers: Initializers, node: ir.Node) -> None:
    if initializers.of(node.outputs[0]) is None:
        raise UnsupportedError(
            "IRC302",
            "ai.onnx::Constant of strings or of sparse values is not supported",
            at=Location(onnx_node=node_name(node)),
            help="export the model with dense numbers",
        )


def _stored(initializer: Initializer) -> Stored:
    dtype = torch_dtype(initializer.tensor.dtype)
    return Stored(
        initializer.name,
        initializer.role.value,
        initializer.shape,
        str(dtype).removeprefix("torch."),
        initializer.why,
    )


def _materialise(initializer: Initializer, account: Account) -> Tensor:
    try:
        tensor = torch_tensor(initializer.tensor)
    except Exception as error:
        raise UsageError(
            "IRC312",
            f"the weight {initializer.value.name!r} cannot be read: {first_line(error)}",
            help="keep the model's external data beside it, under the same names",
        ) from error
    assert tensor is not None
    if tuple(tensor.shape) != initializer.shape:
        size = math.prod(initializer.shape) * tensor.element_size()
        account.add(f"the weight {initializer.value.name!r}", initializer.shape, size)
        tensor = tensor.reshape(()).expand(initializer.shape).clone()
    return nn.Parameter(tensor) if initializer.role is Role.PARAMETER else tensor
