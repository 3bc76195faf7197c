"""The state of autocast, for which a graph is captured, and the operations that it would change."""

# Dispatch keys have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir import Node
from ..ir.signature import Autocast
from .arguments import empty, to_torch
from .operations import function_of, overload_of

__all__ = ["autocast_state", "nodes_that_autocast_sees", "without_autocast", "would_cast"]

without_autocast = torch._C._DisableAutocast
"""Makes a context in which nothing is cast automatically; a model may switch autocast on within."""

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_CONVOLUTION = "aten.convolution.default"
_PRODUCT = "aten._trilinear.default"
"""An operation of the backward of `bilinear`, within whose kernel autocast casts, and not around it."""


def autocast_state() -> Autocast:
    """The device types for which automatic casting is on."""
    return tuple(
        (
            device,
            str(torch.get_autocast_dtype(device)).removeprefix("torch."),
            torch.is_autocast_cache_enabled(),
        )
        for device in _KEYS
        if torch.is_autocast_enabled(device)
    )


def nodes_that_autocast_sees(nodes: Iterable[Node]) -> Iterator[Node]:
    """Those of some nodes that autocast may cast for, one for each type of operands."""
    seen = set[tuple[object, ...]]()
    for node in nodes:
        operands = node.operands
        if operands and _is_seen(node.op, operands[0].type.device.partition(":")[0]):
            key = (node.op, *(value.type.dtype for value in operands), operands[0].type.device)
            if key not in seen:
                seen.add(key)
                yield node


@lru_cache(4096)
def would_cast(node: Node, autocast: Autocast) -> bool:
    """Whether an operation would compute in another precision under autocast as it is on now.

    Args:
        node: The operation. It is run on tensors without data.
        autocast: What `autocast_state` returns now.
    """
    with torch.no_grad(), FakeTensorMode():
        tensors = {value: empty(value.type) for value in node.operands}

        def operand_of(argument: Any) -> Any:
            return tensors.get(argument, 1)  # a number that comes with each call has no value here

        if node.op == _PRODUCT:
            factors = [tensor.new_empty(1, 1) for tensor in tensors.values()]
            return any(factor.mm(factor).dtype != factor.dtype for factor in factors)
        arguments = [to_torch(argument, operand_of) for argument in node.arguments]
        keywords = {key: to_torch(argument, operand_of) for key, argument in node.keywords}
        results = _called(node.op)(*arguments, **keywords)
    pairs = zip(node.results, results if node.is_sequence else (results,), strict=True)
    return any(v is not None and str(result.dtype) != f"torch.{v.type.dtype.value}" for v, result in pairs)


@cache
def _is_seen(op: str, device: str) -> bool:
    overload = overload_of(op)
    if overload is None or device not in _KEYS:
        return False
    if op in (_CONVOLUTION, _PRODUCT):
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), _KEYS[device])


def _called(op: str) -> Callable[..., Any]:
    """The function by which a model calls an operation: for convolutions autocast sees that one alone."""
    if op != _CONVOLUTION:
        return function_of(op)
    by_autocast: Any = torch.ops.aten._convolution.deprecated
    return lambda *operands: by_autocast(*operands, False, False, False)
