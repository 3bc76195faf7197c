"""The command `python -m benchmarks.partition_tables`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
