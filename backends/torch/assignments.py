"""Leaves in the attributes of a fitted module what its original forward would leave there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...ir import Assignment
from ...ir.scalars import evaluate

__all__ = ["Assigned"]


class Assigned:
    """The attributes that one call changes.

    What the last call left there is given up before this one runs: a plan counts one of each.

    Args:
        root: The fitted module.
        assignments: The attributes.
    """

    def __init__(self, root: nn.Module, assignments: Sequence[Assignment]) -> None:
        self._places = [
            (vars(root.get_submodule(each.module) if each.module else root), each) for each in assignments
        ]
        for table, each in self._places:
            if each.is_delivered:
                table[each.name] = None

    def assign(self, values: Sequence[Any]) -> None:
        """Assigns the numbers and texts, and the values with tensors in their order."""
        given = iter(values)
        held = [table.get(each.name) for table, each in self._places]
        for table, each in self._places:
            if each.number is not None:
                table[each.name] = evaluate(each.number, held)
            else:
                table[each.name] = each.constant if each.is_constant else next(given)
