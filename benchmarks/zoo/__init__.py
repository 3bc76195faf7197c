"""Known architectures, each a small instance with random weights and a batch: what users bring."""

from __future__ import annotations

from . import decoders as decoders
from . import encoders as encoders
from . import own_images as own_images
from . import own_sequences as own_sequences
from . import speech as speech
from . import vision as vision
from .registry import ARCHITECTURES as ARCHITECTURES
from .registry import Instance as Instance
from .registry import Maker as Maker
from .registry import loss_of as loss_of

__all__ = ["ARCHITECTURES", "Instance", "Maker", "loss_of"]
