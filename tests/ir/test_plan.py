import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irc.ir import AnnotationEffect, Decision, Plan, Policy, Rounding, UsageError

amounts = st.integers(0, 1 << 60)
fractions = st.floats(0, 1e6)
decisions = st.builds(
    Decision,
    storage=st.text(),
    operation=st.text(),
    nbytes=amounts,
    action=st.sampled_from(("keep", "recompute", "free")),
    runs_again=st.integers(0, 9),
    seconds=fractions,
    reason=st.text(),
    location=st.text(),
    annotation=st.text(),
)
effects = st.builds(
    AnnotationEffect,
    by=st.text(),
    policy=st.sampled_from([policy.value for policy in Policy]),
    effect=st.text(),
)
plans = st.builds(
    Plan,
    budget_bytes=amounts,
    peak_bytes=amounts,
    baseline_peak_bytes=amounts,
    static_bytes=amounts,
    minimum_budget_bytes=amounts,
    floor_bytes=amounts,
    step_seconds=st.none() | fractions,
    overhead=fractions,
    lower_bound_overhead=fractions,
    proven_optimal=st.booleans(),
    strategy=st.text(),
    costs=st.text(),
    decisions=st.lists(decisions, max_size=3).map(tuple),
    seconds_to_plan=fractions,
    gradients=st.sampled_from(("returned", "accumulated", "applied")),
    reserved_bytes=amounts,
    annotations=st.lists(effects, max_size=3).map(tuple),
    forwards_in_flight=st.integers(1, 9),
    peak_with_gradients_bytes=st.none() | amounts,
)

PLAN = Plan(
    budget_bytes=4 << 30,
    peak_bytes=3 << 30,
    baseline_peak_bytes=6 << 30,
    static_bytes=1 << 30,
    minimum_budget_bytes=5 << 29,
    floor_bytes=2 << 30,
    step_seconds=2.0,
    overhead=0.25,
    lower_bound_overhead=0.2,
    proven_optimal=False,
    strategy="ilp",
    costs="analytic:cpu",
    decisions=(
        Decision("s_a", "relu (aten.relu.default)", 1 << 20, "recompute", 1, 0.5, "it is cheap", "m.py:7"),
        Decision("s_b", "mm (aten.mm.default)", 3 << 30, "keep", 0, 0.0, "it is dear"),
        Decision("s_c", "add (aten.add.Tensor)", 5 << 20, "free", 0, 0.0, "nobody reads it"),
    ),
    seconds_to_plan=1.26,
)


@pytest.mark.slow
@given(plans)
def test_a_plan_reads_back_what_it_writes(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == plan
    assert json.loads(path.read_text())["gap"] == plan.gap


@given(plans)
def test_the_gap_is_a_fraction_of_the_best_time(plan: Plan) -> None:
    assert plan.gap >= 0
    assert (1 + plan.lower_bound_overhead) * (1 + plan.gap) >= 1 + plan.overhead - 1e-9 * (1 + plan.overhead)
    assert (plan.gap == 0) == (plan.overhead <= plan.lower_bound_overhead)


@given(plans)
def test_every_plan_prints(plan: Plan) -> None:
    assert f"({plan.budget_bytes:,} bytes)" in plan.summary()
    changed = [d for d in plan.decisions if d.action != "keep"]
    assert f"{len(plan.decisions) - len(changed)} storages are kept" in plan.explain()


def test_the_summary_in_words() -> None:
    assert (
        PLAN.summary()
        == """\
          budget  4 GiB (4,294,967,296 bytes)
  predicted peak  3 GiB (3,221,225,472 bytes, 50.0% of baseline)
   baseline peak  6 GiB
          static  1 GiB (parameters, buffers, inputs)
       in flight  1 forward: its backward comes before the next forward
        overhead  25.00% of the step's time, bound 20.00%: at most 4.17% from optimal
 smallest budget  2.5 GiB (2,684,354,560 bytes)
        strategy  ilp, costs analytic:cpu (bounds, not measured), planned in 1.3 s"""
    )
    assert "bound 20.00%: proved optimal" in replace(PLAN, proven_optimal=True).summary()


@pytest.mark.parametrize(
    ("gradients", "reserved", "what"),
    [
        ("accumulated", "gradients from step to step", "accumulated into .grad as they are made"),
        ("applied", "optimizer state", "applied by the optimizer within backward, and freed at once"),
    ],
)
def test_the_summary_tells_how_gradients_are_released(gradients: str, reserved: str, what: str) -> None:
    lines = replace(PLAN, gradients=gradients, reserved_bytes=3 << 20).summary().splitlines()
    assert lines[3:6] == [
        f"          static  1 GiB (parameters, buffers, inputs, and 3 MiB of {reserved})",
        "       in flight  1 forward: its backward comes before the next forward",
        f"       gradients  {what}",
    ]


def test_the_summary_tells_what_existing_gradients_take_and_what_to_do_where_that_is_too_much() -> None:
    fits = replace(PLAN, peak_with_gradients_bytes=PLAN.budget_bytes)
    line = "  with gradients  4 GiB (4,294,967,296 bytes) of a step that finds .grad there and adds to it"
    assert fits.summary().splitlines()[5] == line
    over = replace(PLAN, peak_with_gradients_bytes=PLAN.budget_bytes + 1).summary().splitlines()[5]
    assert over.endswith(
        "4,294,967,297 bytes) of a step that finds .grad there and adds to it; to accumulate "
        "within the budget, plan with accumulate_gradients=True"
    )
    released = replace(fits, gradients="accumulated").summary()
    assert "with gradients" not in released and "with gradients" not in PLAN.summary()


def test_the_summary_tells_how_many_forwards_are_in_flight() -> None:
    lines = replace(PLAN, forwards_in_flight=3, gradients="accumulated", reserved_bytes=1 << 20).summary()
    assert lines.splitlines()[3:5] == [
        "          static  1 GiB (parameters, buffers, inputs of 3 forwards, and 1 MiB of gradients from "
        "step to step)",
        "       in flight  3 forwards, then their backwards in any order",
    ]


def test_a_plan_of_before_gradients_were_released_is_read() -> None:
    data = PLAN.to_json()
    del data["gradients"], data["reserved_bytes"]
    del data["forwards_in_flight"], data["peak_with_gradients_bytes"]
    assert Plan.from_json(data) == PLAN


def test_the_explanation_in_words() -> None:
    assert (
        PLAN.explain()
        == """\
storage  made by                   size   action     reason           where
s_c      add (aten.add.Tensor)     5 MiB  free       nobody reads it
s_a      relu (aten.relu.default)  1 MiB  recompute  it is cheap      m.py:7
1 storages are kept until backward reads them (3 GiB)"""
    )


def test_an_older_file_is_replaced_and_nothing_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    replace(PLAN, strategy="eviction").save(path)
    assert Plan.load(path).strategy == "eviction"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        PLAN.save(tmp_path / "missing" / "plan.json")
    assert caught.value.code == "IRC402"


def test_roundings_are_read_as_they_are_written() -> None:
    roundings = Rounding("all numbers"), Rounding("buffer b", ("b",), is_more=True)
    plan = replace(PLAN, roundings=roundings)
    written = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(written) == replace(plan, memory=None)
    texts = {**written, "format": "irc-plan-1", "roundings": ["all numbers", "buffer b"]}
    assert Plan.from_json(texts).roundings == (Rounding("all numbers"), Rounding("buffer b"))
    assert Plan.from_json(texts).may_differ("a") and not replace(PLAN, roundings=roundings[1:]).may_differ(
        "a"
    )
    assert plan.roundings == roundings and plan.may_differ("b")


def changed(**values: Any) -> str:
    return json.dumps({**PLAN.to_json(), **values})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        json.dumps({"format": "irc-plan-2"}),
        changed(format="irc-plan-3"),
        changed(format=None),
        changed(budget_bytes="4GiB"),
        changed(budget_bytes=1.5),
        changed(budget_bytes=True),
        changed(peak_bytes=None),
        changed(overhead="none"),
        changed(proven_optimal=1),
        changed(strategy=7),
        changed(gradients="thrown away"),
        changed(gradients=1),
        changed(reserved_bytes=1.5),
        changed(forwards_in_flight=None),
        changed(peak_with_gradients_bytes=1.5),
        changed(peak_with_gradients_bytes=True),
        changed(decisions=None),
        changed(decisions=3),
        changed(decisions="abc"),
        changed(decisions=[3]),
        changed(decisions=[{}]),
        changed(decisions=[{"storage": "a"}]),
        changed(decisions=[{**PLAN.to_json()["decisions"][0], "nbytes": "many"}]),
        changed(decisions=[{**PLAN.to_json()["decisions"][0], "surprise": 1}]),
        changed(decisions=[{**PLAN.to_json()["decisions"][0], "action": "x"}]),
        changed(gradients="lost"),
        changed(annotations=3),
        changed(annotations=[{"by": "irc.keep(a)"}]),
        changed(annotations=[{"by": "irc.keep(a)", "policy": "hold", "effect": ""}]),
        changed(annotations=[{"by": 3, "policy": "keep", "effect": ""}]),
        "\x00\x01",
    ],
)
def test_a_corrupt_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        Plan.load(path)
    assert caught.value.code == "IRC402" and caught.value.help


def test_bytes_that_are_no_text_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(UsageError, match="cannot be read") as caught:
        Plan.load(path)
    assert caught.value.code == "IRC402"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UsageError, match="IRC402"):
        Plan.load(path)
    with pytest.raises(UsageError, match="IRC402"):
        Plan.load(tmp_path)
