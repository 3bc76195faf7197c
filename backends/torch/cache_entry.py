"""An entry of the plan cache: a compiled plan bound to a module, with the guards that tell its calls."""

# torch has no public way to the tables of a module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ir import Input, InputRole, Slot, Symbol
from ...ir.scalars import evaluate, leaves_of
from ...torch_support.overlaps import is_same_memory, overlap
from ...torch_support.packed_weights import packed_weight
from ...torch_support.scripted import ScriptTable, is_scripted
from .attribute_paths import AttributePath, held_at
from .compiled_plan import CompiledPlan
from .guards.call_key import CallKey
from .guards.dynamo_call import is_number
from .guards.guard_failure import (
    GuardFailure,
    attribute_failure,
    autocast_failure,
    constant_failure,
    forward_failure,
    generators_failure,
    nesting_failure,
    packed_failure,
    sharing_failure,
    state_failure,
    tensor_failure,
)
from .guards.module_state import CodeWatch, Reads, attribute, has, is_equal
from .guards.settings import is_same
from .refuse_wrappers import refuse_subclass

__all__ = ["CacheEntry", "Explain", "check_tensor"]


Explain = Callable[[], GuardFailure]
"""Describes how a call differs. It is rarely called, as another plan is for the call most often."""

_PLAIN = (nn.Parameter, Tensor)

_LENGTHS = 256
"""The number of lengths for which a plan keeps its types."""

_Type = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


class CacheEntry:
    """A compiled plan bound to a module.

    Args:
        compiled: The plan.
        module: The module whose parameters and buffers it uses.
    """

    def __init__(self, compiled: CompiledPlan, module: nn.Module) -> None:
        self.compiled = compiled
        self._reads = Reads({}, compiled.reads)
        self._code = CodeWatch(compiled.code_reads)
        self._state = compiled.state
        """The state of the submodules that was last found to match."""
        self._inputs: list[Any] = []
        """The program's inputs, with None for those that are looked up in each call."""
        self._module_inputs: list[tuple[int, Mapping[str, Tensor | None], str, _Type]] = []
        """The index of each parameter and buffer among the inputs, its table in the module, and its name."""
        self._arguments: list[tuple[int, int, _Type]] = []
        """The index of each argument among the inputs, and its index among the tensors of the arguments."""
        self._attributes: list[tuple[int, AttributePath, _Type]] = []
        """The index among the inputs of each tensor in an attribute of the module, and its path."""
        self._packed: defaultdict[tuple[nn.Module, str, str], list[tuple[int, str, _Type]]] = defaultdict(
            list
        )
        """The layer of each packed weight, its name there and in the module, with its parts' indices."""
        for index, static in enumerate(compiled.program.statics):
            self._inputs.append(self._add_input(index, static, module))
        leaves = enumerate(compiled.signature.leaves)
        self._generators: list[tuple[str, int | AttributePath]] = [
            *((leaf.name, k) for k, leaf in leaves if isinstance(leaf, Symbol) and leaf.kind == "generator"),
            *compiled.generator_paths,
        ]
        """The places of the generators of the user's in a call, by their names: arguments and attributes."""
        self._at_lengths: dict[int, tuple[CompiledPlan, list[tuple[int, int, _Type]]]] = {}
        """The plan at lengths that it ran, with its arguments as `_arguments`."""
        self._free = compiled.free.places
        planned = compiled.signature.leaves
        self._numbers = [(each, type(evaluate(each, planned))) for each in compiled.free.expressions]
        """The scalar operands that come with a call, with their types."""
        self._counted = [each for each in compiled.signature.assignments if each.number is not None]
        self._found = {index: (table, name) for index, table, name, _ in self._module_inputs}
        self.shared = self._inputs_that_share_memory()
        written = {k: compiled.program.statics[k].role is InputRole.INPUT for k in compiled.program.written}
        self.written = [index for index, is_argument in written.items() if is_argument]
        self._written_by_forward = [index for index, is_argument in written.items() if not is_argument]
        """The buffers that are written."""

    def _add_input(self, index: int, static: Input, module: nn.Module) -> Tensor | None:
        """Records the source of an input in a call; returns the tensor if all calls have the same."""
        wanted = self._type_in_call(index, static)
        match static.role:
            case InputRole.PARAMETER | InputRole.BUFFER:
                path, _, name = static.target.rpartition(".")
                owner = module.get_submodule(path)
                if static.part:
                    self._packed[owner, name, static.target].append((index, static.part, wanted))
                    return None
                is_parameter = static.role is InputRole.PARAMETER
                table: Mapping[str, Tensor | None] = owner._parameters if is_parameter else owner._buffers
                if is_scripted(owner):
                    table = ScriptTable(table)
                self._module_inputs.append((index, table, name, wanted))
                return None
            case InputRole.INPUT:
                self._arguments.append((index, int(static.target), wanted))
                return None
            case _:
                path = (self.compiled.attribute_paths or {}).get(static.target)
                if path is None:
                    return self.compiled.program.constants[static.target]
                self._attributes.append((index, path, wanted))
                return None

    def _type_in_call(self, index: int, static: Input) -> _Type:
        """Returns the type of an input when a call begins: the forward may switch its `requires_grad`."""
        shape, strides, dtype, device, requires_grad = _type_of(static)
        requires_grad ^= index in self.compiled.signature.switched
        return shape, strides, dtype, device, requires_grad

    def _inputs_that_share_memory(self) -> list[list[int]]:
        """Groups the inputs by storage, without parameters whose gradients are released.

        `check_parameters` looks at those.
        """
        program = self.compiled.program
        indices: defaultdict[object, list[int]] = defaultdict(list)
        for index, static in enumerate(program.statics):
            indices[static.value.storage].append(index)
        released = {k for at in program.released.values() for k in (at.index, *at.tied)}
        return [group for group in indices.values() if len(group) > 1 and not released.issuperset(group)]

    def parameter(self, index: int) -> Tensor:
        """Returns the parameter or buffer that the program's input `index` binds."""
        table, name = self._found[index]
        found = table[name]
        assert found is not None
        return found

    def bind(self, call: CallKey) -> list[Tensor] | Explain:
        """Returns the program's inputs in a call, or a function that describes how the call differs.

        Raises:
            UnsupportedError: IRC531 for a parameter or buffer of a class that takes over operations.
        """
        return (
            self._check_forward(call)
            or self._check_arguments(call)
            or self._check_state(call)
            or self._bind(call)
        )

    def compiled_for(self, inputs: Sequence[Any]) -> CompiledPlan:
        """Returns the plan for the call whose inputs `bind` returned last."""
        return self.compiled if self.compiled.lengths is None else self._at(inputs[-1])[0]

    def _at(self, length: int) -> tuple[CompiledPlan, list[tuple[int, int, _Type]]]:
        """Returns the plan at a length, and the arguments that it takes."""
        if length not in self._at_lengths:
            if len(self._at_lengths) >= _LENGTHS:
                self._at_lengths.clear()
            compiled = self.compiled.at(length)
            statics = compiled.program.statics
            arguments = [
                (index, argument, self._type_in_call(index, statics[index]))
                for index, argument, _ in self._arguments
            ]
            self._at_lengths[length] = compiled, arguments
        return self._at_lengths[length]

    def _length(self, call: CallKey) -> int | None:
        """Returns the length of a call, if the plan is for it."""
        lengths = self.compiled.lengths
        assert lengths is not None
        length = lengths.family.length_of(call.tensors)
        return length if length is not None and lengths.first <= length <= lengths.last else None

    def distance(self, call: CallKey) -> float:
        """The number of arguments in which a call differs; infinite if it nests them otherwise.

        So it is for a call of another forward.
        """
        signature = self.compiled.signature
        if call.tree != signature.in_tree or self._check_forward(call):
            return math.inf
        constants = sum(1 for _ in self._differing_leaves(call))
        if constants:
            return 1000 + constants  # a number decides more than a shape
        return sum(not _is_of(call.tensors[argument], wanted) for _, argument, wanted in self._arguments)

    def shapes_of(self, name: str, call: CallKey) -> Iterator[Sequence[int]]:
        """Yields the shapes of an argument as planned and in a call, if the arguments nest alike."""
        if call.tree == self.compiled.signature.in_tree:
            for index, argument, (shape, *_) in self._arguments:
                if _name(self.compiled.program.statics[index]) == name:
                    yield from (shape, call.tensors[argument].shape)

    def varying_numbers(self, call: CallKey) -> frozenset[int]:
        """Returns the indices of numbers that differ in a call, or may; none if other constants do too."""
        if call.tree != self.compiled.signature.in_tree or self._check_forward(call):
            return frozenset()
        found = frozenset(self._differing_leaves(call))
        planned = self.compiled.signature.leaves
        are_numbers = all(is_number(planned[k]) and type(call.leaves[k]) is type(planned[k]) for k in found)
        return found | self._free if are_numbers else frozenset()

    # ------------------------------------------------------------------ guards

    def _differing_leaves(self, call: CallKey) -> Iterator[int]:
        """Yields the indices of leaves that are other constants than planned, if the arguments nest alike."""
        for place, (leaf, wanted) in enumerate(zip(call.leaves, self.compiled.signature.leaves, strict=True)):
            is_free = place in self._free and type(leaf) is type(wanted)
            if not is_free and not _is_as_planned(leaf, wanted):
                yield place

    def _check_forward(self, call: CallKey) -> Explain | None:
        planned = self.compiled.forward
        return None if is_same(call.forward, planned) else partial(forward_failure, call.forward, planned)

    def _check_arguments(self, call: CallKey) -> Explain | None:
        signature = self.compiled.signature
        if call.tree != signature.in_tree:
            return partial(nesting_failure, call.tree, signature.in_tree)
        for place in self._differing_leaves(call):
            return partial(self._constant_failure, call, place)
        arguments = self._arguments
        if self.compiled.lengths is not None:
            length = self._length(call)
            if length is None:
                place = self.compiled.lengths.family.argument
                index = next(
                    (index for index, argument, _ in arguments if argument == place), arguments[0][0]
                )
                return partial(self._tensor_failure, index, call.tensors[place])
            arguments = self._at(length)[1]
        for index, argument, wanted in arguments:
            if not _is_of(call.tensors[argument], wanted):
                return partial(self._tensor_failure, index, call.tensors[argument])
        return None

    def _check_state(self, call: CallKey) -> Explain | None:
        now, planned = call.module_state.state, self.compiled.state
        if now is not planned and now is not self._state:
            if not self.compiled.is_for(now):
                return partial(state_failure, call.module_state, planned, self.compiled.names)
            self._state = now
        for each in self._counted:
            held = vars(call.root.get_submodule(each.module) if each.module else call.root)
            if type(held.get(each.name)) is not type(each.before):
                path = f"{each.module}.{each.name}".strip(".")
                return partial(attribute_failure, _attribute(path), attribute(held, each.name), each.before)
        if call.autocast != self.compiled.signature.autocast:
            return partial(autocast_failure, call.autocast, self.compiled.signature.autocast)
        if (changed := self._code.differing()) is not None:
            return partial(attribute_failure, *changed, use="the forward's code names")
        return None if self._reads.holds(vars(call.root)) else self._check_attributes(call)

    def _check_attributes(self, call: CallKey) -> Explain | None:
        held = vars(call.root)
        for name, planned in self.compiled.reads:
            if not has(held, ((name, planned),)):
                return partial(attribute_failure, _attribute(name), attribute(held, name), planned)
        self._reads = Reads(held, self.compiled.reads)
        return None

    def _check_sharing(self, inputs: Sequence[Tensor]) -> Explain | None:
        """Checks that one storage has not become several, and that nothing shares memory that is written.

        Parts of one tensor are planned together if they have no element in common: no other plan is made.
        """
        for indices in self.shared:
            first = _address(inputs[indices[0]])
            for index in indices[1:]:
                if _address(inputs[index]) != first:
                    return partial(sharing_failure, self._names(indices[0], index), shares=False)
        for written in self.written:
            address = _address(inputs[written])
            together = next((indices for indices in self.shared if written in indices), [written])
            for index, other in enumerate(inputs):
                is_near = index != written and other.numel() and _address(other) == address
                if is_near and (index not in together or overlap(inputs[written], other)):
                    return partial(sharing_failure, self._names(written, index), shares=True)
        if self._written_by_forward and self._arguments:
            places = {_address(inputs[index]): index for index in self._written_by_forward}
            for index, _, _ in self._arguments:
                written = places.get(_address(inputs[index]))
                if written is not None and inputs[index].numel() and not self._are_together(written, index):
                    return partial(sharing_failure, self._names(written, index), shares=True)
        return None

    def _are_together(self, *indices: int) -> bool:
        return any(set(indices) <= set(group) for group in self.shared)

    # ------------------------------------------------------------------ binding

    def _bind(self, call: CallKey) -> list[Tensor] | Explain:
        inputs = self._inputs.copy()
        for index, path, wanted in self._attributes:
            tensor = held_at(call.root, path)
            if not isinstance(tensor, Tensor) or not _is_of(tensor, wanted):
                return partial(self._tensor_failure, index, tensor if isinstance(tensor, Tensor) else None)
            inputs[index] = tensor
        for index, table, name, (shape, strides, dtype, device, requires_grad) in self._module_inputs:
            tensor = table.get(name)
            if tensor is not None and type(tensor) not in _PLAIN:
                self._check_class(index, tensor, call.root)
            if (  # `_is_of`, without a call for each parameter
                tensor is None
                or tensor.shape != shape
                or tensor.stride() != strides
                or tensor.dtype is not dtype
                or tensor.requires_grad is not requires_grad
                or tensor.device != device
            ):
                return partial(self._tensor_failure, index, tensor)
            inputs[index] = tensor
        if self._packed and (explain := self._bind_packed(inputs)) is not None:
            return explain
        for index, argument, _ in self._arguments:
            inputs[index] = call.tensors[argument]
        for argument, index in self.compiled.signature.same:
            if not is_same_memory(call.tensors[argument], inputs[index]):
                names = f"input {argument}", _name(self.compiled.program.statics[index])
                return partial(sharing_failure, names, shares=False)
        for index, name, wanted in self.compiled.tensor_reads:
            if not has(held := vars(inputs[index]), ((name, wanted),)):
                path = f"{_name(self.compiled.program.statics[index])}.{name}"
                return partial(attribute_failure, _attribute(path), attribute(held, name), wanted)
        if failure := self._check_sharing(inputs):
            return failure
        if self._generators or self.compiled.program.generators:
            generators = self._bind_generators(call)
            if generators is None:
                return generators_failure
            inputs += generators
        for expression, kind in self._numbers:
            try:
                number = evaluate(expression, call.leaves)
            except (ArithmeticError, ValueError):
                number = None
            if type(number) is not kind:
                return partial(self._constant_failure, call, min(leaves_of(expression)))
            inputs.append(number)
        if self.compiled.lengths is not None:
            inputs.append(self._length(call))
        return inputs

    def _check_class(self, index: int, tensor: Tensor, root: nn.Module) -> None:
        static = self.compiled.program.statics[index]
        path, _, name = static.target.rpartition(".")
        if packed_weight(root.get_submodule(path), name) is None:
            refuse_subclass(tensor, static.role.value, static.target)

    def _bind_packed(self, inputs: list[Any]) -> Explain | None:
        """Sets the inputs that are parts of packed weights, unless those are packed in another way now."""
        for (layer, name, target), parts in self._packed.items():
            weight = packed_weight(layer, name)
            if weight is None or weight.form() != self.compiled.packed_forms[target]:
                return partial(packed_failure, target)
            found = weight.parts()
            for index, part, wanted in parts:
                if not _is_of(found[part], wanted):
                    return partial(self._tensor_failure, index, found[part])
                inputs[index] = found[part]
        return None

    def _bind_generators(self, call: CallKey) -> list[Any] | None:
        """Returns the generators of a call; None unless they are one where they were one, and several else.

        A generator without a place is that of the plan.
        """
        found: dict[str, torch.Generator] = {}
        for name, place in self._generators:
            held: object = call.leaves[place] if isinstance(place, int) else held_at(call.root, place)
            if not isinstance(held, torch.Generator) or not name.endswith(f"@{held.device}"):
                return None
            if found.setdefault(name, held) is not held:
                return None
        planned = self.compiled.program.generators
        found = {**planned, **found}
        own = {torch.default_generator, *torch.cuda.default_generators}
        if len(set(found.values())) < len(found):
            return None
        if any((found[name] in own) != (planned[name] in own) for name in planned):
            return None
        return [found[name] for name in planned]

    def _constant_failure(self, call: CallKey, place: int) -> GuardFailure:
        wanted = self.compiled.signature.leaves[place]
        return constant_failure(call.name_of(place), call.leaves[place], wanted)

    def _tensor_failure(self, index: int, tensor: Tensor | None) -> GuardFailure:
        static = self.compiled.program.statics[index]
        return tensor_failure(_name(static), tensor, static)

    def _names(self, *indices: int) -> tuple[str, str]:
        first, second = (_name(self.compiled.program.statics[index]) for index in indices)
        return first, second


def _is_as_planned(leaf: object, wanted: object) -> bool:
    """Whether a leaf of the arguments is a tensor where one was planned, or else the same constant."""
    if isinstance(wanted, Slot) or isinstance(leaf, Tensor):
        return isinstance(wanted, Slot) and isinstance(leaf, Tensor)
    if isinstance(wanted, Symbol) and isinstance(leaf, torch.Generator):
        return wanted.name.endswith(f"@{leaf.device}")
    return leaf is wanted or (type(leaf) is type(wanted) and is_equal(leaf, wanted))


def _type_of(static: Input) -> _Type:
    wanted = static.value.type
    dtype: torch.dtype = getattr(torch, wanted.dtype.value)
    return torch.Size(wanted.shape), wanted.strides, dtype, torch.device(wanted.device), static.requires_grad


def _is_of(tensor: Tensor, wanted: _Type) -> bool:
    shape, strides, dtype, device, requires_grad = wanted
    return (
        tensor.shape == shape
        and tensor.stride() == strides
        and tensor.dtype is dtype
        and tensor.device == device
        and tensor.requires_grad is requires_grad
    )


def check_tensor(tensor: Tensor, static: Input) -> None:
    """Refuses a tensor of another type than the plan was made for.

    Raises:
        IrcError: IRC503 if only one of the tensor and the planned one requires a gradient; IRC501 for another
            shape, layout, element type or device.
    """
    if not _is_of(tensor, _type_of(static)):
        raise tensor_failure(_name(static), tensor, static).error()


def _name(static: Input) -> str:
    return f"{static.role.value} {static.label}"


def _attribute(path: str) -> str:
    return f"attribute {path!r}"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
