"""Ranks that refuse together: where one of them cannot go on, the others do not wait for it."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["first_failure"]


def first_failure(said: str, group: dist.ProcessGroup | None = None) -> str:
    """What the first rank says that has something to say; all ranks call it.

    Args:
        said: What went wrong on this rank; empty where nothing did.
        group: The ranks; None for all. A process that belongs to no group speaks for itself.
    """
    if not dist.is_initialized():
        return said
    found = [""] * dist.get_world_size(group)
    dist.all_gather_object(found, said, group=group)
    return next(filter(None, found), "")
