"""Hooks of libraries that only record what submodules return, and so are part of what is traced."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["RECORDERS_MARK", "is_recorder", "is_recording"]

_LIBRARY_MODULE = "transformers.utils.output_capturing"
"""Its hooks put what a layer returns (hidden states, attentions) into a list of the model's call that runs.

A model's first call that asks for such outputs installs them and marks the model. The list begins and ends
within the model's forward, so tracing sees all that they do; without a list they do nothing.
"""
RECORDERS_MARK = "_output_capturing_hooks_installed"
"""The attribute that says that a model has its hooks."""


def is_recorder(hook: Any) -> bool:
    """Whether a hook of a module is one of these."""
    return getattr(hook, "__module__", None) == _LIBRARY_MODULE


def is_recording() -> bool:
    """Whether a list is open now: outside of a forward, that of a model around it."""
    library_module = sys.modules.get(_LIBRARY_MODULE)
    if library_module is None:
        return False
    current: Any = getattr(library_module, "_active_collector", None)
    return current is None or bool(current.get())
