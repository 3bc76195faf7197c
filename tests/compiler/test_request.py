"""A request from options and one from a pipeline as text are the same; what is out of order is refused."""

from __future__ import annotations

import pickle

import pytest

from irc import UsageError
from irc.compiler.request import Request
from irc.passes import PassManager, parse_passes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "sqrt-n", "time_limit": 3.0},
        {"forwards_in_flight": 2},
        {"accumulate_gradients": True},
        {"swap": "host:1GiB", "costs": "gtx1080"},
    ],
)
def test_the_printed_pipeline_of_a_request_is_that_request(options: dict[str, object]) -> None:
    request = Request.of("60%", **{"costs": "cpu", **options})  # type: ignore[arg-type]
    text = str(PassManager(request.passes()))
    again = Request.of_passes(parse_passes(text))
    assert str(PassManager(again.passes())) == text
    assert again.budget == request.budget == "60%"
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cost,split-convolutions,plan-memory", "split-convolutions comes too late"),
        ("plan-memory,cost", "cost comes too late"),
        ("cost,cost,plan-memory", "cost comes too late"),
        ("split-convolutions,cost", "chooses a schedule"),
    ],
)
def test_a_pipeline_out_of_order_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        Request.of_passes(parse_passes(text))
    assert caught.value.code == "IRC405" and caught.value.help


def test_costs_are_analytic_if_no_pass_finds_them() -> None:
    assert Request.of_passes(parse_passes("plan-memory")).cost.profile == "cpu"
