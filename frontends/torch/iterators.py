"""Iterators that a forward may hold and must not draw from: nobody can see how far one is, or put it back."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, cast

from ...ir import UnsupportedError
from ...torch_support.containers import base_of, put_item

__all__ = ["is_iterator", "untouched_iterators"]

_MODULES = ("builtins", "itertools", "collections", "_collections_abc")
"""The modules of Python's own iterators; other iterators are objects whose attributes can be looked at."""
_DRAWING = frozenset({"send", "throw", "close", "__setstate__"})


class _Untouched:
    """Stands for an iterator, and refuses to be drawn from by the thread that made it."""

    def __init__(self, iterator: Any, path: str) -> None:
        self._iterator, self._path = iterator, path
        self._thread = threading.get_ident()

    def __iter__(self) -> _Untouched:
        return self

    def __next__(self) -> Any:
        self._refuse()
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name in _DRAWING:
            self._refuse()
        return getattr(self._iterator, name)

    def __repr__(self) -> str:
        return repr(self._iterator)

    def _refuse(self) -> None:
        if threading.get_ident() == self._thread:
            raise UnsupportedError(
                "IRC338",
                f"the forward draws from the iterator {self._path}; a plan would freeze what it drew",
                help="draw outside of the module, and pass what was drawn as an argument",
            )


@contextlib.contextmanager
def untouched_iterators(places: Iterable[tuple[str, Any, Any]]) -> Generator[None]:
    """Refuses (IRC338) what a forward draws from the iterators of Python at these places.

    Args:
        places: The path of each item, the dict or list that holds it, and its key there.
    """
    replaced: list[tuple[Any, Any, _Untouched, Any]] = []
    made: dict[int, _Untouched] = {}
    try:
        for path, held, key in places:
            value = _get(held, key)
            if is_iterator(value):
                stand_in = made.setdefault(id(value), _Untouched(value, path))
                replaced.append((held, key, stand_in, value))
                put_item(held, key, stand_in)
        yield
    finally:
        for held, key, stand_in, value in replaced:
            if _get(held, key) is stand_in:
                put_item(held, key, value)


def is_iterator(value: Any) -> bool:
    """Whether a value is one of Python's iterators."""
    return _is_of_iterators(cast("type[Any]", type(value)))


@functools.lru_cache(maxsize=4096)
def _is_of_iterators(kind: type) -> bool:
    return kind.__module__ in _MODULES and issubclass(kind, Iterator)


def _get(held: Any, key: Any) -> Any:
    """An item of a dict or list; None if it is gone."""
    try:
        return base_of(type(held)).__getitem__(held, key)
    except LookupError:
        return None
