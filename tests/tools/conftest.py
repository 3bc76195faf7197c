"""Shared by the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from irc.tools import cli


@pytest.fixture
def irc(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process: its exit status, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
