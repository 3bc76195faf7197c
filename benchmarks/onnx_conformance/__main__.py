"""The command `python -m benchmarks.onnx_conformance`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
