"""The command `python -m irc.tools.drop_in`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
