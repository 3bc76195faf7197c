"""The command `python -m benchmarks.drop_in`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
