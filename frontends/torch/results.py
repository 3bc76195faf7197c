"""The tensors of what a forward returns, and the refusal of tensors that nobody could find."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from ...ir import THROUGH_DYNAMO, UnsupportedError
from ...torch_support.pytree import flatten, flatten_arguments
from .generators import is_torch_generator
from .object_graph import HeldObject, changed, holds_traced, reach_of
from .state import state_changes

__all__ = ["flattened", "refuse_hidden_tensors", "refusing_writes"]

_OPAQUE = (nn.Module, ModuleType, FunctionType, type)
_TRACED = (FakeTensor, FunctionalTensor)
_MOST = 10_000
"""Objects that are looked into, of one leaf."""


def flattened(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a forward's result while it is traced, and how they nest; sizes stay what they are.

    Raises:
        UnsupportedError: IRC342 for a tensor within an object that is not a tree of torch's: a planned step
            could not put its own tensor there.
    """
    leaves, tree = flatten(result, is_leaf=_is_size, kinds=_TRACED)
    if any(map(is_torch_generator, leaves)):
        raise UnsupportedError(
            "IRC342",
            "the forward returns a torch.Generator, which a planned step does not make",
            help="return what is drawn from it, or keep it outside of the module",
        )
    hidden = _hidden(leaves, _TRACED)
    if hidden is not None:
        if _is_openable_for(hidden, _TRACED):
            raise UnsupportedError(
                "IRC342",
                f"the forward returns one object of class {type(hidden).__qualname__}, with a tensor in it, "
                "in two places or within itself: a planned step makes it anew for one place",
                help="return it once, or a copy in each place (dataclasses.replace)",
            )
        raise UnsupportedError(
            "IRC342",
            f"the forward returns a tensor within an object of class {type(hidden).__qualname__}, which a "
            "planned step cannot make anew",
            help="pass use_cache=False: training reads no cache of earlier tokens"
            if _is_cache(hidden)
            else "return tuples, lists, dicts or plain dataclasses, or register the class with torch's "
            f"pytree before irc.optimize; or {THROUGH_DYNAMO}",
        )
    return leaves, tree


def refuse_hidden_tensors(leaves: Iterable[Any]) -> None:
    """Refuses arguments that hold tensors out of sight: a plan would take their values for all steps.

    Raises:
        UnsupportedError: IRC343.
    """
    hidden = _hidden(leaves, (Tensor,))
    if hidden is None:
        return
    if _is_openable_for(hidden, (Tensor,)):
        raise UnsupportedError(
            "IRC343",
            f"one object of class {type(hidden).__qualname__}, with a tensor in it, is in two places of the "
            "arguments or within itself: a plan makes it anew for one place",
            help="pass it once, or a copy in each place (dataclasses.replace)",
        )
    raise UnsupportedError(
        "IRC343",
        f"an argument of class {type(hidden).__qualname__} holds a tensor, and a plan would take its "
        "value for all steps",
        help="pass tensors, tuples, lists, dicts or plain dataclasses, or register the class with "
        "torch's pytree before irc.optimize",
    )


@contextlib.contextmanager
def refusing_writes(arguments: Any) -> Generator[None]:
    """Refuses a forward that writes into lists, dicts and other objects that it is given.

    A planned step does not run its Python code, and eager's callers see what is written. Objects that are no
    trees of torch's, which are the caller's own, hold afterwards what they held, and what they have learned.

    Args:
        arguments: The arguments of the forward.

    Raises:
        UnsupportedError: IRC556.
    """
    leaves, tree = flatten_arguments(arguments)
    holders = reach_of(leaf for leaf in leaves if not isinstance(leaf, (Tensor, nn.Module)))
    changes: list[tuple[HeldObject, Any]] = []
    try:
        yield
        leaves_now, tree_now = flatten_arguments(arguments)
    finally:
        changes += state_changes(holders)
        changes += [
            (holder, key) for holder in holders for key, _, new in changed(holder) if holds_traced(new)
        ]
        for holder, key in changes:
            holder.put_back_item(key)
    if changes or tree_now != tree or any(a is not b for a, b in zip(leaves_now, leaves, strict=True)):
        raise UnsupportedError(
            "IRC556",
            "the forward writes into its arguments: a list, a dict or another object is another afterwards",
            help="return what it computes, or let it work on a copy: list(...), dict(...), "
            "dataclasses.replace(...)",
        )


def _is_size(part: object) -> bool:
    """Whether a part is a size: torch's trees would make a tuple of it."""
    return isinstance(part, torch.Size)


def _is_cache(found: object) -> bool:
    """Whether an object is a cache of keys and values, as language models return."""
    return any(kind.__name__.endswith("Cache") for kind in type(found).__mro__)


def _is_openable_for(leaf: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a leaf is a dataclass that would have been opened for its tensors, had it not been before."""
    return any(isinstance(part, kinds) for part in flatten(leaf, is_leaf=_is_size, kinds=kinds)[0])


def _hidden(leaves: Iterable[Any], kinds: tuple[type, ...]) -> Any:
    """A leaf that is not a tensor, with tensors of some kinds somewhere within; None if there is none."""
    seen: set[int] = set()
    return next((leaf for leaf in leaves if not isinstance(leaf, Tensor) and _holds(leaf, kinds, seen)), None)


def _holds(leaf: object, kinds: tuple[type, ...], seen: set[int]) -> bool:
    """Whether tensors of some kinds are somewhere within an object, apart from what was seen."""
    most = len(seen) + _MOST
    waiting: list[object] = [leaf]
    while waiting and len(seen) < most:
        found = waiting.pop()
        if isinstance(found, kinds):
            return True
        if id(found) in seen or isinstance(found, _OPAQUE):
            continue
        seen.add(id(found))
        waiting += _within(found)
    return False


def _within(found: object) -> Iterable[object]:
    if isinstance(found, dict):
        yield from cast("dict[object, object]", found).values()
    elif isinstance(found, (list, tuple, set, frozenset)):
        yield from cast("Iterable[object]", found)
    yield from getattr(found, "__dict__", {}).values()
    for kind in type(found).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(found, name, None)
