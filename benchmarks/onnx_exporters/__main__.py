"""The command `python -m benchmarks.onnx_exporters`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
