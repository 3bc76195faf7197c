"""Makes parameters that are one tensor under several names one tensor while a module is traced."""

# Modules keep their parameters in a dict without a public name, so that they can be swapped.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import Tensor, nn

__all__ = ["TiedParameters"]

_Place = tuple[dict[str, nn.Parameter | None], str]


class TiedParameters:
    """The attributes of a module that hold one parameter more than once.

    A tracer gives each name a tensor of its own. Then the gradients of the names are summed after the step,
    in another order than eager's, which adds each use of the tensor as backward comes to it: with three uses
    or more, the sums differ by rounding.

    Args:
        module: With its own parameters, not those of a tracer.
    """

    def __init__(self, module: nn.Module) -> None:
        found: dict[int, dict[tuple[int, str], _Place]] = {}
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    places = found.setdefault(id(parameter), {})
                    places[id(child._parameters), name] = child._parameters, name
        self._groups = [list(places.values()) for places in found.values() if len(places) > 1]

    @contextlib.contextmanager
    def as_one(self) -> Generator[None]:
        """Lets all names of a parameter hold the tensor of the first name."""
        before: list[tuple[_Place, nn.Parameter | Tensor | None]] = []
        for (held, name), *others in self._groups:
            for place in others:
                before.append((place, place[0][place[1]]))
                place[0][place[1]] = held[name]
        try:
            yield
        finally:
            for (held, name), tensor in before:
                held[name] = tensor  # pyright: ignore[reportArgumentType]
