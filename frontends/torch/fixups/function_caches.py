"""Caches of functions (`functools.lru_cache`), in which a traced forward would leave tensors without data."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from types import FunctionType
from typing import Any, cast

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from ....torch_support.functions import closed_over

__all__ = ["caches_of", "forget_traced", "is_traced"]

_Cache: Any = type(functools.lru_cache(lambda: None))


def caches_of(module: nn.Module) -> list[Any]:
    """The caches that a module's code has: among its methods and attributes, and the functions beside them.

    Functions that decorators hold count, and those that their files import, but for torch and irc.
    """
    children = list(module.modules())
    kinds = {kind for child in children for kind in type(child).__mro__}
    waiting: list[Any] = [value for child in children for value in vars(child).values()]
    for kind in kinds:
        if not _is_library(kind.__module__):
            waiting += vars(kind).values()
    seen: set[int] = set()
    found: list[Any] = []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or type(value) not in (FunctionType, staticmethod, _Cache):
            continue  # not isinstance(), which some objects answer with a warning
        seen.add(id(value))
        if type(value) is _Cache:
            found.append(value)
        elif type(value) is FunctionType:
            waiting += closed_over(value)
            names = value.__globals__
            if id(names) not in seen and not _is_library(str(names.get("__name__"))):
                seen.add(id(names))
                waiting += names.values()
        else:
            waiting.append(value.__func__)
    return found


def _is_library(module: str) -> bool:
    """Whether a module is torch's or irc's: hundreds of caches, and none holds a forward's tensors."""
    return module.partition(".")[0] in ("torch", "irc")


def forget_traced(caches: Iterable[Any]) -> None:
    """Clears the caches that hold a traced tensor: the next call, traced or not, would be given it."""
    for cache in caches:
        if cache.cache_info().currsize and any(map(is_traced, _held(cache))):
            cache.cache_clear()


def _held(cache: Any) -> list[Any]:
    """Returns what a cache refers to: the results, or a dict of them if its size is not limited."""
    return [found for found in gc.get_referents(cache) if not isinstance(found, (type, FunctionType))]


def is_traced(held: object) -> bool:
    """Whether something is or holds a tensor that exists only while a module is traced."""
    kind = cast("type[Any]", type(held))  # not isinstance(), which asks the object for its class
    if issubclass(kind, (set, frozenset)):
        held = list(cast("set[object]", held))
    return any(issubclass(type(leaf), (FakeTensor, FunctionalTensor)) for leaf in pytree.tree_leaves(held))
