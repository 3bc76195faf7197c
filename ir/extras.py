"""The extras of the distribution: packages that some features need, and that the core does without."""

from __future__ import annotations

import importlib.util

from .errors import UsageError

__all__ = ["EXTRAS", "require"]

EXTRAS = {
    "onnx": {"onnx": "onnx", "onnx-ir": "onnx_ir", "onnxruntime": "onnxruntime"},
    "plot": {"matplotlib": "matplotlib"},
}
"""The packages of each extra by the names that pip knows, with the names that Python imports."""


def require(extra: str, purpose: str) -> None:
    """Refuses a feature if packages of its extra are not installed; imports nothing.

    Args:
        extra: A key of `EXTRAS`.
        purpose: The feature, as the beginning of a sentence: `reading an ONNX file`.

    Raises:
        UsageError: IRC448.
    """
    packages = EXTRAS[extra].items()
    missing = [package for package, module in packages if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(
            "IRC448",
            f"{purpose} needs packages that are not installed: {', '.join(missing)}",
            help=f"install the extra: pip install 'irc-compiler[{extra}]'",
        )
