"""How arguments and results nest: torch's trees, and dataclasses that torch's pytree does not know.

Such a dataclass is opened into all that its object holds, fields and other attributes, and made anew from
that without `__init__` and `__post_init__`. Nothing is registered for the user's class: for everybody else
it stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MemberDescriptorType
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["flatten"]


class Dataclass:
    """Stands for an object of a dataclass in a tree.

    Args:
        kind: The dataclass.
        held: What the object holds, by name.
    """

    def __init__(self, kind: type, held: dict[str, Any]) -> None:
        self.kind, self.held = kind, held


def _children(opened: Any) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(opened.held.values()), (opened.kind, tuple(opened.held))


def _made(values: Any, context: Any) -> Any:
    """An object of the dataclass, with these values under the names of what it held."""
    kind, names = context
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also where it is frozen
    return made


pytree.register_pytree_node(Dataclass, _children, _made)


def flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of arguments or of a result, and how they nest.

    `pytree.tree_unflatten` makes the nesting anew, with objects of the same dataclasses.

    Args:
        value: Anything.
        is_leaf: Whether something is not to be opened.
    """
    leaves, tree = pytree.tree_flatten(value, is_leaf)
    if not any(map(_is_openable, leaves)):
        return leaves, tree
    return pytree.tree_flatten(_opened(value, is_leaf, ()), is_leaf)


def _opened(value: Any, is_leaf: Callable[[Any], bool] | None, around: tuple[int, ...]) -> Any:
    """The value with stand-ins for dataclasses; one within itself stays as it is."""

    def opened(leaf: Any) -> Any:
        if not _is_openable(leaf) or id(leaf) in around:
            return leaf
        within = (*around, id(leaf))
        held = {name: _opened(each, is_leaf, within) for name, each in _held(leaf).items()}
        return Dataclass(type(leaf), held)

    return pytree.tree_map(opened, value, is_leaf=is_leaf)


def _is_openable(leaf: Any) -> bool:
    """Whether a leaf is an object of a dataclass that holds attributes and nothing else.

    Not so where it is a module, a list, an exception and the like too, or where code stands between a name
    and what is held under it.
    """
    kind = type(leaf)
    if not hasattr(kind, "__dataclass_fields__") or kind.__new__ is not object.__new__:
        return False
    if isinstance(leaf, nn.Module):
        return False
    slots = dict(_slots(kind))
    return all(slots.get(name) is found for name, found in _data_descriptors(kind, _held(leaf)))


def _held(leaf: Any) -> dict[str, Any]:
    """What an object holds: its slots that are set, and its `__dict__`."""
    held = {name: slot.__get__(leaf) for name, slot in _slots(type(leaf)) if hasattr(leaf, name)}
    return held | getattr(leaf, "__dict__", {})


def _slots(kind: type) -> Iterator[tuple[str, MemberDescriptorType]]:
    """The places for attributes outside of the `__dict__`, the first base's first."""
    for each in reversed(kind.__mro__):
        for name, found in vars(each).items():
            if isinstance(found, MemberDescriptorType):
                yield name, found


def _data_descriptors(kind: type, names: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """The names among these whose assignment runs something that the class has."""
    for name in names:
        found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
        if hasattr(type(found), "__set__"):
            yield name, found
