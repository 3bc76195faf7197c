"""Counts the memory of tensors that still exist."""

# Storages have no public identity.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...torch_support.allocated import allocated_bytes, dense_parts

__all__ = ["AliveTensors", "storage_key"]


def storage_key(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage, which is unique as long as the storage exists."""
    return tensor.untyped_storage()._cdata


class AliveTensors:
    """Counts the bytes of noted tensors, each storage once, as long as anybody holds them.

    The gradients (`.grad`) of noted leaves count too.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._leaves: dict[int, weakref.ref[Tensor]] = {}

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Counts these tensors from now on."""
        for tensor in tensors:
            self._note(tensor)
            if tensor.requires_grad and tensor.is_leaf:
                self._leaves[id(tensor)] = weakref.ref(tensor)

    def _note(self, tensor: Tensor) -> None:
        for part in dense_parts(tensor):
            if part.layout is torch.strided and (key := storage_key(part)) not in self._storages:
                self._storages[key] = StorageWeakRef(part.untyped_storage()), allocated_bytes(part)

    def alive_bytes(self) -> int:
        """Returns the bytes of all noted storages that still exist, rounded as the allocator rounds."""
        for key, leaf in list(self._leaves.items()):
            tensor = leaf()
            if tensor is None or not tensor.is_leaf:
                del self._leaves[key]
            elif tensor.grad is not None:
                self._note(tensor.grad)
        gone = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in gone:
            del self._storages[key]
        return sum(nbytes for _, nbytes in self._storages.values())

    def storages(self) -> Mapping[int, tuple[StorageWeakRef, int]]:
        """Returns the noted storages that existed at the last `alive_bytes`, for `gone_bytes`."""
        return dict(self._storages)

    def gone_bytes(self, storages: Mapping[int, tuple[StorageWeakRef, int]]) -> int:
        """Returns the bytes of those of these storages that do not exist any more."""
        return sum(nbytes for storage, nbytes in storages.values() if storage.expired())

    def bytes_of(self, keys: Iterable[int]) -> int:
        """Returns the bytes of those of these storages that existed at the last `alive_bytes`."""
        return sum(self._storages[key][1] for key in set(keys) if key in self._storages)
