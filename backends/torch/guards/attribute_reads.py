"""Which attributes of submodules are read while a module is captured; others may change without a new plan.

What is not seen is a read that goes round the module, by `object.__getattribute__(module, name)` or by a
`__dict__` that was taken before.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from .module_state import Attributes, State

__all__ = ["Names", "Readings", "counting", "differences", "reading", "reads_all"]

Names = tuple[frozenset[str] | None, ...]
"""For each module of a tree, the root first, what was read of it; None where all counts."""

_ALWAYS = frozenset({"training"})
_COPIES = frozenset({"__getstate__", "__reduce__", "__reduce_ex__"})
_OWN = "_irc"
"""The marks of irc begin so, and are read from the `__dict__`."""
_SEARCHERS = (
    str(Path(__file__).absolute().parents[3]) + os.sep,
    nn.modules.module.__file__,
)
"""Code that looks at a whole `__dict__` and does not read settings from it: irc's own, and `nn.Module`'s."""


class Readings:
    """What was read of any module, by any thread: tracing may run code in those of the autograd engine."""

    def __init__(self) -> None:
        self._names: dict[int, set[str]] = {}
        self._whole: set[int] = set()

    def note(self, module: nn.Module, name: str, reader: FrameType) -> None:
        """An attribute is read, in this frame."""
        if reads_all(name, reader):
            self._whole.add(id(module))
        self._names.setdefault(id(module), set()).add(name)

    def of(self, root: nn.Module) -> Names:
        """What was read of the submodules of a module.

        All counts where it cannot be known: where their `__dict__` was read, or where their class has a way
        of its own to read attributes. Of the root all counts: see `Original.reads`.
        """
        known: dict[frozenset[str], frozenset[str]] = {}  # many modules share one set
        found: list[frozenset[str] | None] = [None]
        for child in list(root.modules())[1:]:
            if id(child) in self._whole or not _reads_as_any(type(child)):
                found.append(None)
            else:
                read = self._names.get(id(child), set())
                names = _ALWAYS.union(name for name in read if not name.startswith("__"))
                found.append(known.setdefault(names, names))
        return tuple(found)


def reads_all(name: str, reader: FrameType) -> bool:
    """Whether who reads this attribute in this frame may learn all others from it, as copies do."""
    return name in _COPIES or (name == "__dict__" and not _is_searcher(reader.f_code.co_filename))


@functools.lru_cache(maxsize=1024)
def _is_searcher(file: str) -> bool:
    return file.startswith(_SEARCHERS) or os.path.abspath(file).startswith(_SEARCHERS)


def differences(now: State, planned: State, names: Names) -> Iterator[int]:
    """The places of the modules, in a tree, whose class or settings differ in something that was read."""
    for place, (mine, its) in enumerate(zip(now, planned, strict=True)):
        if mine is not its and mine != its:
            read = names[place] if names else None
            if mine[0] is not its[0] or counting(mine[1], read) != counting(its[1], read):
                yield place


def counting(settings: Attributes, read: frozenset[str] | None) -> dict[str, object]:
    """The settings that count, where these are known to be read."""
    return {name: value for name, value in settings if read is None or name in read or name.startswith(_OWN)}


def _reads_as_any(kind: type) -> bool:
    others = (each for each in kind.__mro__ if each not in (nn.Module, object))
    return not any("__getattribute__" in vars(each) for each in others)


_open: tuple[Readings, ...] = ()
_before: Any = None
"""How modules' attributes were read before, where somebody else stands in the way as well."""
_lock = threading.Lock()


@contextmanager
def reading() -> Generator[Readings]:
    """While it is open, reads of modules' attributes are noted."""
    global _open, _before
    readings = Readings()
    with _lock:
        if not _open:
            _before = vars(nn.Module).get("__getattribute__")
            nn.Module.__getattribute__ = _read  # pyright: ignore[reportAttributeAccessIssue]
        _open = (*_open, readings)
    try:
        yield readings
    finally:
        with _lock:
            _open = tuple(each for each in _open if each is not readings)
            if not _open and _before is None:
                del nn.Module.__getattribute__
            elif not _open:
                nn.Module.__getattribute__ = _before  # pyright: ignore[reportAttributeAccessIssue]


def _read(self: nn.Module, name: str) -> Any:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for readings in _open:
        readings.note(self, name, frame)
    return super(nn.Module, self).__getattribute__(name) if _before is None else _before(self, name)
