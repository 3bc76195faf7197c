"""The benchmark models: standard architectures and sizes, each a factory of `(module, example_args)`.

The modules return their scalar loss, so the loss and its targets stand inside the planned step:
`irc optimize benchmarks.models:resnet50`. Keyword arguments make small versions for tests. Every factory
seeds its own generator and leaves the caller's as it was. `MODELS` has all of them by name.
"""

from __future__ import annotations

from .amoebanet import amoebanet_d
from .images import Classifier as Classifier
from .images import (
    densenet121,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnet200,
    unet,
    vgg16,
)
from .inception_v4 import inception_v4
from .registry import MODELS as MODELS
from .sequences import gpt2, gpt2_no_dropout, lstm, t5

# The factories, as many as in MODELS.
__all__ = [
    "amoebanet_d",
    "densenet121",
    "gpt2",
    "gpt2_no_dropout",
    "inception_v4",
    "lstm",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "t5",
    "unet",
    "vgg16",
]
