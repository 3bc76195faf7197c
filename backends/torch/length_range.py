"""The lengths that one plan runs, each with the types that its tensors then have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...ir import Delivery, Input

__all__ = ["LengthFamily", "LengthRange"]


@dataclass(frozen=True, eq=False)
class LengthFamily:
    """Calls that differ in one length alone, and the plans for them.

    Args:
        argument: The index, among the tensors of a call, of one that has the length.
        dimension: Its dimension.
        name: The argument in words.
    """

    argument: int
    dimension: int
    name: str

    def length_of(self, tensors: Sequence[Tensor]) -> int | None:
        """The length of a call; None if it has none."""
        if self.argument >= len(tensors) or self.dimension >= tensors[self.argument].dim():
            return None
        return tensors[self.argument].shape[self.dimension]


@dataclass(frozen=True)
class LengthRange:
    """The lengths that a plan is for. Sizes of its program's tensors are polynomials of the length.

    Args:
        family: The calls.
        first: The smallest length.
        last: The largest, whose peak is the plan's.
        statics: The static inputs of the program.
        tangents: The tangents of its outputs.
        deliveries: The way that the result is made.
    """

    family: LengthFamily
    first: int
    last: int
    statics: tuple[Input, ...]
    tangents: tuple[Input | None, ...]
    deliveries: tuple[Delivery, ...]
