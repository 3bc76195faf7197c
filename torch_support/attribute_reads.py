"""Records which attributes of modules are read and written while a module is traced.

Reads that bypass the module are not recorded: `object.__getattribute__(module, name)`, and reads of a
`__dict__` that was taken before. Neither are such writes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Generator, Set
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

__all__ = [
    "READS_AS_ANY",
    "AttributeReads",
    "Names",
    "reads_all",
    "recording_attribute_reads",
]

Names = tuple[frozenset[str] | None, ...]
"""The names of the attributes that were read of each module of a tree, the root first; None if all count."""

_ALWAYS = frozenset({"training"})
READS_AS_ANY = "_irc_reads_as_any"
"""The mark of a class whose own way to read attributes ends at that of `nn.Module`."""
_COPIES = frozenset({"__getstate__", "__reduce__", "__reduce_ex__"})
_PACKAGE = Path(__file__).absolute().parents[1]
_UNSUSPECTED = (f"{_PACKAGE}/", nn.modules.module.__file__)
"""Code that looks at a whole `__dict__` and reads no settings from it: irc's own, and `nn.Module`'s."""


class AttributeReads:
    """The attributes that any thread read of any module: tracing may run code in autograd's threads."""

    def __init__(self) -> None:
        self._names: dict[int, set[str]] = {}
        self._whole: set[int] = set()
        self._made: set[tuple[int, str]] = set()

    def note(self, module: nn.Module, name: str, reader: FrameType) -> None:
        """Records that code in a frame reads an attribute."""
        if reads_all(name, reader):
            self._whole.add(id(module))
        self._names.setdefault(id(module), set()).add(name)

    def note_write(self, module: nn.Module, name: str) -> None:
        """Records that code assigns to an attribute."""
        if name not in self._names.get(id(module), ()) and id(module) not in self._whole:
            self._made.add((id(module), name))

    def assigned_to(self, module: nn.Module) -> set[str]:
        """Returns the names of the attributes of a module that were assigned before they were read."""
        return {name for key, name in self._made if key == id(module)}

    def names_of(self, module: nn.Module) -> Set[str]:
        """Returns the names of the attributes of a module that were read; all if all may have been read."""
        return {*vars(module)} if id(module) in self._whole else self._names.get(id(module), set())

    def is_read(self, module: nn.Module, name: str) -> bool:
        """Whether the value that an attribute had before may have been read: it was not assigned first."""
        return (id(module), name) not in self._made or not self.are_known(module)

    def are_known(self, module: nn.Module) -> bool:
        """Whether it is known which attributes of a module were read.

        It is not if the `__dict__` was read, or if the class has its own way to read attributes.
        """
        return id(module) not in self._whole and _reads_as_any(type(module))

    def of(self, root: nn.Module, changed: Set[tuple[str, str]] = frozenset()) -> Names:
        """Returns the names that were read of each submodule of a module; all count if they are not known.

        All names of the root count: see `Original.reads`.

        Args:
            root: The module.
            changed: The paths of submodules with names of attributes that do not count.
        """
        known: dict[frozenset[str], frozenset[str]] = {}  # many modules share one set
        found: list[frozenset[str] | None] = [None]
        for path, child in list(root.named_modules())[1:]:
            if not self.are_known(child):
                found.append(None)
            else:
                read = {name for name in self._names.get(id(child), ()) if (path, name) not in changed}
                names = _ALWAYS.union(name for name in read if not name.startswith("__"))
                found.append(known.setdefault(names, names))
        return tuple(found)


def reads_all(name: str, reader: FrameType) -> bool:
    """Whether code that reads this attribute may learn all other attributes from it, as copies do."""
    return name in _COPIES or (name == "__dict__" and not _is_unsuspected(reader.f_code.co_filename))


@functools.lru_cache(maxsize=1024)
def _is_unsuspected(file: str) -> bool:
    return file.startswith(_UNSUSPECTED) or str(Path(file).absolute()).startswith(_UNSUSPECTED)


def _reads_as_any(kind: type) -> bool:
    others = (vars(each) for each in kind.__mro__ if each not in (nn.Module, object))
    return not any("__getattribute__" in members and READS_AS_ANY not in members for members in others)


_open: tuple[AttributeReads, ...] = ()
_before: dict[str, Any] = {}
"""The functions that `nn.Module` had before, if somebody else has replaced them too."""
_lock = threading.Lock()


@contextmanager
def recording_attribute_reads() -> Generator[AttributeReads]:
    """Records the reads and writes of modules' attributes while the context is open."""
    global _open
    reads = AttributeReads()
    with _lock:
        if not _open:
            for name, function in (("__getattribute__", _read), ("__setattr__", _write)):
                _before[name] = vars(nn.Module).get(name)
                setattr(nn.Module, name, function)
        _open = (*_open, reads)
    try:
        yield reads
    finally:
        with _lock:
            _open = tuple(each for each in _open if each is not reads)
            if not _open:
                for name, function in _before.items():
                    if function is None:
                        delattr(nn.Module, name)
                    else:
                        setattr(nn.Module, name, function)


def _read(self: nn.Module, name: str) -> Any:
    depth = 2 if READS_AS_ANY in vars(type(self)) else 1  # the class's own way is between
    frame = sys._getframe(depth)  # pyright: ignore[reportPrivateUsage]
    for reads in _open:
        reads.note(self, name, frame)
    before = _before["__getattribute__"]
    return super(nn.Module, self).__getattribute__(name) if before is None else before(self, name)


def _write(self: nn.Module, name: str, value: Any) -> None:
    for reads in _open:
        reads.note_write(self, name)
    _before["__setattr__"](self, name, value)
