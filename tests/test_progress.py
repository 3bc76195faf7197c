"""Planning says how it goes on: to a function, to stderr, and to the logger `irc`."""

import logging
from itertools import pairwise

import pytest
import torch
from torch import nn

import irc


def model() -> tuple[nn.Module, torch.Tensor]:
    layers = (layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh()))
    return nn.Sequential(*layers), torch.randn(512, 32)


def test_a_function_is_told_of_phases_and_of_the_search(caplog: pytest.LogCaptureFixture) -> None:
    told: list[irc.Progress] = []
    with caplog.at_level(logging.INFO, "irc"):
        fitted = irc.optimize(*model(), "75%", costs="analytic", progress=told.append)
    phases = list(dict.fromkeys(each.phase for each in told))
    assert phases == [
        "capture",
        "replay-draws",
        "split-convolutions",
        "write-in-place",
        "cost",
        "plan-memory",
    ]
    assert [record.getMessage() for record in caplog.records] == [str(each) for each in told]
    found = [each for each in told if each.overhead is not None]
    assert found[-1].overhead == pytest.approx(fitted.plan.overhead)
    for earlier, later in pairwise(found):
        assert earlier.overhead is not None and earlier.bound is not None and earlier.seconds_left is not None
        assert later.overhead is not None and later.bound is not None and later.seconds_left is not None
        assert later.overhead <= earlier.overhead and later.bound >= earlier.bound
        assert later.seconds_left <= earlier.seconds_left <= 60
    count = len(told)
    fitted(torch.randn(256, 32)).sum().backward()
    assert len(told) == count, "a later plan has one line of the logger"


def test_progress_is_printed_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    irc.optimize(*model(), "75%", costs="analytic")
    assert capsys.readouterr().err == ""
    irc.optimize(*model(), "75%", costs="analytic", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "capture" and "overhead" in lines[-1] and "gap" in lines[-1]


def test_what_is_no_function_is_refused() -> None:
    wrong = "yes"
    with pytest.raises(irc.UsageError, match="progress is a str, not a bool or a function"):
        irc.optimize(*model(), "75%", progress=wrong)  # pyright: ignore[reportArgumentType]
