"""Runs one importer where irc is not installed: a script for the environments of the peers.

    python -P isolated.py onnx2torch --out report.json

It names its folder as a package, so that its neighbours are found and nothing else of irc's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_PACKAGE = "onnx_conformance"


def main() -> int:
    """Makes a package of this folder, and runs its `measure`."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[_PACKAGE] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.measure").main()


if __name__ == "__main__":
    sys.exit(main())
