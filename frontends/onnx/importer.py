"""From a graph to a module: one run on fake tensors, in which everything that is constant folds."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ...ir.errors import IrcError, Location, UnsupportedError, UsageError
from .binding import InputSpec, bind_inputs
from .lowerings import Attribute, Call, Lowering, NodeInfo, find, newest_opset
from .module import OnnxModule, Operand, Step
from .reader import node_name, normalise
from .rebatch import fixed_batch, rebatch
from .tensors import Static, torch_tensor
from .weights import Kind, Leaf, leaf_of

__all__ = ["from_model"]

# Lists of tensors exist only at import: their lengths and positions are constants.
_SEQUENCES = (
    "ConcatFromSequence",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceInsert",
    "SequenceLength",
    "SplitToSequence",
)
_STRUCTURE = ("Constant", "If", *_SEQUENCES)
# The mode of the module decides what these do, so they never fold.
_LIVE = ("Dropout", "BatchNormalization")
# These read no element of their operands, only sizes and types.
_OF_SHAPES = ("Shape", "Size", "EyeLike")


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
    return _Importer(model).run([s for s in specs if s[0] not in constants], constants)


def _domain(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _version(model: ir.Model, domain: str) -> int:
    imports = {("" if d == "ai.onnx" else d): v for d, v in model.opset_imports.items()}
    return imports.get(domain, 1)


def check_covered(model: ir.Model, graph: ir.Graph | None = None) -> None:
    """Refuse the graph when an operator in it has no lowering.

    Raises:
        UnsupportedError: IRC301 names the first such node and counts the others; IRC303: the set is too new.
    """
    version = _version(model, "")
    if version > newest_opset:
        raise UnsupportedError(
            "IRC303",
            f"the model uses opset {version}, and irc knows them up to {newest_opset}",
            help=f"export with opset_version={newest_opset} or lower",
        )
    missing = [
        node
        for node in graph or model.graph
        if not (_domain(node) == "" and node.op_type in _STRUCTURE)
        and find(_domain(node), node.op_type, _version(model, _domain(node))) is None
    ]
    if not missing:
        return
    first, others = missing[0], missing[1:]
    more = collections.Counter(_title(model, node).split(" ")[0] for node in others)
    counted = ", ".join(f"{op} x{n}" for op, n in more.most_common())
    raise UnsupportedError(
        "IRC301",
        f"the operator {_title(model, first)} is not supported"
        + (f"; {len(others)} more: {counted}" if others else ""),
        at=Location(onnx_node=node_name(first)),
        help="export the model without it; `irc.frontends.onnx.operators()` lists what is covered",
    )


def _title(model: ir.Model, node: ir.Node) -> str:
    return f"{_domain(node) or 'ai.onnx'}::{node.op_type} (opset {_version(model, _domain(node))})"


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a value: where a step reads it, and its tensor, fake unless it is a constant."""

    tensor: Tensor
    operand: Operand | None = None  # None for a constant that no step has read yet

    @property
    def constant(self) -> bool:
        return self.operand is None or self.operand.kind == "constant"


@dataclass
class _Importer:
    model: ir.Model
    fake: FakeTensorMode = field(default_factory=FakeTensorMode)
    env: dict[ir.Value, _Known] = field(default_factory=dict[ir.Value, _Known])
    weights: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    constants: list[Tensor] = field(default_factory=list[Tensor])
    as_tensors: set[int] = field(default_factory=set[int])
    steps: list[Step] = field(default_factory=list[Step])
    sequences: dict[ir.Value, list[ir.Value]] = field(default_factory=dict[ir.Value, list[ir.Value]])
    slots: int = 0

    def run(self, specs: Sequence[InputSpec], given: Mapping[str, Tensor]) -> OnnxModule:
        graph = self.model.graph
        by_name = {v.name: v for v in graph.inputs}
        for name, shape, dtype in specs:
            self.env[by_name[name]] = _Known(self.fake_empty(shape, dtype), self.new_slot())
        for name, tensor in given.items():
            self.env[by_name[name]] = _Known(tensor)
        with torch.no_grad():
            self.run_nodes(graph)
            outputs = {v.name or f"output_{i}": self.output(v) for i, v in enumerate(graph.outputs)}
            statics = [Static.of(t) for t in self.constants]
            return OnnxModule(
                input_specs=specs,
                weights={name: _materialise(leaf) for name, leaf in self.weights.items()},
                not_saved={name for name, leaf in self.weights.items() if not leaf.persistent},
                constants=statics,
                as_tensors={i: self.constants[i] for i in sorted(self.as_tensors)},
                steps=_with_frees(self.steps, outputs.values()),
                outputs=outputs,
            )

    # Values

    def fake_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self.fake:
            return torch.empty(tuple(shape), dtype=dtype)

    def new_slot(self) -> Operand:
        self.slots += 1
        return Operand("slot", self.slots - 1)

    def known(self, value: ir.Value) -> _Known:
        found = self.env.get(value)
        if found is None:
            leaf = leaf_of(value)
            if leaf is None:
                raise UsageError(
                    "IRC311",
                    f"nothing computes {value.name!r}",
                    help="`onnx.checker.check_model` says more about the file",
                )
            found = self.env[value] = self.leaf(leaf)
        return found

    def leaf(self, leaf: Leaf) -> _Known:
        if leaf.kind is Kind.CONSTANT:
            tensor = torch_tensor(leaf.tensor)
            if tensor is None:
                raise UnsupportedError(
                    "IRC304",
                    f"the constant {leaf.value.name!r} is of {leaf.tensor.dtype.name}, which torch has not",
                    help="export the model with another element type",
                )
            return _Known(tensor)
        name = leaf.value.name or f"weight_{len(self.weights)}"
        while name in self.weights:  # a branch may name its own weight like one outside
            name += "_"
        index = len(self.weights)
        self.weights[name] = leaf
        sample = torch_tensor(ir.tensor(leaf.tensor.numpy().reshape(-1)[:1], dtype=leaf.tensor.dtype))
        assert sample is not None
        return _Known(self.fake_empty(leaf.shape, sample.dtype), Operand("weight", index))

    def as_operand(self, value: ir.Value | None) -> Operand:
        """Where a step reads the value; gives a constant its place among the module's constants."""
        if value is None:
            return Operand("absent")
        known = self.known(value)
        if known.operand is None:
            known = self.env[value] = _Known(known.tensor, self.new_constant(known.tensor))
        assert known.operand is not None
        return known.operand

    def new_constant(self, tensor: Tensor) -> Operand:
        self.constants.append(tensor.contiguous())
        return Operand("constant", len(self.constants) - 1)

    def output(self, value: ir.Value) -> Operand:
        if value in self.sequences:
            raise UnsupportedError(
                "IRC304",
                f"the output {value.name!r} is a list of tensors",
                help="export the model with tensors as outputs",
            )
        operand = self.as_operand(value)
        if operand.kind == "constant":
            self.as_tensors.add(operand.index)
        return operand

    # Nodes

    def run_nodes(self, graph: ir.Graph) -> None:
        for node in graph:
            domain = _domain(node)
            if domain == "" and node.op_type == "If":
                self.branch(node)
            elif domain == "" and node.op_type in _SEQUENCES:
                self.sequence(node)
            elif domain == "" and node.op_type == "Constant":
                if leaf_of(node.outputs[0]) is None:
                    raise UnsupportedError(
                        "IRC302",
                        "ai.onnx::Constant of strings or of sparse values is not supported",
                        at=Location(onnx_node=node_name(node)),
                        help="export the model with dense numbers",
                    )
            elif not (node.op_type == "ConstantOfShape" and leaf_of(node.outputs[0]) is not None):
                self.node(node, domain)

    def branch(self, node: ir.Node) -> None:
        """Run the branch that a constant condition takes, in place of the `If`."""
        condition = self.known(node.inputs[0]) if node.inputs[0] is not None else None
        if condition is None or not condition.constant:
            raise UnsupportedError(
                "IRC302",
                f"{_title(self.model, node)} with a condition that depends on the inputs is not supported",
                at=Location(onnx_node=node_name(node)),
                help="export the model for one of the two cases",
            )
        taken = node.attributes["then_branch" if bool(condition.tensor.item()) else "else_branch"].as_graph()
        check_covered(self.model, taken)
        self.run_nodes(taken)
        for outer, inner in zip(node.outputs, taken.outputs, strict=True):
            if inner in self.sequences:
                self.sequences[outer] = self.sequences[inner]
            else:
                self.env[outer] = self.known(inner)

    def sequence(self, node: ir.Node) -> None:
        """Operators on lists of tensors: a list is the values it holds, and only cutting and joining run."""
        op, out = node.op_type, node.outputs[0]
        values = [v for v in node.inputs if v is not None]
        if op == "SplitToSequence":
            self.split_to_sequence(node, values)
        elif op == "SequenceConstruct":
            self.sequences[out] = values
        elif op == "SequenceEmpty":
            self.sequences[out] = []
        elif values[0] not in self.sequences:
            raise UnsupportedError(
                "IRC302",
                f"{_title(self.model, node)} of a list whose length is not fixed is not supported",
                at=Location(onnx_node=node_name(node)),
                help="export the model without lists of tensors",
            )
        elif op == "SequenceLength":
            self.env[out] = _Known(torch.tensor(len(self.sequences[values[0]])))
        elif op == "SequenceAt":
            self.env[out] = self.known(self.sequences[values[0]][self.position(node, values[1])])
        elif op == "SequenceInsert":
            items = list(self.sequences[values[0]])
            at = self.position(node, values[2]) if len(values) > 2 else len(items)
            items.insert(at, values[1])
            self.sequences[out] = items
        else:
            self.node(node, "", inputs=self.sequences[values[0]])

    def position(self, node: ir.Node, value: ir.Value) -> int:
        known = self.known(value)
        if not known.constant:
            raise UnsupportedError(
                "IRC302",
                f"{_title(self.model, node)} with a position that is not a constant is not supported",
                at=Location(onnx_node=node_name(node)),
                help="export the model without lists of tensors",
            )
        return int(known.tensor.item())

    def split_to_sequence(self, node: ir.Node, values: Sequence[ir.Value]) -> None:
        attribute = node.attributes.get("axis")
        axis, whole = 0 if attribute is None else attribute.as_int(), self.known(values[0]).tensor
        size = whole.shape[axis]
        if len(values) > 1 and self.known(values[1]).constant:
            given = self.known(values[1]).tensor
            count = given.numel() if given.ndim else -(-size // int(given.item()))
        else:
            count = size
        outputs = [ir.Value(name=f"{node.outputs[0].name}_{i}") for i in range(count)]
        self.node(node, "", outputs=outputs)
        self.sequences[node.outputs[0]] = outputs

    def node(
        self,
        node: ir.Node,
        domain: str,
        inputs: Sequence[ir.Value | None] | None = None,
        outputs: Sequence[ir.Value] | None = None,
    ) -> None:
        """Fold or trace a node; the values of a list stand in for the list itself."""
        version = _version(self.model, domain)
        lowering = find(domain, node.op_type, version)
        assert lowering is not None
        wanted = _wanted(node) if outputs is None else (True,) * len(outputs)
        info = NodeInfo(node_name(node), node.op_type, domain, version, _attributes(node), wanted)
        outputs = outputs or node.outputs
        inputs = list(node.inputs if inputs is None else inputs)
        while inputs and (inputs[-1] is None or not inputs[-1].name):
            inputs.pop()
        values = [v if v is not None and v.name else None for v in inputs]
        known = [None if v is None else self.known(v) for v in values]
        if self.folds(info, known):
            self.fold(outputs, info, lowering, known)
        else:
            self.trace(outputs, info, lowering, values)

    def folds(self, info: NodeInfo, known: Sequence[_Known | None]) -> bool:
        if info.domain != "" or info.op in _LIVE:
            return False
        first = known[0] if known else None
        if info.op in _OF_SHAPES or (info.op == "CastLike" and first is not None and first.constant):
            return True
        return all(k is None or k.constant for k in known)

    def fold(
        self, outputs: Sequence[ir.Value], info: NodeInfo, lowering: Lowering, known: Sequence[_Known | None]
    ) -> None:
        call = Call(
            info,
            [None if k is None else k.tensor for k in known],
            [None if k is None or not k.constant else Static.of(k.tensor) for k in known],
            [False] * len(known),
            True,
            lambda make: make(),
        )
        for value, tensor in zip(outputs, self.call(lowering, call), strict=False):
            if tensor is not None:
                self.env[value] = _Known(tensor)

    def trace(
        self,
        outputs: Sequence[ir.Value],
        info: NodeInfo,
        lowering: Lowering,
        values: Sequence[ir.Value | None],
    ) -> None:
        operands = [self.as_operand(v) for v in values]
        literals: list[int] = []

        def make_literal(make: Callable[[], Tensor]) -> Tensor:
            with unset_fake_temporarily():
                tensor = make().contiguous()
                literals.append(self.new_constant(tensor).index)
            return self.fake.from_tensor(tensor)

        known = [None if v is None else self.known(v) for v in values]
        call = Call(
            info,
            [
                None if k is None else self.fake.from_tensor(k.tensor) if k.constant else k.tensor
                for k in known
            ],
            [None if k is None or not k.constant else Static.of(k.tensor) for k in known],
            [o.kind == "weight" for o in operands],
            True,
            make_literal,
        )
        with self.fake:
            results = self.call(lowering, call)
        if info.op in _LIVE:
            # What only eval mode reads must be kept too.
            with self.fake:
                self.call(lowering, replace(call, training=False))
        self.as_tensors.update(
            o.index for i, o in enumerate(operands) if o.kind == "constant" and i in call.touched
        )
        self.as_tensors.update(literals)
        slots: list[int | None] = []
        for value, tensor, wanted in zip(outputs, results, info.wanted, strict=False):
            if tensor is None or not wanted:
                slots.append(None)
                continue
            operand = self.new_slot()
            slots.append(operand.index)
            self.env[value] = _Known(tensor, operand)
        self.steps.append(Step(info, lowering, tuple(operands), tuple(slots), tuple(literals)))

    def call(self, lowering: Lowering, call: Call) -> Sequence[Tensor | None]:
        try:
            result = lowering(call)
        except IrcError:
            raise
        except NotImplementedError as error:
            call.refuse(f"here (torch: {_first_line(error)})")
        except Exception as error:
            shapes = ", ".join("-" if t is None else str(list(t.shape)) for t in call.tensors)
            raise UsageError(
                "IRC318",
                f"{call.node.title} cannot take operands of shapes {shapes}: {_first_line(error)}",
                at=Location(onnx_node=call.node.name),
                help="check the shapes given for the inputs against those the model was exported with",
            ) from error
        call.refuse_unread()
        return result if isinstance(result, tuple | list) else (result,)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _wanted(node: ir.Node) -> tuple[bool, ...]:
    return tuple(bool(o.name) and (bool(o.uses()) or o.is_graph_output()) for o in node.outputs)


def _attributes(node: ir.Node) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    for name, attribute in node.attributes.items():
        kind, value = attribute.type, attribute.value
        if kind in (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING):
            found[name] = value
        elif kind in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
            found[name] = tuple(value)
        elif kind is ir.AttributeType.TENSOR:
            tensor = torch_tensor(value)
            if tensor is not None:
                found[name] = tensor
    return found


def _materialise(leaf: Leaf) -> Tensor:
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
        tensor = tensor.reshape(()).expand(leaf.shape).clone()
    return nn.Parameter(tensor) if leaf.kind is Kind.PARAMETER else tensor


def _with_frees(steps: Sequence[Step], outputs: Iterable[Operand]) -> list[Step]:
    """Each step with the slots that it is the last to read, or that nothing reads."""
    keep = {o.index for o in outputs if o.kind == "slot"}
    seen, done = set(keep), list[Step]()
    for step in reversed(steps):
        touched = {o.index for o in step.operands if o.kind == "slot"} | {
            r for r in step.results if r is not None
        }
        done.append(replace(step, frees=tuple(sorted(touched - seen))))
        seen |= touched
    return done[::-1]
