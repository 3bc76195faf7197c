"""A step between its forward and its backward, whose saved values can be made fewer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .program import Program

__all__ = ["PendingBackward"]


class PendingBackward:
    """The autograd node of a step, between its forward and its backward.

    Args:
        program: The program that ran.
        inputs: Its static inputs.
        outputs: The outputs that `run_step` returned.
    """

    def __init__(self, program: Program, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        node: Any = next(output.grad_fn for output in outputs if output.grad_fn is not None)
        self._node: weakref.ref[Any] = weakref.ref(node)
        self._versions = [tensor._version for tensor in inputs]

    @property
    def is_pending(self) -> bool:
        """Whether backward can still run: the outputs' history exists, and no backward has used it."""
        node = self._node()
        return node is not None and node.saved is not None

    def is_behind(self, node: object) -> bool:
        """Whether an autograd node, such as the `grad_fn` of a tensor, is this step's."""
        return node is not None and node is self._node()

    def call_around(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Calls a function right before backward, and one right after it."""
        node = self._node()
        if node is not None:
            node.register_prehook(lambda *_: before())
            node.register_hook(lambda *_: after())

    def change(self, program: Program, kept: Sequence[int]) -> bool:
        """Makes backward run another program that needs fewer saved values; frees the others.

        Args:
            program: Another schedule of the same graph.
            kept: The indices, among the saved values, of those that the other program saves, in its order.

        Returns:
            Whether backward was changed. It is not if either program copies to tiers, or if an input that
            backward would recompute from was written since forward.
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
