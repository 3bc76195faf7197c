"""Runs each FILE.irc by its RUN lines: `irc opt` prints a graph, `filecheck` holds it to the comments."""

import os
import sys
from pathlib import Path

import lit.formats

config.name = "irc"  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
config.test_format = lit.formats.ShTest(execute_external=False)  # noqa: F821  # pyright: ignore
config.suffixes = [".irc"]  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
config.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # noqa: F821  # pyright: ignore
