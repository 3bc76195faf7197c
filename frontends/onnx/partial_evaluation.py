"""Evaluates a graph as far as it is known at import, and traces the steps that compute the rest.

Nodes run once on fake tensors. What is constant folds; what has a known type becomes a step whose sizes are
settled; and if a size or a type depends on data, the step settles it in each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from ...ir.errors import IrcError, Location, UnsupportedError, UsageError, first_line
from .blocks import Block
from .bounds import MOST_BYTES, Account, Bounded, nbytes, stored_bytes, too_large
from .coverage import domain_of, version_of
from .graphs import node_name, wanted
from .initializers import Initializer, Initializers
from .lowerings import RANDOM, Attribute, Call, Lowering, NodeInfo, NotConstant, Value, find
from .nodes import check_kinds
from .program import NodeStep, Operand, Output, Step
from .quantized import Held
from .roles import Role
from .tensors import Static, onnx_tensor, torch_dtype, torch_tensor

__all__ = ["PartialValue", "Tracer"]

# The mode of the module or a generator decides what these do, so they never fold.
_LIVE = ("Dropout", "BatchNormalization", *RANDOM)
# These unpack weights that a file stores in few bits.
_UNPACK = ("DequantizeLinear",)
# These read no element of their operands, only sizes and types.
_OF_SHAPES = ("Shape", "Size", "EyeLike")


@dataclass(frozen=True, slots=True)
class PartialValue:
    """Holds what is known of a value at import.

    Args:
        tensor: Its elements if it is constant, else a fake of its type; `None` if only a run tells.
        operand: The operand as which steps read it; `None` for a constant that no step has read yet.
    """

    tensor: Tensor | None
    operand: Operand | None = None

    @property
    def constant(self) -> bool:
        """Whether the elements are known."""
        return self.tensor is not None and (self.operand is None or self.operand.kind == "constant")

    @property
    def absent(self) -> bool:
        """Whether it is an optional value that is not there."""
        return self.operand is not None and self.operand.kind == "absent"


@dataclass(frozen=True, slots=True)
class _Applied:
    """An operator with its operands.

    Args:
        info: The facts that are fixed about it.
        lowering: Its meaning in torch.
        values: Its operands; `None` for one that is left out.
        outputs: Its results.
    """

    info: NodeInfo
    lowering: Lowering
    values: Sequence[ir.Value | None]
    outputs: Sequence[ir.Value]


@dataclass
class Tracer:
    """The values known so far, and the steps, weights and constants that a module gets.

    Args:
        model: The model that is imported.
        initializers: The roles of its weights and constants.
        names: The names that weights have already, from an import of the same graph for other sizes.
    """

    model: ir.Model
    initializers: Initializers = field(default_factory=Initializers)
    names: Mapping[ir.Value, str] | None = None
    weights: dict[str, Initializer] = field(default_factory=dict[str, Initializer])
    read: dict[ir.Value, Initializer] = field(default_factory=dict[ir.Value, Initializer])
    constants: list[Tensor] = field(default_factory=list[Tensor])
    as_tensors: set[int] = field(default_factory=set[int])
    steps: list[Step] = field(default_factory=list[Step])
    account: Account = field(init=False)
    _fake: FakeTensorMode = field(default_factory=FakeTensorMode)
    _values: dict[ir.Value, PartialValue] = field(default_factory=dict[ir.Value, PartialValue])
    _lists: dict[ir.Value, list[ir.Value]] = field(default_factory=dict[ir.Value, list[ir.Value]])
    _slots: int = 0

    def __post_init__(self) -> None:
        self._held = Held(self.model.graph)
        self.account = Account(stored_bytes(self.model))

    # Values

    def fake_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A fake tensor of this type."""
        with self._fake:
            return torch.empty(tuple(shape), dtype=dtype)

    def new_slot(self, tensor: Tensor | None) -> PartialValue:
        """A value that a step will put into a new slot."""
        self._slots += 1
        return PartialValue(tensor, Operand("slot", self._slots - 1))

    def bind(self, value: ir.Value, known: PartialValue) -> None:
        """Say what is known of a value."""
        self._values[value] = known
        self._lists.pop(value, None)

    def bind_list(self, value: ir.Value, items: Sequence[ir.Value]) -> None:
        """Say that a value is a list of these."""
        self._lists[value] = list(items)
        self._values.pop(value, None)

    def alias(self, value: ir.Value, source: ir.Value) -> None:
        """Say that a value is another one."""
        items = self._lists.get(source)
        if items is None:
            self.bind(value, self.known(source))
        else:
            self.bind_list(value, items)

    def bound_at_import(self, value: ir.Value) -> ir.Value:
        """A new name for what a value is now, for values that the next iteration of a loop computes anew."""
        fresh = ir.Value(name=value.name)
        items = self._lists.get(value)
        if items is None:
            self.bind(fresh, self.known(value))
        else:
            self.bind_list(fresh, [self.bound_at_import(item) for item in items])
        return fresh

    def list_of(self, value: ir.Value) -> list[ir.Value] | None:
        """The elements of a list whose length is known."""
        return self._lists.get(value)

    def known(self, value: ir.Value) -> PartialValue:
        """Returns what is known of a value; a sequence of known length gets a slot.

        Raises:
            UsageError: IRC311 when nothing computes it.
            UnsupportedError: IRC304 when it is a constant of a type that torch lacks.
        """
        found = self._values.get(value)
        if found is None:
            found = self._values[value] = self._first_known(value)
        return found

    def _first_known(self, value: ir.Value) -> PartialValue:
        items = self._lists.get(value)
        if items is not None:
            return self._as_list(value, items)
        initializer = self.initializers.of(value)
        if initializer is None:
            raise UsageError(
                "IRC311",
                f"nothing computes {value.name!r}",
                help="`onnx.checker.check_model` says more about the file",
            )
        return self._initializer(initializer)

    def _as_list(self, value: ir.Value, items: Sequence[ir.Value]) -> PartialValue:
        made = find("", "SequenceConstruct", 11)
        assert made is not None
        info = NodeInfo(value.name or "list", "SequenceConstruct", "", 11, {}, (True,))
        operands = tuple(self.tensor_operand(item) for item in items)
        known = self.new_slot(None)
        assert known.operand is not None
        self.steps.append(NodeStep(info, made, operands, (known.operand.index,), decided_late=True))
        return known

    def _initializer(self, initializer: Initializer) -> PartialValue:
        self.read[initializer.value] = initializer
        if initializer.role is Role.CONSTANT:
            tensor = torch_tensor(initializer.tensor)
            tensor = self._held.widened(initializer.value, initializer.tensor) if tensor is None else tensor
            if tensor is None:
                raise UnsupportedError(
                    "IRC304",
                    f"the constant {initializer.value.name!r} is of {initializer.tensor.dtype.name}, "
                    "which torch does not have",
                    help="export the model with another element type",
                )
            return PartialValue(tensor)
        if initializer.tensor.size != math.prod(initializer.shape):
            size = math.prod(initializer.shape) * initializer.tensor.dtype.bitwidth // 8
            self.account.check(f"the weight {initializer.name!r}", initializer.shape, size)
        index, dtype = len(self.weights), torch_dtype(initializer.tensor.dtype)
        assert dtype is not None
        self.weights[self._name(initializer)] = initializer
        return PartialValue(self.fake_empty(initializer.shape, dtype), Operand("weight", index))

    def _name(self, initializer: Initializer) -> str:
        if self.names is not None:
            return self._old_name(initializer, self.names)
        name = initializer.value.name or f"weight_{len(self.weights)}"
        while name in self.weights:  # a branch may name its own weight like one outside
            name += "_"
        return name

    def _old_name(self, initializer: Initializer, names: Mapping[ir.Value, str]) -> str:
        if initializer.value not in names:
            raise UnsupportedError(
                "IRC324",
                f"for these sizes of the inputs the graph reads the weight {initializer.name!r}, "
                "which it did not read for the sizes of the import",
                help="import the file without shapes: then every weight that any sizes need is read",
            )
        return names[initializer.value]

    def operand(self, value: ir.Value | None) -> Operand:
        """Returns the operand that reads the value; adds a constant to the module's constants."""
        if value is None:
            return Operand("absent")
        known = self.known(value)
        if known.operand is None:
            assert known.tensor is not None
            known = self._values[value] = PartialValue(known.tensor, self._new_constant(known.tensor))
        assert known.operand is not None
        return known.operand

    def tensor_operand(self, value: ir.Value | None) -> Operand:
        """Returns the operand that reads the value as a tensor, even if it is a constant."""
        operand = self.operand(value)
        if operand.kind == "constant":
            self.as_tensors.add(operand.index)
        return operand

    def output(self, value: ir.Value) -> Output:
        """Returns the operands of an output; a sequence of known length is read element by element."""
        items = self._lists.get(value)
        if items is not None:
            return tuple(self.tensor_operand(item) for item in items)
        return self.tensor_operand(value)

    def shape_of(self, value: ir.Value) -> tuple[int, ...] | None:
        """The shape of a value, as far as it is known."""
        known = None if value in self._lists else self.known(value)
        return None if known is None or known.tensor is None else tuple(known.tensor.shape)

    def type_of(self, value: ir.Value) -> torch.dtype | None:
        """The element type of a value, as far as it is known."""
        known = self._values.get(value)
        return None if known is None or known.tensor is None else known.tensor.dtype

    def _new_constant(self, tensor: Tensor) -> Operand:
        self.constants.append(tensor.contiguous())
        return Operand("constant", len(self.constants) - 1)

    # Blocks

    @contextmanager
    def undone(self) -> Generator[Callable[[], None]]:
        """Within this, calling what it gives takes back all that has been traced since."""
        steps, values, lists = list(self.steps), dict(self._values), dict(self._lists)
        as_tensors, weights, constants = set(self.as_tensors), dict(self.weights), len(self.constants)

        def undo() -> None:
            self.steps[:] = steps
            self._values, self._lists = values, lists
            self.as_tensors, self.weights = as_tensors, weights
            del self.constants[constants:]

        yield undo

    def block(
        self, inputs: Sequence[tuple[ir.Value, PartialValue]], body: Callable[[], Sequence[ir.Value]]
    ) -> Block:
        """Traces `body` into a block.

        Args:
            inputs: The block's inputs, each in a slot of its own.
            body: Traces the steps, and gives the block's outputs.
        """
        outer, self.steps = self.steps, []
        try:
            slots: list[int] = []
            for value, known in inputs:
                assert known.operand is not None
                self.bind(value, known)
                slots.append(known.operand.index)
            outputs = [self.output(value) for value in body()]
            return Block.of(slots, self.steps, outputs)
        finally:
            self.steps = outer
            for value in self._lists:  # one that got its slot in here has none out there
                self._values.pop(value, None)

    # Nodes

    def node(
        self,
        node: ir.Node,
        inputs: Sequence[ir.Value | None] | None = None,
        outputs: Sequence[ir.Value] | None = None,
    ) -> None:
        """Fold or trace a node.

        Args:
            node: The node.
            inputs: The values that stand for its inputs, such as the elements of a list.
            outputs: The names that stand for its outputs, all of them wanted.

        Raises:
            UnsupportedError: IRC302 when the lowering declines it.
            UsageError: IRC318 when the shapes do not fit.
        """
        domain = domain_of(node)
        wants = wanted(node) if outputs is None else (True,) * len(outputs)
        attributes = _attributes(node) | self._held.attributes(node)
        version = version_of(self.model, domain)
        info = NodeInfo(node_name(node), node.op_type, domain, version, attributes, wants)
        self._apply(info, list(node.inputs if inputs is None else inputs), outputs or node.outputs)

    def apply(self, name: str, op: str, inputs: Sequence[ir.Value], **attributes: Attribute) -> ir.Value:
        """The result of an operator of the default domain that stands in no file."""
        output = ir.Value(name=name)
        version = version_of(self.model, "")
        self._apply(NodeInfo(name, op, "", max(version, 13), attributes, (True,)), list(inputs), [output])
        return output

    def part(self, node: ir.Node, lowering: Lowering, inputs: Sequence[ir.Value]) -> ir.Value:
        """The result of a part of a node, with the node's name and attributes."""
        domain, output = domain_of(node), ir.Value(name=node_name(node))
        version = version_of(self.model, domain)
        info = NodeInfo(node_name(node), node.op_type, domain, version, _attributes(node), (True,))
        self._apply(info, list(inputs), [output], lowering)
        return output

    def _apply(
        self,
        info: NodeInfo,
        inputs: list[ir.Value | None],
        outputs: Sequence[ir.Value],
        lowering: Lowering | None = None,
    ) -> None:
        lowering = lowering or find(info.domain, info.op, info.version)
        assert lowering is not None
        while inputs and (inputs[-1] is None or not inputs[-1].name):
            inputs.pop()
        values = [v if v is not None and v.name else None for v in inputs]
        node = _Applied(info, lowering, values, outputs)
        known = [None if v is None else self.known(v) for v in values]
        check_kinds(info, [None if k is None or k.tensor is None else k.tensor.dtype for k in known])
        try:
            if self._folds(info, known):
                self._fold(node, known)
                return
            if all(k is None or k.tensor is not None for k in known):
                self._trace(node)
                return
        except (NotConstant, DataDependentOutputException, DynamicOutputShapeException):
            pass
        self._decide_late(node)

    def _folds(self, info: NodeInfo, known: Sequence[PartialValue | None]) -> bool:
        if (info.domain != "" and info.op not in _UNPACK) or info.op in _LIVE:
            return False
        if any(k is not None and k.tensor is None for k in known):
            return False
        first = known[0] if known else None
        if info.op in _OF_SHAPES or (info.op == "CastLike" and first is not None and first.constant):
            return True
        return all(k is None or k.constant for k in known)

    def _fold(self, node: _Applied, known: Sequence[PartialValue | None]) -> None:
        info = node.info
        call = Call(
            info,
            [None if k is None else k.tensor for k in known],
            [_static(k) for k in known],
            [False] * len(known),
            True,
            lambda make: make(),
        )
        with Bounded(info.title, info.name, self.account.limit, self._fake):
            results = self._call(node.lowering, call)
        given = {_storage(k.tensor) for k in known if k is not None and k.constant and k.tensor is not None}
        for value, result in zip(node.outputs, results, strict=False):
            if result is not None:
                assert isinstance(result, Tensor)
                self.account.check(info.title, result.shape, nbytes(result), info.name)
                if _storage(result) not in given:
                    self.account.add(info.title, result.shape, nbytes(result), info.name)
                weight = (
                    self.initializers.unpacked(value, onnx_tensor(result)) if info.op in _UNPACK else None
                )
                self.bind(value, PartialValue(result) if weight is None else self._initializer(weight))

    def _trace(self, node: _Applied) -> None:
        info, lowering = node.info, node.lowering
        operands = [self.operand(v) for v in node.values]
        literals: list[int] = []

        def make_literal(make: Callable[[], Tensor]) -> Tensor:
            with unset_fake_temporarily(), Bounded(info.title, info.name, self.account.limit, self._fake):
                tensor = make().contiguous()
                self.account.add(info.title, tensor.shape, nbytes(tensor), info.name)
                literals.append(self._new_constant(tensor).index)
            return self._fake.from_tensor(tensor)

        known = [None if v is None else self.known(v) for v in node.values]
        call = Call(
            info,
            [self._faked(k) for k in known],
            [_static(k) for k in known],
            [o.kind == "weight" for o in operands],
            True,
            make_literal,
        )
        with self._fake, Bounded(info.title, info.name, MOST_BYTES, None):
            results = self._call(lowering, call)
        if info.op in _LIVE:
            # What only eval mode reads must be kept too.
            with self._fake:
                self._call(lowering, replace(call, training=False))
        self.as_tensors.update(
            o.index for i, o in enumerate(operands) if o.kind == "constant" and i in call.touched
        )
        self.as_tensors.update(literals)
        slots: list[int | None] = []
        for value, result, wants in zip(node.outputs, results, info.wanted, strict=False):
            if result is None or not wants:
                slots.append(None)
                continue
            assert isinstance(result, Tensor)
            if nbytes(result) > MOST_BYTES:
                raise too_large(
                    f"{info.title} makes a value of shape {list(result.shape)}: {nbytes(result):,} B, and at"
                    f" most {MOST_BYTES:,} B can run",
                    info.name,
                )
            slots.append(self._bind_new_slot(value, result))
        self.steps.append(NodeStep(info, lowering, tuple(operands), tuple(slots), tuple(literals)))

    def _faked(self, known: PartialValue | None) -> Tensor | None:
        if known is None or known.tensor is None:
            return None
        return known.tensor if isinstance(known.tensor, FakeTensor) else self._fake.from_tensor(known.tensor)

    def _bind_new_slot(self, value: ir.Value, tensor: Tensor | None) -> int:
        known = self.new_slot(tensor)
        assert known.operand is not None
        self.bind(value, known)
        return known.operand.index

    def _decide_late(self, node: _Applied) -> None:
        """A step whose sizes only a run tells; of its results nothing is known."""
        operands = tuple(self.tensor_operand(v) for v in node.values)
        results = self.new_results(node.outputs, node.info.wanted)
        self.steps.append(NodeStep(node.info, node.lowering, operands, results, decided_late=True))

    def new_results(
        self,
        outputs: Sequence[ir.Value],
        wanted: Sequence[bool],
        tensors: Sequence[Tensor | None] | None = None,
    ) -> tuple[int | None, ...]:
        """Slots for the results of a step; `None` for those that nothing reads."""
        types = tensors or [None] * len(outputs)
        return tuple(
            self._bind_new_slot(value, tensor) if wants else None
            for value, tensor, wants in zip(outputs, types, wanted, strict=True)
        )

    def _call(self, lowering: Lowering, call: Call) -> Sequence[Value]:
        try:
            result = lowering(call)
        except (IrcError, DataDependentOutputException, DynamicOutputShapeException):
            raise
        except NotImplementedError as error:
            call.refuse(f"here (torch: {first_line(error)})")
        except Exception as error:
            shapes = ", ".join(str(list(t.shape)) if isinstance(t, Tensor) else "-" for t in call.tensors)
            raise UsageError(
                "IRC318",
                f"{call.node.title} cannot take operands of shapes {shapes}: {first_line(error)}",
                at=Location(onnx_node=call.node.name),
                help="check the shapes given for the inputs against those the model was exported with",
            ) from error
        call.refuse_unread()
        return result if isinstance(result, tuple) else (result,)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _static(known: PartialValue | None) -> Static | None:
    if known is None or not known.constant:
        return None
    assert known.tensor is not None
    return Static.of(known.tensor)


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
