"""Lets packed weights be traced: their parts are inputs, and the layers' forwards read stand-ins."""

# torch has no public way to the tables of a module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace

from torch import Tensor, nn

from ....ir import Graph
from ....torch_support.packed_weights import packed_weights

__all__ = ["PackedParts"]


class PackedParts:
    """The parts of the packed weights of a module.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = [(weight, weight.parts()) for _, weight in packed_weights(module)]
        self._tables = [(w.layer._parameters, dict(w.layer._parameters)) for w, _ in self._weights]
        self._buffer_names = [
            {part: _free_name(weight.layer, f"{weight.name} {part}") for part in parts}
            for weight, parts in self._weights
        ]
        self._parts_by_target = {
            target.removesuffix(weight.name) + buffer: (target, part)
            for (target, weight), buffers in zip(packed_weights(module), self._buffer_names, strict=True)
            for part, buffer in buffers.items()
        }
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
                for (weight, _), names in zip(self._weights, self._buffer_names, strict=True):
                    now = ((part, weight.layer._buffers[name]) for part, name in names.items())
                    stack.enter_context(weight.standing_in({k: t for k, t in now if isinstance(t, Tensor)}))
            yield

    def named(self, graph: Graph) -> Graph:
        """A graph that was traced with the parts as buffers; its inputs say what they are parts of."""
        named = (
            replace(entry, target=whole[0], part=whole[1])
            if (whole := self._parts_by_target.get(entry.target)) is not None
            else entry
            for entry in graph.inputs
        )
        return replace(graph, inputs=tuple(named)) if self._parts_by_target else graph

    def _swap(self) -> None:
        for (weight, parts), names in zip(self._weights, self._buffer_names, strict=True):
            del weight.layer._parameters[weight.name]
            for part, tensor in parts.items():
                weight.layer._buffers[names[part]] = tensor
        self._are_buffers = True

    def _swap_back(self) -> None:
        for held, before in self._tables:
            held.clear()
            held.update(before)
        for (weight, _), names in zip(self._weights, self._buffer_names, strict=True):
            for name in names.values():
                weight.layer._buffers.pop(name, None)
        self._are_buffers = False


def _free_name(layer: nn.Module, name: str) -> str:
    """A name that no tensor of a layer has: underscores are added to it until it is free."""
    while name in layer._buffers or name in layer._parameters:
        name += "_"
    return name
