"""irc: a compiler for training memory.

A model and a budget in bytes in; a trainable PyTorch module that fits, at the least loss of speed, out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .frontends.onnx import from_onnx
    from .frontends.torch.wishes import keep, recompute, unmark
    from .ir import (
        BackwardError,
        BudgetError,
        IrcError,
        Plan,
        TierError,
        TimeLimitError,
        UnsupportedError,
        UsageError,
        VerificationError,
    )
    from .tools.compile_backend import backend
    from .tools.export import export_onnx
    from .tools.optimize import optimize
    from .tools.pareto import pareto
    from .tools.pareto_front import Front
    from .tools.pipeline import pipeline

__version__ = "0.1.0"

__all__ = [
    "BackwardError",
    "BudgetError",
    "Front",
    "IrcError",
    "Plan",
    "TierError",
    "TimeLimitError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "backend",
    "export_onnx",
    "from_onnx",
    "keep",
    "optimize",
    "pareto",
    "pipeline",
    "recompute",
    "unmark",
]

_HOMES = {
    "Front": ".tools.pareto_front",
    "backend": ".tools.compile_backend",
    "export_onnx": ".tools.export",
    "from_onnx": ".frontends.onnx",
    "keep": ".frontends.torch.wishes",
    "optimize": ".tools.optimize",
    "pareto": ".tools.pareto",
    "pipeline": ".tools.pipeline",
    "recompute": ".frontends.torch.wishes",
    "unmark": ".frontends.torch.wishes",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports what stands behind a public name when it is first used, so that `irc --help` is instant."""
    if name in ("ir", "passes", "frontends", "backends", "tools"):
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, ".ir"), __name__), name)
