"""Puts back what a hook changes in Python while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from ..code import hook_reach
from ..object_graph import changed, holds_traced, is_generator, is_plain

__all__ = ["effects_put_back"]


@contextlib.contextmanager
def effects_put_back(hook: Any) -> Generator[list[str]]:
    """Around a call of a hook: what it changes in Python is as before.

    Yields:
        The paths of what it changed, once it is put back.
    """
    holders = hook_reach(hook)
    paths: list[str] = []
    try:
        yield paths
    finally:
        for holder in holders:
            is_any = is_generator(holder.value) or holder.is_container
            for key, _, new in list(changed(holder)):
                if is_any or is_plain(new) or holds_traced(new):
                    paths.append(holder.path_of(key))
                    holder.put_back_item(key)
