"""The table of published methods: names, sources, and that the reference has all of them."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from support.calls import several
from support.examples import examples
from support.exhaustive import chains, problem_of
from support.solutions import verify
from support.strategies import Sample, graphs, with_annotations

from irc.ir import UsageError
from irc.passes.strategy_registry import STRATEGIES, Asked, load_strategies, strategy_named

samples = chains() | graphs()
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "strategies.md"


def test_the_reference_lists_every_method_with_its_source() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| ([^|]+?) \|$", PAGE.read_text(), re.MULTILINE)
    sources = {strategy.name: strategy.source for strategy in load_strategies(copies=False)}
    listed = {n: source for names, source in rows for n in re.findall("`([^`]+)`", names) if n in sources}
    assert listed.keys() == sources.keys()
    assert all(listed[name].startswith(source) for name, source in sources.items())


def test_each_entry_names_a_strategy_of_its_name() -> None:
    strategies = [*load_strategies(copies=False), *load_strategies(copies=True)]
    assert [strategy.name for strategy in strategies] == list(STRATEGIES)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("every-8", ("every-<k>", 8)),
        ("checkpoints-0", ("checkpoints-<n>", 0)),
        ("rotor", ("rotor", 0)),
        ("every-0", None),
        ("every-08", None),
        ("checkpoints-", None),
        ("rotor-1", None),
        ("every-<k>", None),
    ],
)
def test_names_are_read(name: str, found: tuple[str, int] | None) -> None:
    named = strategy_named(name)
    assert (named and (named[0].name, named[1])) == found


@given(samples | with_annotations(samples) | several(samples))
@examples(60)
def test_every_method_has_valid_schedules_or_says_what_it_needs(sample: Sample) -> None:
    problem = problem_of(sample)
    for strategy in load_strategies(copies=False):
        asked = Asked(int(0.7 * problem.keep_all.peak_bytes), 2, deadline=time.thread_time() + 0.2)
        try:
            found = list(strategy.find(problem, asked))
        except UsageError as error:
            assert strategy.name in str(error) and error.help
            continue
        for solution in found:
            verify(problem, solution)
