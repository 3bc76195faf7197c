"""irc: a compiler for training memory.

A model and a budget in bytes in; a trainable PyTorch module that fits, at the least loss of speed, out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiler.comparison.compare_strategies import compare
    from .compiler.comparison.comparison import Comparison
    from .compiler.dynamo.backend import backend
    from .compiler.estimate.estimate import Estimate, estimate
    from .compiler.estimate.largest_batch import LargestBatch, max_batch
    from .compiler.onnx_export.export import export_onnx
    from .compiler.optimize import optimize
    from .compiler.pareto.front import Front
    from .compiler.pareto.sweep import pareto
    from .compiler.pipeline.api import pipeline
    from .compiler.report import report
    from .compiler.training import measured_peak_bytes, measured_step
    from .frontends.onnx import from_onnx
    from .frontends.torch.annotations import keep, recompute, unmark
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
    from .passes.progress import Progress

__version__ = "0.1.0"

__all__ = [
    "BackwardError",
    "BudgetError",
    "Comparison",
    "Estimate",
    "Front",
    "IrcError",
    "LargestBatch",
    "Plan",
    "Progress",
    "TierError",
    "TimeLimitError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "backend",
    "compare",
    "estimate",
    "export_onnx",
    "from_onnx",
    "keep",
    "max_batch",
    "measured_peak_bytes",
    "measured_step",
    "optimize",
    "pareto",
    "pipeline",
    "recompute",
    "report",
    "unmark",
]

_MODULES = {
    "Comparison": ".compiler.comparison.comparison",
    "Estimate": ".compiler.estimate.estimate",
    "Front": ".compiler.pareto.front",
    "LargestBatch": ".compiler.estimate.largest_batch",
    "Progress": ".passes.progress",
    "backend": ".compiler.dynamo.backend",
    "compare": ".compiler.comparison.compare_strategies",
    "estimate": ".compiler.estimate.estimate",
    "export_onnx": ".compiler.onnx_export.export",
    "from_onnx": ".frontends.onnx",
    "keep": ".frontends.torch.annotations",
    "max_batch": ".compiler.estimate.largest_batch",
    "measured_peak_bytes": ".compiler.training",
    "measured_step": ".compiler.training",
    "optimize": ".compiler.optimize",
    "pareto": ".compiler.pareto.sweep",
    "pipeline": ".compiler.pipeline.api",
    "recompute": ".frontends.torch.annotations",
    "report": ".compiler.report",
    "unmark": ".frontends.torch.annotations",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports what stands behind a public name when it is first used, so that `irc --help` is instant."""
    if name in ("ir", "torch_support", "passes", "frontends", "backends", "compiler", "tools"):
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, ".ir"), __name__), name)
