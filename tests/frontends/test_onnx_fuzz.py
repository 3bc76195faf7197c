"""Spoilt files, by a fixed budget of examples: each runs, or is refused with one of irc's own errors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.onnx_mutations import corpus, mutate_bytes, mutate_model, outcome

pytestmark = pytest.mark.filterwarnings("default")  # torch warns of odd sizes and types; no user reads these

_fixed = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("name", sorted(corpus()))
def test_the_models_run_before_they_are_spoilt(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(corpus()[name])
    assert outcome(tmp_path / "m.onnx") == "ran"


@settings(_fixed, max_examples=800)
@given(name=st.sampled_from(sorted(corpus())), randomness=st.randoms(use_true_random=False))
def test_spoilt_bytes(name: str, randomness: random.Random, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(mutate_bytes(corpus()[name], randomness))
    told = outcome(tmp_path / "m.onnx")
    assert told in {"ran", "large"} or told.startswith("IRC3")


@settings(_fixed, max_examples=1200)
@given(name=st.sampled_from(sorted(corpus())), randomness=st.randoms(use_true_random=False))
def test_spoilt_graphs(name: str, randomness: random.Random, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(mutate_model(corpus()[name], randomness))
    told = outcome(tmp_path / "m.onnx")
    assert told in {"ran", "large"} or told.startswith("IRC3")
