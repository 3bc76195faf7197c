"""What automatic casting is on: part of what a graph is captured for, and of every call of its plan."""

from __future__ import annotations

import torch

__all__ = ["autocast_state"]


def autocast_state() -> tuple[tuple[str, str], ...]:
    """The device types for which automatic casting is on, each with its element type."""
    return tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )
