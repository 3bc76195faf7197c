"""Lets packed weights be traced: their parts are inputs, and the layers' forwards read stand-ins."""

# torch has no public way to the tables of a module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn

from ....torch_support.packed_weights import packed_weights, part_target

__all__ = ["PackedParts"]


class PackedParts:
    """The parts of the packed weights of a module.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = [(weight, weight.parts()) for _, weight in packed_weights(module)]

    @contextlib.contextmanager
    def as_buffers(self) -> Generator[None]:
        """Lets the module hold the parts as buffers in the place of the parameters, to be swapped as those.

        If all goes well, the layers settle what their first forward decides.
        """
        tables = [(w.layer._parameters, dict(w.layer._parameters)) for w, _ in self._weights]
        try:
            for weight, parts in self._weights:
                del weight.layer._parameters[weight.name]
                for part, tensor in parts.items():
                    weight.layer._buffers[part_target(weight.name, part)] = tensor
            yield
        finally:
            for held, before in tables:
                held.clear()
                held.update(before)
            for weight, parts in self._weights:
                for part in parts:
                    del weight.layer._buffers[part_target(weight.name, part)]
        for weight, _ in self._weights:
            weight.settle()

    @contextlib.contextmanager
    def standing_in(self) -> Generator[None]:
        """Lets the layers' forwards read what the module holds as parts now."""
        with contextlib.ExitStack() as stack:
            for weight, parts in self._weights:
                held = weight.layer._buffers
                now = {part: held[part_target(weight.name, part)] for part in parts}
                stack.enter_context(weight.standing_in({k: t for k, t in now.items() if t is not None}))
            yield
