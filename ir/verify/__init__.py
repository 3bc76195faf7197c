"""Checks that a graph is well formed and that a schedule carries it out within its memory.

The schedule's check keeps its own books, on purpose: it reuses neither `liveness` nor what `Graph` derives,
and compares its peak with theirs. Both functions report the first fault in program order.
"""

from .graph import verify_graph
from .schedule import verify_schedule

__all__ = ["verify_graph", "verify_schedule"]
