"""The former name of `irc.tools.bench_recompute`."""

from __future__ import annotations

from .bench_recompute import main

__all__ = ["main"]
