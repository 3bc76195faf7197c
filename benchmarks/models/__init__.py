"""The benchmark models: standard architectures and sizes, each a factory of `(module, example_args)`.

The modules return their scalar loss, so the loss and its targets stand inside the planned step:
`irc optimize benchmarks.models:resnet50`. Keyword arguments make small versions for tests. Every factory
seeds its own generator and leaves the caller's as it was. `MODELS` has all of them by name.
"""

from __future__ import annotations

from .amoebanet import amoebanet_d
from .images import Classifier as Classifier
from .images import (
    alexnet,
    densenet121,
    densenet161,
    densenet169,
    densenet201,
    plain_cnn,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnet200,
    unet,
    vgg11,
    vgg13,
    vgg16,
    vgg19,
)
from .inception_v3 import inception_v3
from .inception_v4 import inception_v4
from .registry import MODELS as MODELS
from .searched_cells import amoebanet_cifar, darts_cifar, nasnet_cifar
from .sequences import gpt2, gpt2_no_dropout, lstm, t5

# The factories, as many as in MODELS.
__all__ = [
    "alexnet",
    "amoebanet_cifar",
    "amoebanet_d",
    "darts_cifar",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "gpt2",
    "gpt2_no_dropout",
    "inception_v3",
    "inception_v4",
    "lstm",
    "nasnet_cifar",
    "plain_cnn",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "t5",
    "unet",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
]
