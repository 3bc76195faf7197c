"""The memory that a caller's loss takes between forward and backward."""

# AOTAutograd and the autograd engine have no public door.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Loss", "loss_bytes"]

Loss = Callable[[Any], Tensor]


class _Alive(TorchDispatchMode):
    """Follows the bytes of the storages that operations create, as long as anything refers to them."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, weakref.ref[Any]] = {}
        self.alive_bytes = 0
        self.peak_bytes = 0

    def ignore(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.known[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        return result

    def _follow(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def died(_: object) -> None:
            self.alive_bytes -= nbytes
            self.known.pop(key, None)

        self.known[key] = weakref.ref(storage, died)
        self.alive_bytes += nbytes


def loss_bytes(loss: Loss | None, result_leaves: list[Any], result_tree: Any) -> tuple[int, int]:
    """What a loss takes beyond outputs and gradients: the most at once, and what stays alive after it.

    Args:
        loss: A function from the module's result to a scalar. None stands for a loss that takes twice the
            outputs' bytes, as cross entropy does; where the only output is a scalar, that is the loss.
        result_leaves: The leaves of that result as traced; only the tensors' types are looked at.
        result_tree: How the leaves nest.

    Returns:
        Bytes at the loss's own peak, and bytes that stay until backward returns: the loss and its gradient.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        leaves = [_stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in result_leaves]
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        trained = [leaf for leaf in outputs if leaf.requires_grad]
        if loss is None:
            if [leaf.dim() for leaf in trained] == [0]:
                return 0, 0
            transient = sum(2 * leaf.untyped_storage().nbytes() for leaf in trained)
            return transient + _SCALARS_BYTES, _SCALARS_BYTES
        gc.collect()
        alive = _Alive()
        for output in outputs:
            alive.ignore(output)
        with alive:
            scalar = loss(pytree.tree_unflatten(leaves, result_tree))
            seed = torch.ones_like(scalar)
            gradients: Any = torch.autograd.grad(scalar, trained, seed, allow_unused=True)
        storages = [g.untyped_storage() for g in gradients if g is not None]
        tangents = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        return max(alive.peak_bytes - tangents, 0), max(alive.alive_bytes - tangents, 0)


_SCALARS_BYTES = 2 * 8
"""A loss and its gradient, of at most eight bytes each."""


def _stand_in(leaf: Tensor) -> Tensor:
    strides = tuple(leaf.stride())
    stand_in = torch.empty_strided(tuple(leaf.shape), strides, dtype=leaf.dtype, device=leaf.device)
    return stand_in.requires_grad_(leaf.dtype.is_floating_point)
