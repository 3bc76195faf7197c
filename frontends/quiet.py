"""Libraries without their logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

__all__ = ["quiet", "quiet_tracer"]


@contextlib.contextmanager
def quiet(*names: str) -> Generator[None]:
    """Silences these loggers meanwhile: the error that follows says the same."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def quiet_tracer() -> contextlib.AbstractContextManager[None]:
    """Keeps torch's tracer from logging a model's error."""
    return quiet("torch._subclasses.fake_tensor")
