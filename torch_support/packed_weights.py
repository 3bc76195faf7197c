"""Frozen weights that quantisation libraries pack: parameters that consist of several tensors.

A layer of bitsandbytes keeps packed numbers in its parameter and scales beside it; a parameter of torchao is
a tensor of a class of its own around others. A plan has their plain tensors as inputs. While it is traced,
the layer's own code runs on stand-ins for them.
"""

# torch has no public way to the tables of a module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..ir import UnsupportedError

__all__ = [
    "PACKING_LIBRARIES",
    "PackedWeight",
    "packed_weight",
    "packed_weights",
]

_BITSANDBYTES, _TORCHAO = "bitsandbytes", "torchao"
_LAYERS = f"{_BITSANDBYTES}.nn.modules"
PACKING_LIBRARIES = (_BITSANDBYTES, _TORCHAO)
"""The packages whose packed weights are known."""


class PackedWeight(ABC):
    """A frozen parameter of a layer that consists of several plain tensors.

    Args:
        layer: The layer that holds it.
        name: Its name there.
    """

    state_names: ClassVar[frozenset[str]] = frozenset()
    """The attributes of the layer that hold nothing but parts and form."""
    noted_names: ClassVar[frozenset[str]] = frozenset()
    """The attributes of the layer that its first forward sets for all that follow."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer, self.name = layer, name
        self.parameter: Any = layer._parameters[name]
        self._noted: dict[str, Any] = {}

    @abstractmethod
    def parts(self) -> dict[str, Tensor]:
        """The plain tensors that it consists of now, by name."""

    @abstractmethod
    def form(self) -> object:
        """What else decides its numbers, to be compared with `==`: number format, block size, shape."""

    @abstractmethod
    def attributes(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        """The attributes of the layer that its forward reads the weight from, for other tensors as parts."""

    @contextlib.contextmanager
    def standing_in(self, parts: Mapping[str, Tensor]) -> Generator[None]:
        """Lets the layer's forward read these parts; afterwards its attributes are as before."""
        held = vars(self.layer)
        before = dict(held)
        held.update(self.attributes(parts))
        try:
            yield
        finally:
            self._noted |= {name: held[name] for name in self.noted_names if held[name] is not before[name]}
            held.clear()
            held.update(before)

    def settle(self) -> None:
        """Sets what a forward with stand-ins noted, as the first forward with the weight itself would."""
        vars(self.layer).update(self._noted)


_COMPUTED_IN = (torch.float32, torch.bfloat16)
"""The types of inputs that a layer of 4 bits computes in, if it is not told another."""


class _FourBit(PackedWeight):
    """A parameter of `bitsandbytes.nn.Linear4bit`: codes of 4 bits, with scales that may be packed too."""

    state_names = frozenset({"quant_state"})
    noted_names = frozenset({"compute_dtype", "compute_type_is_set"})
    _NESTED: ClassVar[Mapping[str, str]] = {"nested_absmax": "absmax", "nested_code": "code"}

    def parts(self) -> dict[str, Tensor]:
        state = self.parameter.quant_state
        found = {"data": self.parameter.data, "absmax": state.absmax, "code": state.code}
        if state.nested:
            found["offset"] = state.offset
            found |= {part: getattr(state.state2, name) for part, name in self._NESTED.items()}
        return found

    def form(self) -> object:
        state = self.parameter.quant_state
        nested = (state.state2.blocksize, state.state2.dtype) if state.nested else None
        return state.quant_type, state.blocksize, tuple(state.shape), state.dtype, nested

    def attributes(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        state = copy.copy(self.parameter.quant_state)
        state.absmax, state.code = parts["absmax"], parts["code"]
        if state.nested:
            state.offset, state.state2 = parts["offset"], copy.copy(state.state2)
            for part, name in self._NESTED.items():
                setattr(state.state2, name, parts[part])
        weight: Any = parts["data"].view_as(parts["data"])
        weight.quant_state = state
        forward = self.layer.forward

        def settled_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            held = vars(self.layer)
            if not held["compute_type_is_set"]:  # what each forward assigns, each planned step would
                held["compute_type_is_set"] = True
                held["compute_dtype"] = x.dtype if x.dtype in _COMPUTED_IN else held["compute_dtype"]
            _refuse_casts_within(x, held["compute_dtype"] or x.dtype)
            return forward(x, *args, **kwargs)

        return {self.name: weight, "quant_state": state, "forward": settled_forward}


def _refuse_casts_within(x: Tensor, dtype: torch.dtype) -> None:
    """Refuses a product in 4 bits whose kernel casts its operands itself, as autocast tells it to.

    Raises:
        UnsupportedError: IRC335.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and dtype is not torch.get_autocast_dtype(device):
        wanted = torch.get_autocast_dtype(device)
        raise UnsupportedError(
            "IRC335",
            f"a layer in 4 bits computes in {dtype} under autocast to {wanted}, which only its kernel sees",
            help=f"give it this type: bnb_4bit_compute_dtype={wanted}, or compute_dtype= of Linear4bit",
        )


class _EightBit(PackedWeight):
    """A parameter of `bitsandbytes.nn.Linear8bitLt`: numbers of 8 bits, with a scale for each row.

    The scales are the parameter's up to the first forward, and the layer's from then on.
    """

    state_names = frozenset({"state"})

    def parts(self) -> dict[str, Tensor]:
        scales = self.parameter.SCB if self.parameter.SCB is not None else cast(Any, self.layer).state.SCB
        return {"data": self.parameter.data, "scales": scales}

    def form(self) -> object:
        state = cast(Any, self.layer).state
        return state.threshold, state.has_fp16_weights

    def attributes(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        state = copy.copy(cast(Any, self.layer).state)
        state.CB, state.SCB = parts["data"], parts["scales"]
        # the forward reads the numbers of its state, and assigns them to the data of its weight
        return {self.name: SimpleNamespace(CB=None, SCB=None), "state": state}


class _OfTorchao(PackedWeight):
    """A parameter of a class of torchao's, a tensor around others."""

    def parts(self) -> dict[str, Tensor]:
        names, _ = self.parameter.__tensor_flatten__()
        return {name: getattr(self.parameter, name) for name in names}

    def form(self) -> object:
        names, context = self.parameter.__tensor_flatten__()
        return type(self.parameter), tuple(names), context, self.parameter.shape, self.parameter.stride()

    def attributes(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        _, context = self.parameter.__tensor_flatten__()
        size, stride = self.parameter.shape, self.parameter.stride()
        return {self.name: type(self.parameter).__tensor_unflatten__(dict(parts), context, size, stride)}


def packed_weight(layer: nn.Module, name: str) -> PackedWeight | None:
    """The parameter of a layer as a packed weight; None if it is another kind, or is trained."""
    parameter = layer._parameters.get(name) if _is_of_python(layer) else None
    if parameter is None or parameter.requires_grad:
        return None
    if type(parameter).__module__.startswith(f"{_TORCHAO}.") and is_traceable_wrapper_subclass(parameter):
        weight = _OfTorchao(layer, name)
        return weight if all(type(part) is Tensor for part in weight.parts().values()) else None
    if name == "weight" and type(layer).forward.__module__ == _LAYERS:
        kind = type(layer).forward.__qualname__.partition(".")[0]
        if kind == "Linear4bit" and _is_for_training(parameter):
            return _FourBit(layer, name)
        if kind == "Linear8bitLt" and parameter.dtype is torch.int8:
            return _EightBit(layer, name)
    return None


def _is_of_python(layer: nn.Module) -> bool:
    """Whether a module holds its parameters in a dict, as all do but those of `torch.jit`."""
    return isinstance(cast(object, layer._parameters), dict)


def _is_for_training(parameter: Any) -> bool:
    """Whether a weight of 4 bits is packed, and not in the order for processors, which has no gradient."""
    state = getattr(parameter, "quant_state", None)
    return state is not None and not getattr(state, "packing_format_for_cpu", False)


def packed_weights(module: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """The packed weights of a module and its submodules, by name."""
    for path, layer in module.named_modules():
        for name in layer._parameters if _is_of_python(layer) else ():
            if (weight := packed_weight(layer, name)) is not None:
                yield f"{path}.{name}" if path else name, weight
