"""Known architectures, each a small instance with random weights and a batch: what users bring."""

from __future__ import annotations

from . import decoders, encoders, own_images, own_sequences, speech, vision
from .registry import ARCHITECTURES, Instance, Maker, loss_of

__all__ = ["ARCHITECTURES", "Instance", "Maker", "loss_of"]

assert decoders and encoders and own_images and own_sequences and speech and vision
