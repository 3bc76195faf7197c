"""Names of a file stand quoted in the commands that errors advise."""

from __future__ import annotations

import shlex

from irc.frontends.onnx.lowerings.table import settle


def test_a_name_is_one_word_of_an_advised_command() -> None:
    for name in ("sr", "a b", "x; rm -rf ~", "$(id)", "`id`", "it's"):
        advised = settle([name]).partition(": ")[2].partition(", or from_onnx")[0]
        assert shlex.split(advised) == ["--constant", f"{name}=VALUE"]
