"""Ranks that refuse together: if one of them cannot go on, the others do not wait for it."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from ...backends.distributed import reaching

__all__ = ["first_failure", "said_by_all"]

_Said = TypeVar("_Said")


def said_by_all(said: _Said, group: dist.ProcessGroup | None = None) -> list[_Said]:
    """Gathers what each rank says, the first one first; all ranks call it.

    Args:
        said: Of this rank; it can be pickled.
        group: The ranks; None for all. A process that belongs to no group speaks for itself.
    """
    if not dist.is_initialized():
        return [said]
    found = [said] * dist.get_world_size(group)
    with reaching(when="between steps"):
        dist.all_gather_object(found, said, group=group)
    return found


def first_failure(said: str, group: dist.ProcessGroup | None = None) -> str:
    """Returns the failure of the first rank that has one; all ranks call it.

    Args:
        said: What went wrong on this rank; empty if nothing did.
        group: As in `said_by_all`.
    """
    return next(filter(None, said_by_all(said, group)), "")
