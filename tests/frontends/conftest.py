"""Restarts the generators of the frontends' test files before each test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest) -> None:  # pyright: ignore[reportUnusedFunction]
    """A test draws the same arrays from its file's generators, whichever tests ran before it."""
    for value in vars(request.module).values():
        if type(value) is np.random.Generator:  # some objects there refuse to be asked for their class
            bits: Any = value.bit_generator
            bits.state = type(bits)(bits.seed_seq).state
