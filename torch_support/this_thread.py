"""Replaces functions of torch in one thread: others may run torch meanwhile."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

__all__ = ["replaced_here"]


def replaced_here(
    holder: Any, name: str, function: Callable[..., Any]
) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile, this thread that calls an attribute of a module or a class calls this function instead.

    It is no way to replace what backward runs: on a GPU, that is in threads of torch's own.
    """
    before, thread = getattr(holder, name), threading.get_ident()

    @functools.wraps(before)
    def by_thread(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else before)(*args, **kwargs)

    return patch.object(holder, name, by_thread)
