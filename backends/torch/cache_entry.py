"""A planned step in one module: for which calls it is, and where it finds its tensors."""

# torch's modules have no other door to what they hold.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ir import Input, InputRole, Slot
from .attribute_paths import Place, at
from .compiled_plan import CompiledPlan
from .guards.call_key import (
    CallKey,
    GuardFailure,
    other_attribute,
    other_autocast,
    other_constant,
    other_nesting,
    other_sharing,
    other_state,
    other_tensor,
)
from .guards.module_state import Reads, attribute, has, is_equal
from .wrappers import refuse_subclass

__all__ = ["CacheEntry", "Explain", "check_tensor"]


Explain = Callable[[], GuardFailure]
"""Tells how a call differs; most often nobody asks, because another plan is for it."""

_PLAIN = (nn.Parameter, Tensor)

_Type = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


class CacheEntry:
    """A fitting in a module.

    Args:
        fitting: What was planned.
        module: Where it finds its parameters and buffers.
    """

    def __init__(self, fitting: CompiledPlan, module: nn.Module) -> None:
        self.fitting = fitting
        self._reads = Reads({}, fitting.reads)
        program = fitting.program
        self._state = fitting.state
        """The state of the submodules that was last found to be right, too."""
        self._inputs: list[Any] = []
        """The program's inputs, with None for what is looked up in each call."""
        self._held: list[tuple[int, Mapping[str, Tensor | None], str, _Type]] = []
        """Place among the inputs, and where the parameter or buffer is found."""
        self._given: list[tuple[int, int, _Type]] = []
        """Place among the inputs, and place among the tensors of the arguments."""
        self._placed: list[tuple[int, Place, _Type]] = []
        """Place among the inputs, and where the module holds a tensor that is none of its buffers."""
        for index, static in enumerate(program.statics):
            wanted = _type_of(static)
            constant = None
            match static.role:
                case InputRole.PARAMETER | InputRole.BUFFER:
                    path, _, name = static.target.rpartition(".")
                    owner = module.get_submodule(path)
                    is_parameter = static.role is InputRole.PARAMETER
                    held = owner._parameters if is_parameter else owner._buffers
                    self._held.append((index, held, name, wanted))
                case InputRole.INPUT:
                    self._given.append((index, int(static.target), wanted))
                case _:
                    constant = program.constants[static.target]
                    place = (fitting.places or {}).get(static.target)
                    if place is not None:
                        constant = None
                        self._placed.append((index, place, wanted))
            self._inputs.append(constant)
        self._found = {place: (held, name) for place, held, name, _ in self._held}
        storages: defaultdict[object, list[int]] = defaultdict(list)
        for index, static in enumerate(program.statics):
            storages[static.value.storage].append(index)
        # `check_parameters` looks at parameters whose gradients are released
        released = {k for at in program.released.values() for k in (at.index, *at.tied)}
        self.sharing = [k for k in storages.values() if len(k) > 1 and not released.issuperset(k)]
        self.written = [k for k in program.written if program.statics[k].role is InputRole.INPUT]

    def held(self, index: int) -> Tensor:
        """The parameter that the program's input `index` binds."""
        held, name = self._found[index]
        found = held[name]
        assert found is not None
        return found

    def bind(self, call: CallKey) -> list[Tensor] | Explain:
        """The program's inputs in a call, or what tells why it is not for this call.

        Raises:
            UnsupportedError: IRC531 for a parameter or buffer of a class that takes over operations.
        """
        return self._other_arguments(call) or self._other_state(call) or self._bind(call)

    def _other_arguments(self, call: CallKey) -> Explain | None:
        signature = self.fitting.signature
        if call.tree != signature.in_tree:
            return partial(other_nesting, call.tree, signature.in_tree)
        for leaf, wanted in zip(call.leaves, signature.leaves, strict=True):
            if isinstance(wanted, Slot):
                same = isinstance(leaf, Tensor)
            elif isinstance(leaf, Tensor):
                same = False
            else:
                same = leaf is wanted or (type(leaf) is type(wanted) and is_equal(leaf, wanted))
            if not same:
                return partial(other_constant, leaf, wanted)
        for place, index, wanted in self._given:
            if not _is_of(call.tensors[index], wanted):
                return partial(self._other_tensor, place, call.tensors[index])
        return None

    def _other_tensor(self, place: int, tensor: Tensor | None) -> GuardFailure:
        static = self.fitting.program.statics[place]
        return other_tensor(_name(static), tensor, static)

    def _other_state(self, call: CallKey) -> Explain | None:
        now, planned = call.snapshot.state, self.fitting.state
        if now is not planned and now is not self._state:
            if not self.fitting.is_for(now):
                return partial(other_state, call.snapshot, planned, self.fitting.names)
            self._state = now
        if call.autocast != self.fitting.signature.autocast:
            return partial(other_autocast, call.autocast, self.fitting.signature.autocast)
        return None if self._reads.holds(vars(call.root)) else self._other_read(call)

    def _other_read(self, call: CallKey) -> Explain | None:
        held = vars(call.root)
        for name, planned in self.fitting.reads:
            if not has(held, ((name, planned),)):
                return partial(other_attribute, name, attribute(held, name), planned)
        self._reads = Reads(held, self.fitting.reads)
        return None

    def _bind(self, call: CallKey) -> list[Tensor] | Explain:
        inputs = self._inputs.copy()
        for index, place, wanted in self._placed:
            tensor = at(call.root, place)
            if tensor is None or not _is_of(tensor, wanted):
                return partial(self._other_tensor, index, tensor)
            inputs[index] = tensor
        for place, held, name, (shape, strides, dtype, device, requires_grad) in self._held:
            tensor = held.get(name)
            if tensor is not None and type(tensor) not in _PLAIN:
                static = self.fitting.program.statics[place]
                refuse_subclass(tensor, static.role.value, static.target)
            if (  # `_is_of`, without a call for each parameter
                tensor is None
                or tensor.shape != shape
                or tensor.stride() != strides
                or tensor.dtype is not dtype
                or tensor.requires_grad is not requires_grad
                or tensor.device != device
            ):
                return partial(self._other_tensor, place, tensor)
            inputs[place] = tensor
        for place, index, _ in self._given:
            inputs[place] = call.tensors[index]
        return self._other_sharing(inputs) or inputs

    def _other_sharing(self, inputs: Sequence[Tensor]) -> Explain | None:
        """Whether one storage has become several, or what is written lies in the storage of another input."""
        for indices in self.sharing:
            first = _address(inputs[indices[0]])
            for index in indices[1:]:
                if _address(inputs[index]) != first:
                    return partial(other_sharing, self._names(indices[0], index), shares=False)
        for written in self.written:
            address = _address(inputs[written])
            together = next((indices for indices in self.sharing if written in indices), [written])
            for index, other in enumerate(inputs):
                if index not in together and other.numel() and _address(other) == address:
                    return partial(other_sharing, self._names(written, index), shares=True)
        return None

    def _names(self, *indices: int) -> tuple[str, str]:
        first, second = (_name(self.fitting.program.statics[index]) for index in indices)
        return first, second


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
        IrcError: IRC503 where it requires a gradient and the planned one did not, or the other way round;
            IRC501 for another shape, layout, element type or device.
    """
    if not _is_of(tensor, _type_of(static)):
        raise other_tensor(_name(static), tensor, static).error()


def _name(static: Input) -> str:
    return f"{static.role.value} {static.target}"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
