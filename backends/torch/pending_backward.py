"""A step whose forward has run and whose backward has not: what it holds, and how to make it hold less."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .program import Program

__all__ = ["PendingBackward"]


class PendingBackward:
    """The autograd node of a step, between its forward and its backward.

    Args:
        program: What ran.
        inputs: Its static inputs.
        outputs: What `run_step` returned.
    """

    def __init__(self, program: Program, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        node: Any = next(output.grad_fn for output in outputs if output.grad_fn is not None)
        self._node: weakref.ref[Any] = weakref.ref(node)
        self._versions = [tensor._version for tensor in inputs]

    @property
    def is_waiting(self) -> bool:
        """Whether backward can still come: the outputs' history exists, and nothing has gone through it."""
        node = self._node()
        return node is not None and node.saved is not None

    def is_behind(self, node: object) -> bool:
        """Whether an autograd node, such as the `grad_fn` of a tensor, is this step's."""
        return node is not None and node is self._node()

    def change(self, program: Program, kept: Sequence[int]) -> bool:
        """Makes backward run another program, which needs only some of what is saved; frees the rest.

        Args:
            program: Another schedule of the same graph.
            kept: Where among the saved tensors those are that it saves, in its order.

        Returns:
            Whether it was done: not where an input was written since forward, from which backward would
            compute again, and not where either program copies to tiers.
        """
        node = self._node()
        if node is None or node.saved is None:
            return False
        if node.program.copies or program.copies:
            return False
        inputs: list[Tensor] = node.inputs
        if any(inputs[k]._version != self._versions[k] for k in program.read_by_backward):
            return False
        node.versions = [(k, self._versions[k]) for k in program.read_by_backward]
        node.saved_versions = [node.saved_versions[k] for k in kept]
        node.saved[:] = [node.saved[k] for k in kept]
        node.program = program
        return True
