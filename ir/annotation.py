"""Annotates the results of an operation: to be kept for backward, or to be made again there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Annotation", "Policy", "named_annotations"]

_SHOWN = 3
"""Annotations that a line names."""


class Policy(Enum):
    """Names what is asked of the results of a forward operation."""

    KEEP = "keep"
    """The operation runs once: what backward needs of it stays."""
    RECOMPUTE = "recompute"
    """The results do not stay from forward to backward, unless the operation may run only once."""
    PREFER_KEEP = "prefer_keep"
    """A hint: shown, and left to the search."""
    PREFER_RECOMPUTE = "prefer_recompute"
    """A hint: shown, and left to the search."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """An annotation of the user.

    Args:
        policy: The demand.
        by: Who annotations it, as the user knows it, such as `irc.keep(layer3)`; unique in a graph.
    """

    policy: Policy
    by: str

    @property
    def is_hint(self) -> bool:
        """Whether a schedule may go against it."""
        return self.policy in (Policy.PREFER_KEEP, Policy.PREFER_RECOMPUTE)


def named_annotations(annotations: Iterable[str]) -> str:
    """Who annotations, in a few words: the first ones by name."""
    names = list(annotations)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
