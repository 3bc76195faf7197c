"""The dimensions of a call's tensors that have its length, and the call at other lengths."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...frontends.torch import Axes
from ...ir import UsageError
from ...torch_support.pytree import flatten_arguments

__all__ = ["SEQUENCE", "LengthAxis", "LengthCall"]

SEQUENCE = "sequence"
"""The value of `dynamic` for calls whose tensors have any size in their second dimension."""

_HELP = f'give dynamic={{"input_ids": {{1: (64, 2048)}}}}, dynamic="{SEQUENCE}" or dynamic="batch"'
_SHORTEST = 2
"""Sizes of 1 broadcast, and are no length."""


@dataclass(frozen=True)
class LengthCall:
    """A call with a length.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        axes: The dimensions that have the length, by the index of the tensor among those of the call.
        length: Its length.
        first: The smallest length that is asked for.
        last: The largest.
        name: The argument that has the length, in words.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    axes: Axes
    length: int
    first: int
    last: int
    name: str

    @property
    def place(self) -> tuple[int, int]:
        """The index of a tensor that has the length, and the dimension."""
        index, dimensions = next(iter(self.axes.items()))
        return index, dimensions[0]

    @property
    def is_plain(self) -> bool:
        """Whether all tensors that have the length are row-major, as those of other lengths are made."""
        tensors = [leaf for leaf in _flat(self.args, self.kwargs)[0] if isinstance(leaf, Tensor)]
        return all(tensors[index].is_contiguous() for index in self.axes)

    def at(self, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call at a length; tensors that have it are zeros."""
        leaves, tree = _flat(self.args, self.kwargs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for index, dimensions in self.axes.items():
            tensor = cast(Tensor, leaves[places[index]])
            sizes = [length if k in dimensions else size for k, size in enumerate(tensor.shape)]
            leaves[places[index]] = tensor.new_zeros(sizes).requires_grad_(tensor.requires_grad)
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return args, kwargs


@dataclass(frozen=True)
class LengthAxis:
    """The lengths that `dynamic` of `irc.optimize` asks for.

    Args:
        named: The smallest and largest size of dimensions, by the name or the position of an argument; none
            for `"sequence"`: all tensors with the second dimension of the first that has one.
        shortest: The shortest call that was planned; 0 if none was. Shorter ones are planned by themselves.
        longest: The longest call that was planned for `"sequence"`.
    """

    named: Mapping[str | int, Mapping[int, tuple[int, int]]]
    shortest: int = 0
    longest: int = 0

    @staticmethod
    def of(dynamic: object) -> LengthAxis:
        """Reads the option.

        Raises:
            UsageError: IRC406 if it is malformed.
        """
        if dynamic == SEQUENCE:
            return LengthAxis({})
        if not isinstance(dynamic, Mapping) or not dynamic:
            raise UsageError("IRC406", f"dynamic is {dynamic!r}", help=_HELP)
        ranges: set[tuple[int, int]] = set()
        for argument, dimensions in cast("Mapping[object, object]", dynamic).items():
            if not isinstance(argument, str | int) or not isinstance(dimensions, Mapping) or not dimensions:
                raise UsageError("IRC406", f"dynamic is {dynamic!r}", help=_HELP)
            for dimension, sizes in cast("Mapping[object, object]", dimensions).items():
                ranges.add(_range(dimension, sizes))
        if len(ranges) > 1:
            raise UsageError(
                "IRC406",
                f"dynamic has {len(ranges)} ranges of sizes, {sorted(ranges)}",
                help="give one range: all the dimensions that are named have the same size in each call",
            )
        return LengthAxis(cast("Mapping[str | int, Mapping[int, tuple[int, int]]]", dynamic))

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LengthCall:
        """The call with its length.

        Raises:
            UsageError: IRC406 if it has none in the range, or lacks an argument that is named.
        """
        tensors = [leaf for leaf in _flat(args, kwargs)[0] if isinstance(leaf, Tensor)]
        given = self._given(module, args, kwargs, tensors) if self.named else _sequence(tensors)
        if not given:
            raise UsageError("IRC406", "no tensor of this call has a second dimension", help=_HELP)
        sizes = {tensors[index].shape[dimension] for index, dimension, _ in given}
        if len(sizes) > 1:
            raise UsageError(
                "IRC406",
                f"the dimensions that dynamic names have {len(sizes)} sizes in this call, {sorted(sizes)}",
                help="name dimensions that have the same size in each call",
            )
        (length,) = sizes
        first, last = self._range(length)
        if not first <= length <= last:
            raise UsageError(
                "IRC406",
                f"{given[0][2]} has the size {length} in this call, and dynamic names {first} to {last}",
                help="give an example of a size in the range, or a wider range",
            )
        axes: dict[int, tuple[int, ...]] = {}
        for index, dimension, _ in given:
            axes[index] = (*axes.get(index, ()), dimension)
        dimensions = {dimension for _, dimension, _ in given}
        for index, tensor in enumerate(tensors):
            along = tuple(d for d in sorted(dimensions) if d < tensor.dim() and tensor.shape[d] == length)
            if index not in axes and along:
                axes[index] = along
        return LengthCall(args, kwargs, axes, length, first, last, given[0][2])

    def after(self, shortest: int, longest: int) -> LengthAxis:
        """The lengths of later calls, once those of a range are planned."""
        return LengthAxis(self.named, self.shortest or shortest, max(self.longest, longest))

    def _range(self, length: int) -> tuple[int, int]:
        """The smallest and the largest length that are planned with one."""
        if self.named:
            first, last = next(sizes for each in self.named.values() for sizes in each.values())
        elif length > self.longest > 0:
            first, last = self.longest + 1, length
        else:
            first, last = _SHORTEST, max(length, self.longest)
        return max(first, self.shortest), last

    def _given(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Tensor]
    ) -> list[tuple[int, int, str]]:
        """The dimensions that are named: the index of the tensor, the dimension and the argument in words."""
        by_name = _by_name(module, args, kwargs)
        found: list[tuple[int, int, str]] = []
        for name, dimensions in self.named.items():
            tensor = by_name.get(name)
            if not isinstance(tensor, Tensor):
                known = ", ".join(str(each) for each, value in by_name.items() if isinstance(value, Tensor))
                raise UsageError(
                    "IRC406",
                    f"dynamic names argument {name}, which is not a tensor of this call",
                    help=f"name one of the tensors that the module is called with: {known}",
                )
            index = next(k for k, each in enumerate(tensors) if each is tensor)
            for dimension in dimensions:
                if dimension >= tensor.dim():
                    raise UsageError(
                        "IRC406",
                        f"dynamic names dimension {dimension} of argument {name}, whose shape is "
                        f"{list(tensor.shape)}",
                        help="dimensions are counted from 0",
                    )
                found.append((index, dimension, f"dimension {dimension} of argument {name}"))
        return found


def _range(dimension: object, sizes: object) -> tuple[int, int]:
    """Reads a dimension with its smallest and largest size.

    Raises:
        UsageError: IRC406.
    """
    if not isinstance(dimension, int) or isinstance(dimension, bool) or dimension < 0:
        raise UsageError("IRC406", f"dynamic names dimension {dimension!r}", help=_HELP)
    pair = cast("tuple[object, ...]", tuple(sizes)) if isinstance(sizes, tuple | list) else ()
    whole = [each for each in pair if isinstance(each, int) and not isinstance(each, bool)]
    if len(pair) != 2 or len(whole) != 2 or not _SHORTEST <= whole[0] < whole[1]:
        raise UsageError(
            "IRC406",
            f"dynamic has the sizes {sizes!r} for dimension {dimension}",
            help=f"give the smallest and the largest size, such as (64, 2048); the smallest is {_SHORTEST} "
            "or more",
        )
    return whole[0], whole[1]


def _sequence(tensors: list[Tensor]) -> list[tuple[int, int, str]]:
    """The second dimension of the first tensor that has one."""
    index = next((k for k, each in enumerate(tensors) if each.dim() > 1), None)
    return [] if index is None else [(index, 1, f"dimension 1 of input {index}")]


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str | int, Any]:
    """The arguments of a call by name, and those that are given by position also by position."""
    found: dict[str | int, Any] = dict(enumerate(args))
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**found, **kwargs}
    return {**found, **bound.arguments, **kwargs}


def _flat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    return flatten_arguments((tuple(args), dict(sorted(kwargs.items()))))
