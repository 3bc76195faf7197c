"""The command `python -m benchmarks.swap_tables`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
