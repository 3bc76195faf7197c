"""Follows the bytes that operations allocate, without computing anything."""

# Storages are told apart by a number without a public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir import allocation_bytes
from ...torch_support.allocated import allocated_bytes, dense_parts
from ...torch_support.pytree import tensors_of
from ...torch_support.this_thread import replaced_here
from .loss_terms import cast_bytes, kept_bytes, workspace_bytes

__all__ = ["AliveBytes", "following_states"]


class AliveBytes(TorchDispatchMode):
    """Follows the bytes of the storages that operations create, as long as anything refers to them."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, weakref.ref[Any]] = {}
        self.followed_bytes: dict[int, int] = {}
        """The bytes of each storage that is counted."""
        self.alive_bytes = 0
        self.peak_bytes = 0

    def is_known(self, tensor: Tensor) -> bool:
        """Whether its storage is counted or ignored; another may have lain at the same address before."""
        known = self.known.get(tensor.untyped_storage()._cdata)
        return known is not None and known() is not None

    def ignore(self, tensor: Tensor) -> None:
        """Does not count this one."""
        storage = tensor.untyped_storage()
        self.known[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = tensors_of((args, kwargs))
        results = [part for tensor in tensors_of(result) for part in dense_parts(tensor)]
        taken_bytes = cast_bytes(func, operands, results[0]) if results else 0
        for leaf in results:
            if not self.is_known(leaf):
                self.follow(leaf, kept_bytes(str(func), operands, leaf))
                taken_bytes += workspace_bytes(str(func), operands, leaf)
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes + taken_bytes)
        return result

    def died(self, key: int, nbytes: int) -> None:
        """Counts a storage no longer."""
        self.alive_bytes -= nbytes
        del self.followed_bytes[key]

    def follow(self, tensor: Tensor, least_bytes: int = 0) -> None:
        """Counts a storage, of no fewer bytes than these, as long as it lives."""
        storage: Any = tensor.untyped_storage()
        key = storage._cdata
        nbytes = max(allocated_bytes(tensor), allocation_bytes(least_bytes, str(tensor.device)))
        self.known[key] = weakref.ref(storage, lambda _: self.died(key, nbytes))
        self.followed_bytes[key] = nbytes
        self.alive_bytes += nbytes


def following_states(followed: AliveBytes) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile, the states of the generator that checkpoints keep are counted, which no mode sees."""
    before = torch.get_rng_state

    def state() -> Tensor:
        copy = before()
        followed.follow(copy)
        return copy

    return replaced_here(torch, "get_rng_state", state)
