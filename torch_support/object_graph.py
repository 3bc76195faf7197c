"""Opens the objects that a model holds: capture and the guards of plans look into the same ones alike.

Two walks are built on this. Capture lists every object that can change, with the path to it, so that it
can tell what a forward changed and put it back (`frontends/torch/object_graph.py`). Guards turn a setting
into a value that pickles, and compare it with that of another call (`backends/torch/guards/settings.py`).
docs/explanation/design.md says why they are two, and why they go to different depths.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .inspectable import slots_of, store_of

__all__ = ["ABSENT", "PLAIN", "Limits", "array_content", "attributes_of", "partial_items"]


class _Absent(enum.Enum):
    ABSENT = "absent"


ABSENT: Any = _Absent.ABSENT
"""Stands for an item that an object does not hold; it is the same object after pickling."""

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    slice,
    range,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""The classes whose objects are compared as they are and lead to nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Says how far a walk goes.

    Args:
        depth: The steps from a root to the last objects that are opened.
        items: The most items of a container that is opened.
        array_bytes: The most bytes of an array of numpy that is compared by its numbers.
    """

    depth: int
    items: int
    array_bytes: int


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes that an object has in its `__dict__` and in slots, without asking its class."""
    held: dict[str, Any] = dict(store_of(value))
    for name in slots_of(type(value)):
        with contextlib.suppress(AttributeError):
            held[name] = object.__getattribute__(value, name)
    return held


def partial_items(value: functools.partial[Any]) -> dict[str, Any]:
    """Returns the function that a partial calls, and what it passes to it."""
    return {"func": value.func, "args": value.args, "keywords": value.keywords}


def array_content(value: np.ndarray[Any, Any], limits: Limits) -> bytes | None:
    """Returns the numbers of an array; None for an array of objects, and above the limit."""
    return None if value.dtype.hasobject or value.nbytes > limits.array_bytes else value.tobytes()
