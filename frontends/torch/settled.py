"""Calls a module once before it is captured, for what only its first call does."""

# Storages are told apart by a number without a public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir import UnsupportedError
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
    written in place are as before. If the body fails nothing stays.

    Args:
        module: The module.
        args: Its arguments.
        kwargs: Its keyword arguments.
        refusal: The refusal of the capture before, which is raised if the call itself fails.
    """
    has_storage = (type(parameter.data) is Tensor for parameter in module.parameters())
    parameters = list(itertools.compress(module.parameters(), has_storage))
    before = [(parameter, parameter.data) for parameter in parameters]
    try:
        try:
            _call(module, parameters, args, kwargs)
        except Exception:
            raise refusal from None
        yield
    except BaseException:
        for parameter, data in before:
            if _key(parameter) != _key(data):
                parameter.data = data
        raise
    _LOG.warning(
        "the module was called once, without gradients, before it was planned: its first call gives "
        "parameters other data, at %s",
        refusal.at,
    )


def _call(
    module: nn.Module, parameters: list[nn.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    args, kwargs = pytree.tree_map_only(Tensor, _copied, (args, dict(kwargs)))
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    undone = _UndoneWrites(parameters)
    try:
        with torch.no_grad(), torch.random.fork_rng(), State(module).kept(), undone:
            module.forward(*args, **kwargs)
    finally:
        with torch.no_grad():
            for tensor, elements in (*undone.written, *buffers):
                tensor.copy_(elements)


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
