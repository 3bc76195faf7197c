"""Lets packed weights be traced: their parts are inputs, and the layers' forwards read stand-ins."""

# torch has no public way to the tables of a module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import Tensor, nn

from ....torch_support.packed_weights import packed_weights, part_target

__all__ = ["PackedParts"]


class PackedParts:
    """The parts of the packed weights of a module.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = [(weight, weight.parts()) for _, weight in packed_weights(module)]
        self._tables = [(w.layer._parameters, dict(w.layer._parameters)) for w, _ in self._weights]
        self._are_buffers = False

    @contextlib.contextmanager
    def as_buffers(self) -> Generator[None]:
        """Lets the module hold the parts as buffers in the place of the parameters, to be swapped as those.

        If all goes well, the layers settle what their first forward decides.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap_back()
        for weight, _ in self._weights:
            weight.settle()

    @contextlib.contextmanager
    def as_they_are(self) -> Generator[None]:
        """Lets the module hold the parameters meanwhile."""
        self._swap_back()
        try:
            yield
        finally:
            self._swap()

    @contextlib.contextmanager
    def standing_in(self) -> Generator[None]:
        """Lets the layers' forwards read what the module holds as parts now, if it does."""
        with contextlib.ExitStack() as stack:
            if self._are_buffers:
                for weight, parts in self._weights:
                    held = weight.layer._buffers
                    now = ((part, held[part_target(weight.name, part)]) for part in parts)
                    stack.enter_context(weight.standing_in({k: t for k, t in now if isinstance(t, Tensor)}))
            yield

    def _swap(self) -> None:
        for weight, parts in self._weights:
            del weight.layer._parameters[weight.name]
            for part, tensor in parts.items():
                weight.layer._buffers[part_target(weight.name, part)] = tensor
        self._are_buffers = True

    def _swap_back(self) -> None:
        for held, before in self._tables:
            held.clear()
            held.update(before)
        for weight, parts in self._weights:
            for part in parts:
                weight.layer._buffers.pop(part_target(weight.name, part), None)
        self._are_buffers = False
