"""Libraries without their logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

__all__ = ["quiet", "quiet_tracer"]


@contextlib.contextmanager
def quiet(*names: str) -> Generator[None]:
    """Meanwhile, these loggers are silent: what they would say stands in the error that follows."""
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
    """Meanwhile, torch's tracer does not log a model's error."""
    return quiet("torch._subclasses.fake_tensor")
