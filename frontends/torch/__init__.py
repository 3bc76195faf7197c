"""torch modules in: captured as one training graph."""

from .capture import Captured, capture
from .loss import Loss

__all__ = ["Captured", "Loss", "capture"]
