"""The command `python -m irc.tools.onnx_conformance`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
