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
from irc.passes.remat.strategies.published import PUBLISHED, Asked, strategy_named

samples = chains() | graphs()
STRATEGIES = Path(__file__).parents[3] / "docs" / "reference" / "strategies.md"


def test_readme_lists_every_method_with_its_source() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| ([^|]+?) \|$", STRATEGIES.read_text(), re.MULTILINE)
    known = {strategy.name for strategy in PUBLISHED}
    listed = {n: source for names, source in rows for n in re.findall("`([^`]+)`", names) if n in known}
    assert listed.keys() == {strategy.name for strategy in PUBLISHED}
    assert all(listed[strategy.name].startswith(strategy.source) for strategy in PUBLISHED)


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
    for strategy in PUBLISHED:
        asked = Asked(int(0.7 * problem.keep_all.peak_bytes), 2, deadline=time.thread_time() + 0.2)
        try:
            found = list(strategy.find(problem, asked))
        except UsageError as error:
            assert strategy.name in str(error) and error.help
            continue
        for solution in found:
            verify(problem, solution)
