"""Tells the caches of casts apart that autocast has while a forward runs: one for each outermost region."""

# Transforms tell their state only through private functions.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.fx.traceback as fx_traceback

__all__ = ["LEAF_KEY", "CastCache", "CastCaches", "as_leaves"]

LEAF_KEY = "irc.leaf"


def as_leaves() -> contextlib.AbstractContextManager[Any]:
    """While active, tensors are traced that are leaves in eager: autocast keeps its casts of them."""
    return fx_traceback.annotate({LEAF_KEY: True})


class CastCache(NamedTuple):
    """A cache of autocast's.

    Args:
        number: Counts the outermost regions, each of which clears the cache when it ends.
        dtypes: The element types that are cast to.
        keeps_inputs: Whether it keeps casts of the forward's parameters and arguments: not within a transform
            that takes derivatives, where they are no leaves.
    """

    number: int
    dtypes: frozenset[torch.dtype]
    keeps_inputs: bool


class CastCaches:
    """Follows autocast within a forward that is traced.

    A tracer switches the cache off, and its tensors are no leaves: nothing is kept while it runs. Regions
    within the forward are told nevertheless whether there was a cache around it, which they take over unless
    they say otherwise themselves.
    """

    def __init__(self) -> None:
        self._number = 0
        self._is_cached = torch.is_autocast_cache_enabled
        self._is_cached_around = torch.is_autocast_cache_enabled()
        self._depth_around = _depth()

    def current(self) -> CastCache | None:
        """Returns the cache in which eager would keep a cast now, if it keeps casts."""
        dtypes = {torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
        if not dtypes:
            return None
        is_within = _depth() > self._depth_around
        is_cached = self._is_cached() if is_within else self._is_cached_around
        return CastCache(self._number, frozenset(dtypes), not _is_differentiated()) if is_cached else None

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """While active, what clears the cache in this thread begins another one."""
        clear, thread = torch.clear_autocast_cache, threading.get_ident()

        def cleared() -> None:
            clear()
            self._number += threading.get_ident() == thread

        def is_cached() -> bool:
            return self._is_cached_around if threading.get_ident() == thread else self._is_cached()

        return patch.multiple(torch, clear_autocast_cache=cleared, is_autocast_cache_enabled=is_cached)


def _is_differentiated() -> bool:
    """Whether a transform of torch.func takes derivatives."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(interpreter.key() in _DIFFERENTIATING for interpreter in stack)


_functorch: Any = vars(torch._C)["_functorch"]
_DIFFERENTIATING = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)


def _depth() -> int:
    """Counts the regions of autocast that are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
