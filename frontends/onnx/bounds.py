"""Bounds the size of what irc computes from a file at import.

A few bytes can declare a constant of 10^18 elements. What a file stores is as large as the file; what follows
from it is bounded here: one constant by 1 GiB or by 16 times what the file stores, whichever is more (packed
4-bit numbers that become floats grow eightfold), and all of them by four times that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import onnx_ir as ir
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir.errors import Location, UnsupportedError

__all__ = [
    "MOST_AXES",
    "MOST_BYTES",
    "MOST_LISTED",
    "MOST_OPERATIONS",
    "Account",
    "Bounded",
    "nbytes",
    "stored_bytes",
    "too_large",
]

MOST_BYTES = 1 << 40
"""Bytes that one value of a graph may take in a run."""
MOST_LISTED = 1 << 25
"""Positions of an axis that an import works out one by one: a constant of 256 MiB."""
MOST_AXES = 64
"""Axes that a tensor can have: numpy's limit, and torch's."""
_LEAST_LIMIT = 1 << 30
_GROWTH = 16
_IN_ALL = 4
MOST_OPERATIONS = 100_000
"""Operations that one node may become: as many as the nodes that loops may unroll to."""
_SHAPED = tuple(getattr(torch.ops.aten, name) for name in ("view", "expand", "repeat", "permute", "reshape"))
_WIDEST = 16
"""Bytes of the widest element."""


def too_large(what: str, at: str | None = None, help: str | None = None) -> UnsupportedError:
    """The error that declines what a file makes too large."""
    return UnsupportedError(
        "IRC307",
        what,
        at=Location(onnx_node=at),
        help=help or "check the sizes in the file; numbers that are meant to be stored can be initializers",
    )


def nbytes(tensor: Tensor) -> int:
    """The payload in bytes, as if every element were stored."""
    return tensor.numel() * tensor.element_size()


def stored_bytes(model: ir.Model) -> int:
    """Bytes of the weights that the graph stores."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


class Account:
    """Adds up what has been computed from a file so far.

    Args:
        stored: Bytes that the file stores.
    """

    def __init__(self, stored: int) -> None:
        self.limit = max(_LEAST_LIMIT, _GROWTH * stored)
        self._used = 0

    def check(self, what: str, shape: Sequence[int], size: int, at: str | None = None) -> None:
        """Refuse a constant of `size` bytes that is beyond the limit.

        Raises:
            UnsupportedError: IRC307.
        """
        if size > self.limit:
            raise too_large(
                f"{what} makes a constant of shape {list(shape)}: {size:,} B, and at most {self.limit:,} B"
                " may follow from this file",
                at,
            )

    def add(self, what: str, shape: Sequence[int], size: int, at: str | None = None) -> None:
        """Count a constant that is to stay.

        Raises:
            UnsupportedError: IRC307.
        """
        self.check(what, shape, size, at)
        self._used += size
        if self._used > _IN_ALL * self.limit:
            raise too_large(
                f"with {what}, the constants that follow from this file come to {self._used:,} B, and at most"
                f" {_IN_ALL * self.limit:,} B may",
                at,
            )


class Bounded(TorchDispatchMode):
    """While a node is folded or traced, no operation makes what is too large, and there are not too many.

    Args:
        what: The node, for messages.
        at: Its name.
        limit: Bytes that the result of one operation may take.
        fake: The mode on which a size is worked out first; `None` if results are fake already.
    """

    def __init__(self, what: str, at: str, limit: int, fake: FakeTensorMode | None) -> None:
        super().__init__()
        self._what, self._at, self._limit, self._fake = what, at, limit, fake
        self._operations = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation, or refuse it."""
        kwargs = kwargs or {}
        self._count(func, args)
        self._check_rank(func, args)
        if self._fake is None:
            return func(*args, **kwargs)
        if _bound(args, kwargs) * _WIDEST > self._limit and not getattr(func, "is_view", False):
            self._try(func, args, kwargs, self._fake)
        return func(*args, **kwargs)

    def _count(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        parts = 1
        if func in (torch.ops.aten.unbind.int, torch.ops.aten.split.Tensor) and isinstance(args[0], Tensor):
            parts = _parts(args[0], *args[1:])
        self._operations += parts
        if self._operations > MOST_OPERATIONS:
            raise too_large(
                f"{self._what} becomes more than {MOST_OPERATIONS:,} operations",
                self._at,
                "check the sizes of its inputs, or cut them into shorter pieces",
            )

    def _check_rank(self, func: Any, args: Sequence[Any]) -> None:
        shaped = getattr(func, "overloadpacket", None) in _SHAPED and len(args) > 1
        if shaped and isinstance(args[1], list | tuple) and len(args[1]) > MOST_AXES:
            raise too_large(
                f"{self._what} makes a value of {len(args[1]):,} axes, and tensors have at most {MOST_AXES}",
                self._at,
            )

    def _try(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fake: FakeTensorMode,
    ) -> None:
        """The operation on fakes, for the size of its result."""

        def faked(value: Any) -> Any:
            if isinstance(value, Tensor):
                return fake.from_tensor(value)
            if isinstance(value, list | tuple):
                return type(value)(faked(v) for v in value)
            return value

        try:
            with fake:
                results = func(*faked(tuple(args)), **{k: faked(v) for k, v in kwargs.items()})
        except (DataDependentOutputException, DynamicOutputShapeException):
            return  # what is found in an operand is not larger than a few times the operand
        for result in _tensors(results if isinstance(results, list | tuple) else (results,)):
            if nbytes(result) > self._limit:
                self._refuse(result)

    def _refuse(self, result: Tensor) -> NoReturn:
        raise too_large(
            f"{self._what} makes a constant of shape {list(result.shape)}: {nbytes(result):,} B, and at most"
            f" {self._limit:,} B may follow from this file",
            self._at,
        )


def _parts(x: Tensor, *rest: Any) -> int:
    """Returns the number of tensors that `unbind` (one argument: the axis) or `split` (size, axis) makes."""
    if not x.ndim:
        return 1
    axis = rest[-1] if rest else 0
    return x.shape[axis] if -x.ndim <= axis < x.ndim else 1


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bound(args: Iterable[Any], kwargs: Mapping[str, Any]) -> float:
    """Elements that the result cannot exceed: every size is a sum of products of what is given."""
    bound, pending = 1.0, [*args, *kwargs.values()]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            bound *= max(value.numel(), 1)
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int | float):
            size = abs(float(value)) if abs(value) < 1e30 else math.inf
            bound *= 1.0 + (1 / size if 0 < size < 1 else size)
    return bound if bound == bound else math.inf
