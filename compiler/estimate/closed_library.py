"""The library transformers as a file may use it: without code from elsewhere, and off the network."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any, NoReturn

import torch

__all__ = ["closed_library"]

_LOCK = threading.RLock()
"""Held as long as settings of torch and of its libraries are others than the user's."""


@contextlib.contextmanager
def closed_library(dtype: torch.dtype | None = None) -> Generator[None]:
    """Lets transformers load no code of a model's, ask no hub and log nothing.

    Args:
        dtype: The type of tensors that are made meanwhile; None for torch's own.
    """
    import transformers
    from huggingface_hub import constants
    from transformers import dynamic_module_utils
    from transformers.models.auto import auto_factory, configuration_auto

    def refuse(*args: object, **options: object) -> NoReturn:
        raise ValueError("it refers to code, which is not run")

    name = "get_class_from_dynamic_module"
    modules: list[Any] = [
        module for module in (dynamic_module_utils, auto_factory, configuration_auto) if hasattr(module, name)
    ]
    with _LOCK:
        before = torch.get_default_dtype(), transformers.logging.get_verbosity(), constants.HF_HUB_OFFLINE
        loaders = [getattr(module, name) for module in modules]
        try:
            transformers.logging.set_verbosity_error()
            constants.HF_HUB_OFFLINE = True
            for module in modules:
                setattr(module, name, refuse)
            if dtype is not None:
                torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(before[0])
            transformers.logging.set_verbosity(before[1])
            constants.HF_HUB_OFFLINE = before[2]
            for module, loader in zip(modules, loaders, strict=True):
                setattr(module, name, loader)
