"""What the tests of the frontends share."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest) -> None:  # pyright: ignore[reportUnusedFunction]
    """A test draws the same arrays from its file's generator, whichever tests ran before it."""
    if hasattr(request.module, "_RNG"):
        request.module._RNG = np.random.default_rng(0)
