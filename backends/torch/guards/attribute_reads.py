"""Records which attributes of submodules are read during capture; the others may change without a new plan.

Reads that bypass the module are not recorded: `object.__getattribute__(module, name)`, and reads of a
`__dict__` that was taken before.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from .module_state import Attributes, State
from .settings import is_same

__all__ = [
    "AttributeReads",
    "Names",
    "differing_modules",
    "reads_all",
    "recording_attribute_reads",
    "relevant_settings",
]

Names = tuple[frozenset[str] | None, ...]
"""The names of the attributes that were read of each module of a tree, the root first; None if all count."""

_ALWAYS = frozenset({"training"})
_COPIES = frozenset({"__getstate__", "__reduce__", "__reduce_ex__"})
_OWN = "_irc"
"""The prefix of irc's own marks, which are read from the `__dict__`."""
_PACKAGE = Path(__file__).absolute().parents[3]
_UNSUSPECTED = (f"{_PACKAGE}/", nn.modules.module.__file__)
"""Code that looks at a whole `__dict__` and reads no settings from it: irc's own, and `nn.Module`'s."""


class AttributeReads:
    """The attributes that any thread read of any module: tracing may run code in autograd's threads."""

    def __init__(self) -> None:
        self._names: dict[int, set[str]] = {}
        self._whole: set[int] = set()

    def note(self, module: nn.Module, name: str, reader: FrameType) -> None:
        """Records that code in a frame reads an attribute."""
        if reads_all(name, reader):
            self._whole.add(id(module))
        self._names.setdefault(id(module), set()).add(name)

    def of(self, root: nn.Module) -> Names:
        """Returns the names that were read of each submodule of a module.

        All names count if it cannot be known which were read: the `__dict__` was read, or the class has its
        own way to read attributes. All names of the root count: see `Original.reads`.
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
    """Whether code that reads this attribute may learn all other attributes from it, as copies do."""
    return name in _COPIES or (name == "__dict__" and not _is_unsuspected(reader.f_code.co_filename))


@functools.lru_cache(maxsize=1024)
def _is_unsuspected(file: str) -> bool:
    return file.startswith(_UNSUSPECTED) or str(Path(file).absolute()).startswith(_UNSUSPECTED)


def differing_modules(now: State, planned: State, names: Names) -> Iterator[int]:
    """Yields the indices of the modules in a tree whose class differs, or a setting that was read."""
    for index, (mine, its) in enumerate(zip(now, planned, strict=True)):
        if not is_same(mine, its):
            read = names[index] if names else None
            known, found = (relevant_settings(each[1], read) for each in (its, mine))
            if mine[0] is not its[0] or not is_same(known, found):
                yield index


def relevant_settings(settings: Attributes, read: frozenset[str] | None) -> dict[str, object]:
    """Returns the settings that count if these names are known to be read; None stands for all names."""
    return {name: value for name, value in settings if read is None or name in read or name.startswith(_OWN)}


def _reads_as_any(kind: type) -> bool:
    others = (each for each in kind.__mro__ if each not in (nn.Module, object))
    return not any("__getattribute__" in vars(each) for each in others)


_open: tuple[AttributeReads, ...] = ()
_before: Any = None
"""The `__getattribute__` that `nn.Module` had before, if somebody else has replaced it too."""
_lock = threading.Lock()


@contextmanager
def recording_attribute_reads() -> Generator[AttributeReads]:
    """Records the reads of modules' attributes while the context is open."""
    global _open, _before
    reads = AttributeReads()
    with _lock:
        if not _open:
            _before = vars(nn.Module).get("__getattribute__")
            nn.Module.__getattribute__ = _read  # pyright: ignore[reportAttributeAccessIssue]
        _open = (*_open, reads)
    try:
        yield reads
    finally:
        with _lock:
            _open = tuple(each for each in _open if each is not reads)
            if not _open and _before is None:
                del nn.Module.__getattribute__
            elif not _open:
                nn.Module.__getattribute__ = _before  # pyright: ignore[reportAttributeAccessIssue]


def _read(self: nn.Module, name: str) -> Any:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for reads in _open:
        reads.note(self, name, frame)
    return super(nn.Module, self).__getattribute__(name) if _before is None else _before(self, name)
