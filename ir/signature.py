"""Maps the user's nested arguments to a graph's inputs, and its outputs to the user's result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .scalars import Operand

__all__ = ["Assignment", "Autocast", "Branch", "Delivery", "Origin", "Sharing", "Signature", "Slot"]


Autocast = tuple[tuple[str, str, bool], ...]
"""Device types with the element type that is cast to, and whether casts of parameters are kept."""


class Origin(Enum):
    """Names the origin of one output of the user's module."""

    COMPUTED = "computed"
    """The forward delivers it."""
    INPUT = "input"
    """It is an input, a parameter or a buffer, or a view of one."""
    OUTPUT = "output"
    """It is a view of something that the forward delivers."""
    CONSTANT = "constant"
    """It is not a tensor."""


class Sharing(Enum):
    """Says how a result that shares memory with others gets its gradient."""

    VIEW = "view"
    """As any view: its gradient is a part of that of what it is a view of."""
    DETACHED = "detached"
    """It is detached and has none."""
    NO_GRAD = "no_grad"
    """It was made within `torch.no_grad()`: a view that is a leaf, at which its gradient ends."""
    OWN = "own"
    """The graph takes its gradient, since a function of the model's or a hook is on the way to the others."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Says how one leaf of the user's result is made.

    Args:
        origin: Its origin.
        index: Position among the graph's static inputs (`INPUT`) or forward outputs (`COMPUTED`, `OUTPUT`).
        view: Shape, strides and offset (in elements) of the view; None for the whole tensor.
        constant: The value itself, for `CONSTANT`.
        sharing: The way of its gradient, if it shares memory with something that has one.
    """

    origin: Origin
    index: int = 0
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    constant: bool | int | float | str | None = None
    sharing: Sharing = Sharing.VIEW


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor among the leaves of the arguments; `index` is its `Input.target`."""

    index: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A value that Python code of the module reads from a tensor, and that the graph was specialised to.

    Args:
        delivery: The tensor, as one more result of the forward.
        read: The way it is read: `__bool__`, `__float__`, `__index__`, `__int__` or `item`.
        value: The value that is read from it in each step that the graph holds for.
        where: The line of the module's code.
    """

    delivery: Delivery
    read: str
    value: object
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """An attribute that the forward leaves with another value, and does not look at before.

    Args:
        module: The dotted path of its module; "" is the root.
        name: Its name.
        number: The number that it becomes. `Leaf(k)` is the number that the attribute of the signature's
            assignment k held before.
        before: The number that it held at capture.
        is_constant: Whether it becomes the same number or text in each call.
        constant: That number or text.
    """

    module: str
    name: str
    number: Operand | None = None
    before: int | float | None = None
    is_constant: bool = False
    constant: object = None

    @property
    def is_delivered(self) -> bool:
        """Whether it becomes an object with tensors, which is delivered with the result."""
        return self.number is None and not self.is_constant


@dataclass(frozen=True, slots=True)
class Signature:
    """The calling convention of a captured module.

    Args:
        in_tree: The framework's description of how `(args, kwargs)` nest (opaque here).
        out_tree: The same for the result; for the pair of the result and a tuple of the values that
            attributes get, if there are such.
        leaves: For each leaf of the arguments: a `Slot` if it is a tensor, or else the constant that
            the graph was specialised to.
        deliveries: The way each leaf of the result is made.
        modes: The `training` flag of every submodule at capture, by dotted path ("" is the root).
        autocast: The device types for which automatic casting was on at capture.
        unused: The forward outputs that have a gradient in the original, and none in the graph, because the
            loss that it was captured for does not use them.
        reaching_hooks: For each gradient that a hook within the forward sees, the forward outputs that it
            comes from: if the loss uses none of them, eager has no such gradient.
        branches: The values that the module's Python code reads from tensors, if the graph is specialised to
            them.
        assignments: The attributes that the forward changes.
        switched: The indices of the static inputs whose `requires_grad` the forward changes, as
            `x.requires_grad_()` does: in the graph they have it as the forward leaves it.
        same: The arguments that are the same tensor as a static input and none of their own, as the forward
            writes into it: the index among the tensors of the arguments, and that of the input.
    """

    in_tree: object
    out_tree: object
    leaves: tuple[object, ...]
    deliveries: tuple[Delivery, ...]
    modes: tuple[tuple[str, bool], ...]
    autocast: Autocast = ()
    unused: frozenset[int] = frozenset()
    reaching_hooks: tuple[frozenset[int], ...] = ()
    branches: tuple[Branch, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    switched: frozenset[int] = frozenset()
    same: tuple[tuple[int, int], ...] = ()

    @property
    def delivers_assigned(self) -> bool:
        """Whether attributes get tensors, or objects with tensors."""
        return any(each.is_delivered for each in self.assignments)
