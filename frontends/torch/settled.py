"""Calls a module before it is captured, for what only its first call does."""

# Storages are told apart by a number without a public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir import UnsupportedError
from ...torch_support.bits import same_bits
from .object_graph import HeldObject, changed, digest
from .state import State

__all__ = ["settled"]

_LOG = logging.getLogger("irc")


@contextlib.contextmanager
def settled(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], refusal: UnsupportedError
) -> Generator[None]:
    """Around a capture of a module whose first call gives parameters other data, as a cast of biases does.

    That call is made before, without gradients and on copies of the arguments. Of what it does, the new data
    of parameters stays, as after eager's first step; buffers, generators, Python state and elements that are
    written in place are as before. It is made twice: a second call that leaves other results, or another
    state, has missed what the first did beside that. If the body fails nothing stays.

    Args:
        module: The module.
        args: Its arguments.
        kwargs: Its keyword arguments.
        refusal: The refusal of the capture before, which is raised if the call itself fails, and if the first
            call does more than to give parameters other data.
    """
    has_storage = (type(parameter.data) is Tensor for parameter in module.parameters())
    parameters = list(itertools.compress(module.parameters(), has_storage))
    before = [(parameter, parameter.data) for parameter in parameters]
    try:
        try:
            first, second = (_call(module, parameters, args, kwargs) for _ in range(2))
        except Exception:
            raise refusal from None
        if not _are_same(first, second):
            raise refusal
        yield
    except BaseException:
        for parameter, data in before:
            if _key(parameter) != _key(data):
                parameter.data = data
        raise
    _LOG.warning(
        "the module was called twice, without gradients, before it was planned: its first call gives "
        "parameters other data, at %s",
        refusal.at,
    )


def _call(
    module: nn.Module, parameters: list[nn.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Calls a module and puts back what that changed, except for new data; returns what it left, by names."""
    args, kwargs = pytree.tree_map_only(Tensor, _copied, (args, dict(kwargs)))
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    undone = _UndoneWrites(parameters)
    state = State(module)
    try:
        with torch.no_grad(), torch.random.fork_rng(), state.kept(), undone:
            holders = state.holders()
            result = module.forward(*args, **kwargs)
            return list(_left(module, result, holders))
    finally:
        with torch.no_grad():
            for tensor, elements in (*undone.written, *buffers):
                tensor.copy_(elements)


def _left(module: nn.Module, result: Any, holders: list[HeldObject]) -> Iterator[tuple[str, Any]]:
    """Yields results of a call, tensors and flags of its module, and what else it has changed."""
    results = (("", leaf) for leaf in pytree.tree_leaves(result))
    for name, value in (*results, *module.named_parameters(), *module.named_buffers()):
        yield name, _stand_in(value)
    for name, child in module.named_modules():
        yield name, (child.training, [len(held) for held in vars(child).values() if isinstance(held, dict)])
    for holder in holders:
        for key, _, new in changed(holder):
            yield holder.path_of(key), _stand_in(new)


def _stand_in(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone(), value.requires_grad
    return digest(value)


def _are_same(first: list[tuple[str, Any]], second: list[tuple[str, Any]]) -> bool:
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(first: tuple[str, Any], second: tuple[str, Any]) -> bool:
    (name, one), (other_name, other) = first, second
    if name != other_name or type(one) is not type(other):
        return False
    if isinstance(one, tuple) and one and isinstance(one[0], Tensor):
        return same_bits(one[0], other[0]) and one[1] == other[1]
    return one == other


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _UndoneWrites(TorchDispatchMode):
    """Copies parameters right before they are written in place.

    Attributes:
        written: The data of each, with what it was before.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._unwritten = {_key(parameter): parameter.data for parameter in parameters}
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            operand = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in pytree.tree_leaves(operand):
                data = self._unwritten.pop(_key(tensor), None) if isinstance(tensor, Tensor) else None
                if data is not None:
                    self.written.append((data, data.clone()))
        return func(*args, **kwargs)
