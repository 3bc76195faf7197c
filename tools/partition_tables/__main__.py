"""The command `python -m irc.tools.partition_tables`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
