"""Translates a traced joint graph (torch.fx) into the IR: storages, regions, effects, gradients."""

# AOTAutograd and the autograd engine have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch._aot_autograd.schemas import JointWithDescriptors
from torch.utils import _pytree as pytree

from ...ir import (
    INDICES,
    STRIDED_VALUES,
    THROUGH_DYNAMO,
    VALUES,
    Argument,
    Delivery,
    Graph,
    Input,
    InputRole,
    Location,
    Node,
    Output,
    OutputRole,
    Region,
    Storage,
    Symbol,
    TensorType,
    Trait,
    UnsupportedError,
    Value,
    allocation_bytes,
)
from ...torch_support.arguments import constant_symbol
from ...torch_support.element_types import element_type
from ...torch_support.tensor_data import TENSOR_DATA
from ...torch_support.written_forms import in_place_form
from .fixups.refused_operations import DENSE_ALONE
from .fixups.tangent_layouts import is_expanded
from .generators import Generators
from .in_place import is_data, is_in_place
from .loss_terms import kept_bytes
from .node_traits import draws, ignores_statistics, operands_of, traits_of
from .place_annotations import Note, note_of
from .provenance import location_of
from .traced_results import ROLES, TracedResults, input_target
from .written_inputs import pinned_readers, refuse_stale_checkpoints, untrack_writes, written_in_steps

__all__ = ["Translation", "tensor_type", "translate", "unknown_object"]


@dataclass(frozen=True)
class Translation:
    """Holds the translation of a traced joint graph.

    Args:
        graph: The training graph.
        deliveries: The recipe for each tensor of the flat result.
        constants: Tensors that the graph refers to and that are not a parameter, buffer or input.
        notes: By the names of nodes, the stretches that annotations are about.
    """

    graph: Graph
    deliveries: tuple[Delivery, ...]
    constants: Mapping[str, Tensor]
    notes: Mapping[str, Note]


def tensor_type(tensor: Tensor) -> TensorType:
    """The IR type of a (fake or real) tensor."""
    return TensorType(
        tuple(int(size) for size in tensor.shape),
        element_type(tensor),
        tuple(int(stride) for stride in tensor.stride()),
        str(tensor.device),
    )


def translate(joint: JointWithDescriptors, generators: Generators) -> Translation:
    """The training graph of a joint graph that AOTAutograd traced from a flat module.

    Args:
        joint: The joint graph.
        generators: Those that the module may draw from.

    Raises:
        UnsupportedError: IRC334 for a value that is not a tensor, IRC335 for an operation outside the
            operator library, IRC336 for a write that autograd sees, IRC337 for an old value that is read,
            IRC554 for a checkpoint policy that moves results to the host.
    """
    return _Translator(joint, generators).run()


@dataclass
class _Translator:
    joint: JointWithDescriptors
    generators: Generators
    drawn_from: dict[fx.Node, Symbol | None] = field(default_factory=dict[fx.Node, Symbol | None])
    values: dict[fx.Node, Value] = field(default_factory=dict)
    tuples: dict[fx.Node, tuple[Value | None, ...]] = field(default_factory=dict)
    numbers: dict[fx.Node, int | float] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    referenced: list[Any] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    notes: dict[str, Note] = field(default_factory=dict)
    steps: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    """By each operation that writes an input as a whole, the input."""

    def run(self) -> Translation:
        untrack_writes(self.joint)
        traced = list(self.joint.graph_module.graph.nodes)
        results = TracedResults.of(traced[-1])
        self._find_steps(traced, results)
        drawn = list(filter(draws, traced))  # each moves a generator, whoever reads it
        drawn_first = [node for node in drawn if node.meta.get("partitioner_tag") != "is_backward"]
        results_of_forward = (node for node, _ in results.forward())
        forward = _needed([*results_of_forward, *drawn_first, *filter(_is_check, traced)])
        wanted = forward | _needed([*drawn, *(node for node, _ in results.gradients if node is not None)])
        for node in traced:
            if node.op in ("placeholder", "get_attr") and (node.op == "placeholder" or node in wanted):
                self._input(node)
        sparse = _sparse_gradients(results)
        calls = [n for n in traced if n.op == "call_function" and n in wanted and n not in sparse]
        refuse_stale_checkpoints(dict.fromkeys(node for node in calls if node in forward).keys())
        for region in Region:
            for node in calls:
                if (node in forward) == (region is Region.FORWARD):
                    self._call(node, region)
            if region is Region.FORWARD:
                self._write_back(results.mutations, calls, forward)
        self.nodes = pinned_readers(self.nodes)
        outputs, tangent_targets = self._outputs(results)
        inputs = tuple(
            _with_target(i, tangent_targets) if i.role is InputRole.TANGENT else i for i in self.inputs
        )
        graph = Graph(inputs, tuple(self.nodes), outputs)
        _check_old_values(graph)
        statics = [i.value for i in self.inputs if i.role is not InputRole.CONSTANT]
        deliveries = results.deliveries(self.joint, statics, self.values)
        return Translation(graph, deliveries, self.constants, self.notes)

    def _find_steps(self, traced: Iterable[fx.Node], results: TracedResults) -> None:
        inputs = {repr(node.meta["desc"]): node for node in traced if node.op == "placeholder"}
        tensors = (node.meta["val"] for node in inputs.values())
        shared = Counter(t.untyped_storage()._cdata for t in tensors if isinstance(t, Tensor))
        for new, described in results.mutations:
            old = inputs[repr(described)]
            handle = old.meta["val"].untyped_storage()
            is_alone = shared[handle._cdata] == 1  # a write counts as one into all of its storage
            if is_alone and not isinstance(described, BufferAOTInput):
                self.steps.update(dict.fromkeys(written_in_steps(new, old) or (), old))

    # ------------------------------------------------------------------ values and storages

    def _value(self, name: str, tensor: Tensor, node: fx.Node) -> Value:
        sizes: list[Any] = list(tensor.shape)
        if any(not isinstance(size, int) for size in sizes):
            raise UnsupportedError(
                "IRC334", f"the shape of {node.name} ({node.target}) is not fixed", at=location_of(node)
            )
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                "IRC334",
                f"{_described(node)} a {tensor.layout} tensor",
                help=DENSE_ALONE,
                at=location_of(node) or next(filter(None, map(location_of, node.users)), None),
            )
        handle = tensor.untyped_storage()
        self.referenced.append(handle)  # keeps the id unique
        device = str(tensor.device)
        if handle._cdata not in self.storages:
            read = (operand for operand in node.all_input_nodes if operand not in self.drawn_from)
            operands: list[Any] = [operand.meta["val"] for operand in read]
            kept = kept_bytes(str(node.target), operands, tensor)
            payload_bytes = max(int(handle.nbytes()), kept, self._cloned_bytes(node))
            nbytes = allocation_bytes(payload_bytes, device)
            self.storages[handle._cdata] = Storage(f"s{len(self.storages)}", nbytes, device)
        return Value(name, tensor_type(tensor), self.storages[handle._cdata])

    def _cloned_bytes(self, node: fx.Node) -> int:
        """Bytes of the storage that an operation copies as a whole, though its operand is a part of it."""
        if str(node.target) not in _CLONE_STORAGES:
            return 0
        operand: Any = node.args[0]
        value = self.values[operand]
        return 0 if is_expanded(value.type.shape, value.type.strides) else value.storage.nbytes

    def _input(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(self.joint.graph_module)
            if isinstance(tensor, torch.Generator):
                return self._generator(node, tensor)
            self._check_constant(node, tensor)
            for known in self.inputs:
                if known.role is InputRole.CONSTANT and self.constants[known.target] is tensor:
                    self.values[node] = known.value
                    return
            self.constants[node.name] = tensor
            value = self._value(node.name, tensor, node)
            self.inputs.append(Input(value, InputRole.CONSTANT, node.name))
        elif not isinstance(node.meta["desc"], ForwardTokenAOTInput | BackwardTokenAOTInput):
            described = node.meta["desc"]
            role = ROLES.get(type(described))
            if isinstance(described, ViewBaseAOTInput):
                raise UnsupportedError(
                    "IRC334",
                    "two arguments are views of one tensor, and the module writes into one of them",
                    help="pass copies (clone()), or the one tensor, and take the views in the forward",
                )
            if role is None or not isinstance(node.meta["val"], Tensor):
                raise UnsupportedError(
                    "IRC334", f"the traced module has an input of an unknown kind: {described!r}"
                )
            value = self._value(node.name, node.meta["val"], node)
            position = sum(i.role is not InputRole.CONSTANT for i in self.inputs)
            info = self.joint._aot_state.fw_metadata.input_info
            requires_grad = role is not InputRole.TANGENT and info[position].requires_grad
            self.inputs.append(Input(value, role, input_target(described), requires_grad))
        else:
            return
        self.values[node] = self.inputs[-1].value

    def _generator(self, node: fx.Node, found: torch.Generator) -> None:
        try:
            self.drawn_from[node] = self.generators.symbol_of(found)
        except LookupError:
            raise UnsupportedError(
                "IRC334",
                "the model draws from a generator that no attribute leads to, and not in the forward that "
                "makes it by torch.Generator()",
                at=next((location_of(user) for user in node.users), None),
                help=f"keep it in an attribute of the module, or pass it as an argument; or {THROUGH_DYNAMO}",
            ) from None

    def _check_constant(self, node: fx.Node, found: object) -> None:
        if isinstance(found, Tensor) and not found.requires_grad:
            return
        what = (
            f"a tensor of shape {list(found.shape)} that requires a gradient"
            if isinstance(found, Tensor)
            else f"an object of type {type(found).__name__}"
        )
        users = [location_of(user) for user in node.users]
        raise unknown_object(what, next(iter(users), None))

    # ------------------------------------------------------------------ operations

    def _call(self, node: fx.Node, region: Region) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node) and isinstance(index, int)
            element = self.tuples[source][index]
            if element is not None:
                self.values[node] = element
            elif isinstance(number := source.meta["val"][index], int | float):
                self.numbers[node] = number
            return
        if _is_check(node):
            return self._check_call(node, region)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise UnsupportedError(
                "IRC335",
                f"{node.target} is not an operation of the operator library",
                at=location_of(node),
                help="higher-order operations and symbolic arithmetic are not supported; rewrite the line",
            )
        results, is_sequence = self._results(node)
        operands = operands_of(node)
        arguments = tuple(self._argument(argument, node) for argument in operands)
        keywords = tuple((key, self._argument(value, node)) for key, value in node.kwargs.items())
        place = next((k for k, a in enumerate(operands) if a in self.drawn_from), len(operands))
        names = (each.name for each in node.target._schema.arguments[place : len(arguments)])
        arguments, keywords = arguments[:place], (*zip(names, arguments[place:], strict=True), *keywords)
        if (dtype := _own_default(node)) is not None:
            keywords = (
                *((k, v) for k, v in keywords if k != "dtype"),
                ("dtype", self._argument(dtype, node)),
            )
        operation = Node(
            name=node.name,
            op=str(node.target),
            arguments=arguments,
            keywords=keywords,
            results=results,
            is_sequence=is_sequence,
            region=region,
            at=location_of(node),
        )
        if (note := note_of(node)) is not None:
            self.notes[node.name] = note
        if node in self.steps:
            traits, op = frozenset({Trait.EFFECT}), in_place_form(operation.op)
            assert op is not None
            operation = replace(operation, op=op)
            if is_data(node):
                operation = self._into_data(operation)
        else:
            traits = traits_of(operation, node)
            if is_in_place(node) and Trait.VIEW not in traits:
                traits |= {Trait.IN_PLACE}
        self.nodes.append(replace(operation, traits=traits))
        if is_sequence:
            self.tuples[node] = results
        elif results[0] is not None:
            self.values[node] = results[0]

    def _into_data(self, write: Node) -> Node:
        before = write.operands[0]
        data = replace(before, name=f"{write.name}_data")
        view = frozenset({Trait.VIEW})
        self.nodes.append(Node(data.name, TENSOR_DATA, (before,), (data,), traits=view, at=write.at))
        return replace(write, arguments=(data, *write.arguments[1:]))

    def _check_call(self, node: fx.Node, region: Region) -> None:
        """An operation that returns nothing and raises on bad numbers, as on a matrix without inverse."""
        _, operation, *operands = node.args
        checks = Node(
            name=node.name,
            op=str(operation),
            arguments=tuple(self._argument(argument, node) for argument in operands),
            keywords=tuple((key, self._argument(value, node)) for key, value in node.kwargs.items()),
            results=(),
            region=region,
            traits=frozenset({Trait.PINNED}),
            at=location_of(node),
        )
        self.nodes.append(checks)
        self.tuples[node] = (None,)

    def _results(self, node: fx.Node) -> tuple[tuple[Value | None, ...], bool]:
        if node in self.steps:
            return (replace(self.values[self.steps[node]], name=node.name),), False
        traced = node.meta.get("val")
        self._share_storage(node, traced)
        if isinstance(traced, Tensor):
            return (self._value(node.name, traced, node),), False
        if isinstance(traced, (tuple, list)):
            elements: list[Value | None] = []
            for index, element in enumerate(traced):
                if element is not None and not isinstance(element, Tensor | int | float):
                    raise self._no_tensor(node, element)
                name = f"{node.name}.{index}"
                is_tensor = isinstance(element, Tensor)
                elements.append(self._value(name, element, node) if is_tensor else None)
            return tuple(elements), True
        raise self._no_tensor(node, traced)

    def _share_storage(self, node: fx.Node, traced: object) -> None:
        """Notes that a view lies in its operand's storage: a constant is traced as a copy without data.

        So is an input that is written, and what is written into it is traced as a tensor of its own.
        """
        base = (
            node.args[0] if isinstance(node.target, torch._ops.OpOverload) and node.target.is_view else None
        )
        if isinstance(base, fx.Node) and base in self.values:
            for view in pytree.tree_leaves(traced):
                handle = view.untyped_storage()
                self.referenced.append(handle)  # keeps the id unique
                self.storages[handle._cdata] = self.values[base].storage

    def _no_tensor(self, node: fx.Node, found: object) -> UnsupportedError:
        return UnsupportedError(
            "IRC334",
            f"{node.target} returns {type(found).__name__}, not a tensor: "
            "the model reads a value while it runs",
            at=location_of(node),
            help="keep the computation in tensors (no .item(), no branch on data)",
        )

    def _argument(self, argument: Any, node: fx.Node) -> Argument:
        match argument:
            case fx.Node() if argument in self.numbers:
                return self.numbers[argument]
            case fx.Node():
                return self.drawn_from[argument] if argument in self.drawn_from else self.values.get(argument)
            case tuple() | list():
                return tuple(self._argument(item, node) for item in argument)
            case None | bool() | int() | float() | complex() | str():
                return argument
            case _:
                symbol = constant_symbol(argument)
                if symbol is not None:
                    return symbol
                raise UnsupportedError(
                    "IRC334",
                    f"{node.target} takes an argument of type {type(argument).__name__}, "
                    "which has no place in a plan",
                    at=location_of(node),
                )

    # ------------------------------------------------------------------ mutated inputs

    def _write_back(
        self, mutations: Iterable[tuple[fx.Node, Any]], calls: list[fx.Node], forward: set[fx.Node]
    ) -> None:
        """Writes new values into mutated buffers, each right after the last read of the old one.

        Whatever reads the old value is pinned (it cannot be recomputed after the write), but for
        BatchNorm in training, whose normalised result does not depend on the running statistics.
        Backward gets a copy of an old value that it reads.
        """
        by_target = {(i.role, i.target): i for i in self.inputs}
        placeholders = {value: node for node, value in self.values.items() if node.op == "placeholder"}
        read_by_backward = {read for n in calls if n not in forward for read in n.all_input_nodes}
        read = {v for n in self.nodes if Trait.EFFECT not in n.traits for v in n.operands}
        by_name: dict[str, Node] = {}
        touching: dict[Storage | Value, list[str]] = {}
        """The nodes that read each storage, or make each value."""

        def note(node: Node) -> None:
            by_name[node.name] = node
            for touched in dict.fromkeys((*(v.storage for v in node.operands), *node.values)):
                touching.setdefault(touched, []).append(node.name)

        for node in self.nodes:
            note(node)
        for new_node, described in mutations:
            old = by_target[ROLES[type(described)], input_target(described)]
            new = self.values[new_node]
            if new.storage is old.value.storage:
                continue
            placeholder = placeholders[old.value]
            if placeholder in read_by_backward and not old.requires_grad:
                self.values[placeholder] = self._copy_of(old.value)
                note(self.nodes[0])
            last = -1
            for name in (*touching.get(old.value.storage, ()), *touching.get(new, ())):
                reader = by_name[name]
                index = self.nodes.index(reader)
                last = max(last, index)
                reads_old = any(v.storage is old.value.storage for v in reader.operands)
                if reads_old and not reader.is_view and not ignores_statistics(reader, read):
                    self.nodes[index] = by_name[name] = replace(reader, traits=reader.traits | {Trait.PINNED})
            write = Node(
                name=f"write_{old.value.name}",
                op="aten.copy_.default",
                arguments=(old.value, new),
                results=(),
                traits=frozenset({Trait.EFFECT}),
            )
            self.nodes.insert(last + 1, write)
            note(write)

    def _copy_of(self, value: Value) -> Value:
        storage = self._new_storage(value.type)
        copy = Value(f"{value.name}_old", value.type, storage)
        self.nodes.insert(0, Node(copy.name, "aten.clone.default", (value,), (copy,)))
        return copy

    def _new_storage(self, type: TensorType) -> Storage:
        storage = Storage(f"s{len(self.storages)}", allocation_bytes(type.nbytes, type.device), type.device)
        self.storages[-len(self.storages)] = storage
        return storage

    # ------------------------------------------------------------------ results

    def _outputs(self, results: TracedResults) -> tuple[tuple[Output, ...], dict[str, str]]:
        outputs: list[Output] = []
        tangent_targets: dict[str, str] = {}
        for node, described in results.delivered(self.joint):
            tangent_targets[repr(described)] = str(len(outputs))
            outputs.append(Output(self.values[node], OutputRole.OUTPUT, str(len(outputs))))
        by_target = {(i.role, i.target): i for i in self.inputs}
        owned: set[Storage] = {i.value.storage for i in self.inputs} | {
            o.value.storage for o in outputs if o.value
        }
        of_others = frozenset(owned)
        sparse = _sparse_gradients(results)
        for node, described in results.gradients:
            of = by_target[ROLES[type(described.grad_of)], input_target(described.grad_of)]
            target = f"{of.role.value}:{of.target}"
            if node is not None and node in sparse:
                outputs.extend(self._sparse_gradient(node, target, of_others))
                continue
            value = None if node is None else self.values.get(node)
            if value is not None:
                if value.storage in owned or not _accumulates_in_place(value, of.value):
                    value = self._own_gradient(value, of.value)
                owned.add(value.storage)
            outputs.append(Output(value, OutputRole.GRADIENT, target))
        return tuple(outputs), tangent_targets

    def _sparse_gradient(self, node: fx.Node, target: str, of_others: Set[Storage]) -> Iterator[Output]:
        """The parts of a sparse gradient, which the engine takes as they are, or copies for strided values.

        It takes values in memory of others too, which would be theirs to write.
        """
        parts: Any = node.args[3:5]
        indices, values = (self.values[part] for part in parts)
        is_strided = not parts[1].meta["val"].is_contiguous()
        if is_strided or values.storage in of_others:
            values = self._own_gradient(values, values)
        if is_strided:
            indices = self._own_gradient(indices, indices)
        yield Output(indices, OutputRole.GRADIENT, target, INDICES)
        yield Output(values, OutputRole.GRADIENT, target, STRIDED_VALUES if is_strided else VALUES)

    def _own_gradient(self, gradient: Value, of: Value) -> Value:
        """A copy of a gradient that shares memory with something else, in the layout of what it belongs to.

        The autograd engine would make the same copy, unseen, when it accumulates the gradient.
        """
        contiguous = TensorType.contiguous(gradient.type.shape, gradient.type.dtype, gradient.type.device)
        channels_last = len(of.type.shape) == 4 and of.type.strides[1] == 1 and of.type != contiguous
        own_type = replace(contiguous, strides=of.type.strides) if channels_last else contiguous
        value = Value(f"{gradient.name}_own_{len(self.storages)}", own_type, self._new_storage(own_type))
        memory_format = Symbol("memory_format", "channels_last" if channels_last else "contiguous_format")
        clone = Node(
            name=value.name,
            op="aten.clone.default",
            arguments=(gradient,),
            keywords=(("memory_format", memory_format),),
            results=(value,),
            region=Region.BACKWARD,
        )
        produced = (index for index, node in enumerate(self.nodes) if gradient in node.values)
        self.nodes.insert(next(produced, len(self.nodes) - 1) + 1, clone)
        return value


_CLONE_STORAGES = (
    "aten.copy.default",
    "aten.slice_scatter.default",
    "aten.select_scatter.default",
    "aten.diagonal_scatter.default",
    "aten.as_strided_scatter.default",
)


def _described(node: fx.Node) -> str:
    """The subject and the verb of a sentence on what a node is, in words of the user's."""
    described: Any = node.meta.get("desc")
    role = ROLES.get(type(described))
    if node.op != "placeholder" or role is None:
        return f"{node.target} makes"
    target = input_target(described)
    return "the gradient of a result is" if role is InputRole.TANGENT else f"{role.value} {target} is"


def _needed(results: Iterable[object]) -> set[fx.Node]:
    """The nodes that `results` depend on, themselves included."""
    found: set[fx.Node] = set()
    pending = [node for node in results if isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _own_default(node: fx.Node) -> torch.dtype | None:
    """Returns the dtype of what a factory makes, if the forward has set another default for it meanwhile."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor) or node.all_input_nodes or node.kwargs.get("dtype") is not None:
        return None
    takes_dtype = any(argument.name == "dtype" for argument in node.target._schema.arguments)  # pyright: ignore
    is_other = tensor.dtype.is_floating_point and tensor.dtype is not torch.get_default_dtype()
    return tensor.dtype if takes_dtype and is_other else None


def unknown_object(what: str, at: Location | None) -> UnsupportedError:
    """The error of a module that reads an object which is not a parameter, a buffer or an input of it."""
    return UnsupportedError(
        "IRC334",
        f"the module reads {what}, which is not a parameter, buffer or input of it",
        at=at,
        help="register it as a parameter, or pass it as an argument; where a backward of your own "
        f"(torch.autograd.Function) runs autograd, {THROUGH_DYNAMO}",
    )


def _is_check(node: fx.Node) -> bool:
    """Whether a traced node runs an operation that returns nothing, for what it does."""
    if node.target is not torch.ops.higher_order.with_effects:
        return False
    operation: Any = node.args[1]
    return isinstance(operation, torch._ops.OpOverload) and not operation._schema.returns


def _sparse_gradients(results: TracedResults) -> set[fx.Node]:
    """The sparse gradients that embeddings make, which nothing else reads: a plan holds their parts alone."""
    gradients = (node for node, _ in results.gradients if node is not None)
    return {
        node
        for node in gradients
        if node.target is torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
        and node.kwargs.get("is_coalesced") is None
        and all(user.op == "output" for user in node.users)
    }


def _accumulates_in_place(gradient: Value, of: Value) -> bool:
    """Whether the engine takes `gradient` as `.grad` without a copy: same layout, whole storage."""
    steps = zip(gradient.type.shape, gradient.type.strides, of.type.strides, strict=True)
    same_layout = all(mine == its for size, mine, its in steps if size > 1)
    return same_layout and gradient.storage.nbytes <= allocation_bytes(
        gradient.type.nbytes, gradient.type.device
    )


def _with_target(tangent: Input, targets: Mapping[str, str]) -> Input:
    """The tangent with the index of the forward output that it is the gradient of."""
    if tangent.target not in targets:
        raise UnsupportedError(
            "IRC336",
            f"a gradient flows into {tangent.target}, which is not an output of the module",
            help="do not write into tensors that require a gradient",
        )
    return replace(tangent, target=targets[tangent.target])


def _check_old_values(graph: Graph) -> None:
    """Refuses a graph that reads, perhaps through a view, numbers that the forward has overwritten."""
    names = {entry.value.storage: f"{entry.role.value} {entry.target}" for entry in graph.inputs}
    last: dict[Storage, Value | None] = {}
    bases: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.is_view:
            pairs = ((view, each) for view in node.values for each in node.operands)
            bases |= {view: bases.get(each, each) for view, each in pairs if view.storage is each.storage}
            continue
        for value in node.operands:
            storage = value.storage
            if storage in last and bases.get(value, value) is not last[storage]:
                raise UnsupportedError(
                    "IRC337",
                    f"the gradient of {node.op} reads {names[storage]}, which the forward overwrites",
                    at=node.at,
                    help="read from a copy of it (clone()) before it is written",
                )
        if Trait.EFFECT in node.traits:
            last[node.operands[0].storage] = node.values[0] if node.values else None
