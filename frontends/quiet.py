"""torch's tracer without its log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

__all__ = ["quiet_tracer"]


@contextlib.contextmanager
def quiet_tracer() -> Generator[None]:
    """What the tracer logs about a model's error stands in the error that follows."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
