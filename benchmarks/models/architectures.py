"""Known architectures, each a small instance with random weights and a batch: what users bring."""

from __future__ import annotations

from . import hub, own_control_flow, own_images, own_sequences
from .registry import ARCHITECTURES, Instance, Maker, loss_of

__all__ = ["ARCHITECTURES", "Instance", "Maker", "loss_of"]

assert hub and own_control_flow and own_images and own_sequences
