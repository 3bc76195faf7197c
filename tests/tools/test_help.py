"""Every command explains itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from irc.tools import cli


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (cli.main, ["optimize"]),
        (cli.main, ["estimate"]),
        (cli.main, ["max-batch"]),
        (cli.main, ["pareto"]),
        (cli.main, ["inspect"]),
        (cli.main, ["explain"]),
        (cli.main, ["report"]),
        (cli.main, ["run"]),
        (cli.main, ["machine"]),
        (cli.main, ["schedule"]),
    ],
)
def test_help_is_printed(
    main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out
