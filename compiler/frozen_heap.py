"""Spares planning the collector's walks over objects that were there before."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator

__all__ = ["frozen_heap"]


@contextlib.contextmanager
def frozen_heap() -> Generator[None]:
    """Keeps what is alive out of the cyclic collector's sight until the end of the block.

    A full collection walks every object of the process, most of them torch's: a sixth of a second each, and a
    plan of a few hundred operations has about eight. New objects are collected as ever, those of other
    threads too. Nothing changes if objects are frozen already: who froze them keeps them so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
