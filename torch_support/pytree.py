"""Flattens arguments and results: torch's trees, and dataclasses that torch's pytree does not know.

Such a dataclass is opened if tensors are somewhere within its object: into all that the object holds,
fields and other attributes. It is made anew from that without `__init__` and `__post_init__`. An attribute
that is neither opened nor a tensor is then one object for all calls, even if each run of a forward makes
its own (`self.id = object()` in `__post_init__`).

An object without tensors stays the very object. Nothing is registered for the user's class: for everybody
else it stays what it was.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from types import MemberDescriptorType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["flatten", "flatten_arguments", "is_openable", "tensors_of"]


class Dataclass:
    """Stands for an object of a dataclass in a tree.

    Args:
        kind: The dataclass.
        held: The items of the object, by name.
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
        object.__setattr__(made, name, value)  # even if it is frozen
    return made


pytree.register_pytree_node(Dataclass, _children, _made)


class Kept:
    """Stands for an object of a dataclass that stays itself, and shows what is in it.

    Args:
        value: The object; a tensor if only the nesting counts.
        held: Its items by name, and those of the dataclasses within it.
    """

    def __init__(self, value: Any, held: list[dict[str, Any]]) -> None:
        self.value, self.held = value, held


def _shown(kept: Any) -> tuple[list[Any], None]:
    return [kept.value, *kept.held], None


def _itself(values: Any, _: Any) -> Any:
    value, *held = values
    return Kept(value, held) if isinstance(value, Tensor) else value


pytree.register_pytree_node(Kept, _shown, _itself)


def flatten(
    value: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    kinds: type | tuple[type, ...] = Tensor,
) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of arguments or of a result, and how they nest.

    `pytree.tree_unflatten` makes the nesting anew, with objects of the same dataclasses. A dataclass without
    tensors is a leaf. So is one that was opened already, elsewhere or around itself.

    Args:
        value: Anything.
        is_leaf: Whether something is not to be opened.
        kinds: The tensors that a dataclass is opened for.
    """
    return _flatten(value, is_leaf, kinds, shows_kept=False)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among the arguments or the results of an operation, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


_LEAVES = frozenset({Tensor, nn.Parameter, bool, int, float, complex, str, bytes, type(None)})
"""Classes whose objects are leaves. Most calls have no other arguments, and each step flattens its own."""


def flatten_arguments(call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens as `flatten` does, and adds the contents of dataclasses without tensors after each object.

    The leaves tell whether a call is the planned one: by the objects, as a forward may compare them, and by
    what they hold, as scripts change it. `pytree.tree_unflatten` gives the very objects.

    Args:
        call: The positional arguments and the keyword arguments.
    """
    args, kwargs = call
    arguments = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, arguments)):
        return arguments, _tree_of_leaves(len(args), tuple(kwargs))
    return _flatten(call, None, Tensor, shows_kept=True)


@functools.lru_cache(maxsize=1024)
def _tree_of_leaves(count: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    """Returns the nesting of so many positional arguments and of keyword arguments, all of them leaves."""
    return pytree.tree_structure(((None,) * count, dict.fromkeys(names)))


def _flatten(
    value: Any, is_leaf: Callable[[Any], bool] | None, kinds: type | tuple[type, ...], *, shows_kept: bool
) -> tuple[list[Any], pytree.TreeSpec]:
    leaves, tree = pytree.tree_flatten(value, is_leaf)
    objects = _objects(leaves, is_leaf)
    if not objects:
        return leaves, tree
    holders = _holders(objects, kinds)
    seen: set[int] = set()

    def stand_in(leaf: Any) -> Any:
        if id(leaf) not in objects or id(leaf) in seen:
            return leaf
        if id(leaf) in holders:
            seen.add(id(leaf))
            return Dataclass(type(leaf), pytree.tree_map(stand_in, _held(leaf), is_leaf=is_leaf))
        return Kept(leaf, list(_within(leaf, objects, seen))) if shows_kept else leaf

    return pytree.tree_flatten(pytree.tree_map(stand_in, value, is_leaf=is_leaf), is_leaf)


_Objects = dict[int, tuple[Any, list[Any]]]
"""Objects of dataclasses, each with the leaves of what it holds, by identity."""


def _objects(leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> _Objects:
    """The objects of dataclasses among leaves, and those within them; each is looked into once."""
    found: _Objects = {}
    waiting = deque([leaves])
    while waiting:
        for each in waiting.popleft():
            if id(each) not in found and is_openable(each):
                held = pytree.tree_leaves(_held(each), is_leaf)
                found[id(each)] = each, held
                waiting.append(held)
    return found


def _holders(objects: _Objects, kinds: type | tuple[type, ...]) -> set[int]:
    """The objects with tensors of some kinds somewhere within."""
    around: defaultdict[int, list[int]] = defaultdict(list)
    for key, (_, held) in objects.items():
        for part in held:
            around[id(part)].append(key)
    waiting = [key for key, (_, held) in objects.items() if any(isinstance(part, kinds) for part in held)]
    found: set[int] = set()
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting += around[key]
    return found


def _within(value: Any, objects: _Objects, seen: set[int]) -> Iterator[dict[str, Any]]:
    """Yields what an object and the dataclasses within it hold, without those that were seen."""
    waiting = deque([value])
    while waiting:
        each = waiting.popleft()
        if id(each) not in seen:
            seen.add(id(each))
            yield _held(each)
            waiting += (part for part in objects[id(each)][1] if id(part) in objects)


def is_openable(leaf: Any) -> bool:
    """Whether a leaf is an object of a dataclass that holds attributes and nothing else.

    Not so if it is a module, a list, an exception and the like too, or if code stands between a name
    and what is held under it.
    """
    kind = type(leaf)
    if not hasattr(kind, "__dataclass_fields__") or kind.__new__ is not object.__new__:
        return False
    if isinstance(leaf, nn.Module):
        return False
    slots = _slots(kind)
    return all(slots.get(name) is found for name, found in _data_descriptors(kind, _held(leaf)))


def _held(leaf: Any) -> dict[str, Any]:
    """Returns what an object holds: its slots that are set, and its `__dict__`."""
    slots = _slots(type(leaf))
    held = {name: slot.__get__(leaf) for name, slot in slots.items() if hasattr(leaf, name)}
    return held | getattr(leaf, "__dict__", {})


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    """The places for attributes outside of the `__dict__`, the first base's first."""
    members = (item for each in reversed(kind.__mro__) for item in vars(each).items())
    return {name: found for name, found in members if isinstance(found, MemberDescriptorType)}


def _data_descriptors(kind: type, names: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """The names among these whose assignment runs something that the class has."""
    for name in names:
        found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
        if hasattr(type(found), "__set__"):
            yield name, found
