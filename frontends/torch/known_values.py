"""Values that depend on no input, parameter, buffer or random draw: they are computed beside a traced run."""

# Traced tensors, and the modes that make them, have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...torch_support.pytree import tensors_of

__all__ = ["ByLength", "known_values"]

_MOST_ELEMENTS = 1_000_000
"""The size of the largest tensor whose values are computed."""

_aten = torch.ops.aten
_LIFTS = {_aten.lift_fresh, _aten.lift_fresh_copy}
_FACTORIES = {
    *(_aten.arange, _aten.range, _aten.linspace, _aten.logspace, _aten.eye, _aten.scalar_tensor),
    *(_aten.tril_indices, _aten.triu_indices, _aten.bartlett_window, _aten.blackman_window),
    *(_aten.hamming_window, _aten.hann_window, _aten.kaiser_window),
}
"""Operations that make a tensor of numbers alone."""

_FILLS = {
    **dict.fromkeys((_aten.zeros, _aten.zeros_like, _aten.new_zeros), 0),
    **dict.fromkeys((_aten.ones, _aten.ones_like, _aten.new_ones), 1),
}
_PLACE_OF_FILL = {_aten.full: 1, _aten.full_like: 1, _aten.new_full: 2}
"""Operations that make a tensor of one number; of another tensor they take the type alone."""

_MAKERS = {*_LIFTS, *_FACTORIES, *_FILLS, *_PLACE_OF_FILL}
"""Operations whose results may be known though no operand is."""

_UNWRITTEN = {_aten.empty_like, _aten.new_empty, _aten.new_empty_strided, _aten.resize_, _aten.resize_as_}
"""Operations whose results hold what the memory held."""

_READS = {Tag.data_dependent_output, Tag.dynamic_output_shape}


class ByLength(Protocol):
    """The lengths that a trace with the length as a symbol is to hold for."""

    def number(self, symbolic: Any, length: int) -> Any:
        """The number that a symbol of torch's is at a length."""
        ...

    def read(self, value: Callable[[int], Any]) -> Any:
        """What is read of a value; only the lengths for which it is the same remain."""
        ...


@contextlib.contextmanager
def known_values(lengths: ByLength | None = None) -> Generator[None]:
    """Lets code read, in a run on tensors without data, values that depend on no tensor that is given.

    Such tensors are made by factory functions (`torch.arange`), of literals, or of others like them. What
    code reads of them, as the branch that a comparison of positions decides, is the same in every step.

    Args:
        lengths: If one size is a symbol: values that depend on it are computed for every length when they
            are read.
    """
    with patch.object(FunctionalTensor, "tolist", _numbers), _KnownValues(lengths):
        yield  # torch's own `tolist` reads past the modes


def _numbers(self: Tensor) -> Any:
    return [_numbers(part) for part in self.unbind()] if self.dim() else self.item()


class _KnownValues(TorchDispatchMode):
    """Computes the values of tensors that depend on none that is given."""

    supports_higher_order_operators = True

    def __init__(self, lengths: ByLength | None) -> None:
        super().__init__()
        self.values: Any = WeakTensorKeyDictionary()
        """The value of each tensor that is known: a tensor, or `_Deferred` if it depends on the length."""
        self.lengths = lengths

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if not self.values and func.overloadpacket not in _MAKERS:
            return func(*args, **kwargs)
        known = self._depends_on_known(func, tensors_of((args, kwargs)))
        if self.lengths is not None:
            deferred = self._deferred(func, args, kwargs, known=known)
            if deferred is not None:
                return self._by_length(deferred, func, args, kwargs)
        if known and not _READS.isdisjoint(func.tags):
            return pytree.tree_map_only(Tensor, self._literal, self._value(func, args, kwargs))
        result = func(*args, **kwargs)
        made = tensors_of(result)
        if any(map(_is_unknown, made)):
            values = None
        elif known:
            values = tensors_of(self._value(func, args, kwargs))
        else:
            values = _new_values(func, args, kwargs, made)
        if values is None:
            self._forget_aliased(func, args, kwargs)
        else:
            for tensor, value in zip(made, values, strict=True):
                self.values[tensor] = value
        return result

    def _depends_on_known(self, func: OpOverload, tensors: list[Tensor]) -> bool:
        """Whether the results are functions of known values."""
        return (
            func.namespace in ("aten", "prims")
            and bool(tensors)
            and all(tensor in self.values for tensor in tensors)
            and Tag.nondeterministic_seeded not in func.tags
            and func.overloadpacket not in _UNWRITTEN
        )

    def _deferred(self, func: OpOverload, args: Any, kwargs: Any, *, known: bool) -> _Deferred | None:
        """Returns the computation of a value that depends on the length; None if it is not known or does not.

        Writing into such a value makes all of them unknown.
        """
        operands = pytree.tree_leaves((args, kwargs))
        tensors = [each for each in operands if isinstance(each, Tensor)]
        values = [self.values[each] for each in tensors if each in self.values]
        depends = any(isinstance(each, _Deferred) for each in values)
        if depends and func._schema.is_mutable:
            for tensor in [t for t, value in self.values.items() if isinstance(value, _Deferred)]:
                del self.values[tensor]
            return None
        depends |= any(isinstance(each, py_sym_types) for each in operands)
        depends |= not known and any(
            isinstance(size, py_sym_types) for each in tensors for size in (*each.shape, *each.stride())
        )
        is_filled = func.overloadpacket in _FILLS or func.overloadpacket in _PLACE_OF_FILL
        if not depends or not (known or is_filled or func.overloadpacket in _FACTORIES):
            return None
        if tensors and is_filled:
            return _filled(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self.values.__getitem__, (args, kwargs))
        return _Deferred(func, args, kwargs)

    def _by_length(self, deferred: _Deferred, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Runs an operation whose values depend on the length."""
        assert self.lengths is not None
        if func.overloadpacket is _aten._local_scalar_dense:
            return self.lengths.read(partial(deferred.at, self.lengths))
        result = func(*args, **kwargs)
        made = tensors_of(result)
        if _READS.isdisjoint(func.tags) and len(made) == 1 and result is made[0]:
            self.values[result] = deferred
        return result

    def _value(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self.values.__getitem__, (args, kwargs))
        with no_dispatch():
            return func(*args, **kwargs)

    def _literal(self, value: Tensor) -> Tensor:
        """Returns a tensor without data, of a size that depends on values, as a constant of the run."""
        literal = _aten.lift_fresh.default(value)
        self.values[literal] = value
        return literal

    def _forget_aliased(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """Drops the values of what an operation writes, or returns a view of, with all of their views."""
        names = [argument.name for argument in func._schema.arguments if argument.alias_info is not None]
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        aliased = tensors_of([given[name] for name in names if name in given])
        storages = {_storage(self.values[tensor]) for tensor in aliased if tensor in self.values}
        for tensor in [t for t, value in self.values.items() if storages and _storage(value) in storages]:
            del self.values[tensor]


class _Deferred:
    """A value that depends on the length: an operation, with the values of its operands.

    Args:
        func: The operation.
        args: Its arguments; in the place of a tensor, its value.
        kwargs: Its keyword arguments.
    """

    def __init__(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        self.func = func
        self.leaves, self.tree = pytree.tree_flatten((args, kwargs))
        self.varying = [
            place for place, leaf in enumerate(self.leaves) if isinstance(leaf, (_Deferred, *py_sym_types))
        ]
        self.known: tuple[int, Any] = 0, None
        """The length that it was computed for last, and its value there."""

    def at(self, lengths: ByLength, length: int) -> Any:
        """Returns the value at a length."""
        if self.known[0] != length:
            leaves = self.leaves.copy()
            for place in self.varying:
                each = leaves[place]
                is_value = isinstance(each, _Deferred)
                leaves[place] = each.at(lengths, length) if is_value else lengths.number(each, length)
            args, kwargs = pytree.tree_unflatten(leaves, self.tree)
            with no_dispatch():
                self.known = length, self.func(*args, **kwargs)
        return self.known[1]


_OF_SIZE = {_aten.new_zeros, _aten.new_ones, _aten.new_full}
"""Operations that are given the size of the tensor which they fill; others take it from another tensor."""


def _filled(func: OpOverload, args: Any, kwargs: Any) -> _Deferred:
    """A tensor of one number, of a size that depends on the length; it has the type of another tensor."""
    operation, like = func.overloadpacket, args[0]
    fill = args[_PLACE_OF_FILL[operation]] if operation in _PLACE_OF_FILL else _FILLS[operation]
    shape = list(args[1] if operation in _OF_SIZE else like.shape)
    return _Deferred(_aten.full.default, (shape, fill), {"dtype": kwargs.get("dtype") or like.dtype})


def _new_values(func: OpOverload, args: Any, kwargs: Any, made: list[Tensor]) -> list[Tensor] | None:
    """Returns the values of a tensor that an operation makes of numbers alone; None if it does not."""
    operation = func.overloadpacket
    with no_dispatch():
        if operation in _FACTORIES:
            return [func(*args, **kwargs)]
        if operation in _LIFTS and type(args[0]) is Tensor:
            return [args[0].clone()]
        fill = args[_PLACE_OF_FILL[operation]] if operation in _PLACE_OF_FILL else _FILLS.get(operation)
        if fill is None:
            return None
        (tensor,) = made
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return [like.fill_(fill)]


def _is_unknown(tensor: Tensor) -> bool:
    """Whether a tensor's values are not computed: one without data, a large one, or one of symbolic size."""
    is_symbolic = any(isinstance(size, py_sym_types) for size in tensor.shape)
    return is_symbolic or tensor.numel() > _MOST_ELEMENTS or tensor.device.type == "meta"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
