"""Imports ONNX files in a process of its own, and says what CPU time each took.

    python -P worker.py onnx2torch

A script: it runs also where irc is not installed. It says in one line which versions it runs, then reads one
path a line, and answers each with one line of JSON: `{"seconds": 0.1}`, or `{"refusal": "..."}`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

_IMPORTERS = {"irc": ("irc", "from_onnx"), "onnx2torch": ("onnx2torch", "convert")}
_PACKAGES = {"irc": ("irc-compiler", "onnx-ir"), "onnx2torch": ("onnx2torch",)}


def answer(convert: Callable[[str], Any], path: str) -> dict[str, Any]:
    """CPU seconds from the file to the module, or the first line of why there is none."""
    started = time.process_time()
    try:
        module = convert(path)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return {"refusal": f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]}
    seconds = time.process_time() - started
    return {"seconds": seconds, "parameters": sum(p.numel() for p in module.parameters())}


def _find_torchvision() -> list[Any]:
    """Makes torchvision importable where its wheel is for another build of torch; what it needs to live."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = importlib.import_module("torch.library").Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return [library]
    except ImportError:
        pass
    return []


def main() -> int:
    """Answers until there are no more paths."""
    warnings.simplefilter("ignore")
    name = sys.argv[1]
    kept = _find_torchvision() if name == "onnx2torch" else []
    package, function = _IMPORTERS[name]
    convert = getattr(importlib.import_module(package), function)
    versions: dict[str, str] = {}
    for distribution in (*_PACKAGES[name], "torch", "onnx"):
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(convert, line.rstrip("\n"))), flush=True)
    kept.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main())
