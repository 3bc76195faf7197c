"""Every file of checks: importing this enters them all."""

from . import (
    accumulation,
    aliasing,
    casting,
    derivatives,
    freezing,
    hooks,
    leaks,
    modes,
    parallel,
    persistence,
    randomness,
    shapes,
    statistics,
    structures,
    writes,
)

__all__ = [
    "accumulation",
    "aliasing",
    "casting",
    "derivatives",
    "freezing",
    "hooks",
    "leaks",
    "modes",
    "parallel",
    "persistence",
    "randomness",
    "shapes",
    "statistics",
    "structures",
    "writes",
]
