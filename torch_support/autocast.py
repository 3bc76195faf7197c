"""Reads the state of autocast, for which a graph is captured and which every call of its plan must have."""

from __future__ import annotations

import torch

from ..ir.signature import Autocast

__all__ = ["autocast_state"]


def autocast_state() -> Autocast:
    """The device types for which automatic casting is on."""
    return tuple(
        (
            device,
            str(torch.get_autocast_dtype(device)).removeprefix("torch."),
            torch.is_autocast_cache_enabled(),
        )
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )
