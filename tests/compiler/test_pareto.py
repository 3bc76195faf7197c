"""The memory/time front: monotone, with the knee as defined, resumable, drawn."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import irc
from irc.compiler import tiers as swapping
from irc.compiler.model_source import Loaded, load
from irc.compiler.pareto import sweep as tracing
from irc.compiler.pareto.front import Front
from irc.compiler.pareto.journal import Identity, check_folder
from irc.compiler.pareto.picture import steps
from irc.compiler.pareto.points import Known, Point, Refusal, Survey, find_knee, merge
from irc.compiler.pareto.sweep import Sweep, trace_front
from irc.compiler.source import Source
from irc.compiler.tiers import offer
from irc.frontends.torch import capture
from irc.ir import Location, Tier, TierUse, parse_tiers, print_graph, step_times, verify_schedule
from irc.ir.units import memory_unit
from irc.passes import (
    MACHINES,
    Cost,
    OfferTiers,
    PlanMemory,
    Planner,
    Program,
    smallest_budget,
)

LIMIT = 5.0


def point(budget: int, peak: int, overhead: float, bound: float = 0.0) -> Point:
    return Point(budget, peak, 1 + overhead, overhead, bound, overhead - bound <= 1e-4, "ilp", budget, 0.1)


def copying(plan: Point, nbytes: int, tier: str = "disk", waited: float = 0.0) -> Point:
    """The plan with a copy out and back."""
    use = TierUse(tier, 1 << 20, nbytes, nbytes, nbytes, 0.1, 0.1)
    return replace(plan, tiers=(*plan.tiers, use), exposed_seconds=plan.exposed_seconds + waited)


def refusal(budget: int) -> Refusal:
    return Refusal(budget, "IRC204", "too little; really", 0.1)


def as_json(points: Iterable[Point]) -> Any:
    return json.loads(json.dumps([asdict(p) for p in points]))


def survey(*points: Point, **changes: Any) -> Survey:
    budgets = tuple(p.budget_bytes for p in points)
    found = Survey(max(budgets), 10, min(budgets), min(budgets), 1.0, "analytic:cpu", "3 points", budgets, ())
    return replace(found, **changes)


@st.composite
def outcomes(draw: st.DrawFn) -> list[Point | Refusal]:
    """Any plans that fit, with bounds that hold for all of them, among refusals."""
    budgets = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True))
    plans = {
        b: (draw(st.integers(1, b)), draw(st.integers(0, 9)) / 8) for b in budgets if draw(st.booleans())
    }
    copied = {b: draw(st.integers(0, 2)) for b in plans}
    found: list[Point | Refusal] = []
    for budget in budgets:
        if budget not in plans:
            found.append(refusal(budget))
            continue
        least = min(overhead for peak, overhead in plans.values() if peak <= budget)
        found.append(
            copying(point(budget, *plans[budget], least * draw(st.integers(0, 4)) / 4), copied[budget])
        )
    return found


# ---------------------------------------------------------------------- the front


@given(outcomes())
def test_a_merged_front_is_monotone_and_the_best_of_what_is_known(given: list[Point | Refusal]) -> None:
    points, refusals = merge(given)
    budgets = sorted((o.budget_bytes for o in given), reverse=True)
    assert [o.budget_bytes for o in (*points, *refusals)] == budgets
    for larger, smaller in pairwise(points):
        assert larger.overhead <= smaller.overhead and larger.bound <= smaller.bound
        assert larger.peak_bytes >= smaller.peak_bytes
    plans = {p.budget_bytes: p for p in given if isinstance(p, Point)}
    for p in points:
        assert p.peak_bytes <= p.budget_bytes and 0 <= p.bound <= p.overhead
        assert p.overhead == min(q.overhead for q in plans.values() if q.peak_bytes <= p.budget_bytes)
        assert p.bound == max(
            (q.bound for q in plans.values() if q.budget_bytes >= p.budget_bytes), default=0.0
        )
        assert p.proved == (p.overhead - p.bound <= 1e-4)
        as_fast = [q for q in plans.values() if q.peak_bytes <= p.budget_bytes and q.overhead == p.overhead]
        assert p.copied_bytes == min(q.copied_bytes for q in as_fast)
        source = plans[p.found_at_bytes]
        assert (source.peak_bytes, source.overhead) == (p.peak_bytes, p.overhead)
    least = min((p.peak_bytes for p in plans.values()), default=math.inf)
    assert all(r.budget_bytes < least for r in refusals)
    assert merge([*points, *refusals]) == (points, refusals)
    assert merge(reversed(given)) == (points, refusals)


def test_a_better_plan_of_another_budget_takes_the_place() -> None:
    points, refusals = merge([point(100, 90, 0.3, 0.1), point(80, 70, 0.2), refusal(75), refusal(60)])
    assert [(p.peak_bytes, p.overhead, p.bound, p.found_at_bytes) for p in points] == [
        (70, 0.2, 0.1, 80),
        (70, 0.2, 0.1, 80),
        (70, 0.2, 0.1, 80),
    ]
    assert refusals == (refusal(60),)


def test_of_plans_that_are_as_fast_the_one_that_copies_least_is_taken() -> None:
    points, _ = merge([point(100, 90, 0.0), copying(point(80, 70, 0.0), 20), copying(point(60, 60, 0.0), 10)])
    assert [(p.peak_bytes, p.copied_bytes) for p in points] == [(90, 0), (60, 20), (60, 20)]


@given(outcomes(), st.integers(2, 1000), st.integers(2, 64))
def test_no_plan_is_further_from_the_chord_than_the_knee(
    given: list[Point | Refusal], bytes_scale: int, time_scale: int
) -> None:
    points, _ = merge(given)
    knee = find_knee(points)
    if len({p.peak_bytes for p in points}) < 3:
        assert knee is None
        return
    ends = points[0], points[-1]

    def distance(p: Point) -> float:
        """Twice the signed area of the triangle that the point makes with the ends."""
        (x0, y0), (x1, y1), (x, y) = ((q.peak_bytes, q.overhead) for q in (*ends, p))
        return (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0)

    furthest = max(map(distance, points))
    assert (knee is None) == (furthest <= 1e-6)
    if knee is None:
        return
    assert knee in points and distance(knee) == pytest.approx(furthest)
    scaled = [
        replace(p, peak_bytes=p.peak_bytes * bytes_scale, overhead=p.overhead * time_scale) for p in points
    ]
    again = find_knee(scaled)
    assert again is not None and distance(points[scaled.index(again)]) == pytest.approx(furthest)


def test_where_the_knee_is() -> None:
    bend = [
        point(b, b, overhead) for b, overhead in [(100, 0.0), (60, 0.05), (50, 0.1), (45, 0.4), (40, 1.0)]
    ]
    assert find_knee(bend) == bend[2]
    assert find_knee([point(b, b, (100 - b) / 64) for b in (100, 80, 50)]) is None, "a straight line"
    assert find_knee([point(b, b, o) for b, o in [(100, 0.0), (60, 0.9), (20, 1.0)]]) is None, "above it"
    assert find_knee(bend[:2]) is None and find_knee(bend[:1]) is None and find_knee([]) is None


@given(st.integers(2, 40), st.integers(1, 10**12), st.integers(0, 10**12))
def test_budgets_are_evenly_spread_with_both_ends(points: int, minimum: int, room: int) -> None:
    budgets = Sweep(points).budget_bytes(minimum, minimum + room)
    assert (budgets[0], budgets[-1]) == (minimum + room, minimum)
    steps = [larger - smaller for larger, smaller in pairwise(budgets)]
    if room >= points:
        assert len(budgets) == points and max(steps) - min(steps) <= 1
    assert all(step > 0 for step in steps)


# ---------------------------------------------------------------------- its forms


def bent() -> Front:
    points = [point(400, 400, 0.0), point(300, 290, 0.05, 0.05), point(200, 200, 0.4, 0.2), refusal(100)]
    known = (Known("keep-all", 400, 0.0), Known("sqrt-n", 250, 0.5), Known("every-2", 900, 0.1))
    return Front.of("net", survey(point(400, 400, 0), floor_bytes=90, known=known), points)


def test_the_table_csv_and_json_tell_the_same() -> None:
    front = bent()
    lines = front.table().splitlines()
    cells = [" ".join(line.split()) for line in lines]
    assert cells[0].startswith("budget B of baseline dynamic peak B overhead bound from optimal strategy")
    assert cells[2] == "knee 300 75.0% 74.4% 290 5.00% 5.00% proved ilp 0.1 s"
    assert cells[3] == "200 50.0% 48.7% 200 40.00% 20.00% 16.67% ilp 0.1 s"
    assert cells[4] == "100 refused, IRC204: too little"
    assert "--budget 300" in lines[6] and "Kneedle, Satopaa et al. 2011" in lines[7]
    data = json.loads(json.dumps(front.to_json()))
    assert data["points"] == as_json(front.points) and data["knee"] == data["points"][1]
    assert data["refusals"] == [asdict(refusal(100))]
    assert "straight line" in data["knee_definition"] and data["model"] == "net"
    rows = list(csv.DictReader(io.StringIO(front.to_csv())))
    assert [row["budget_bytes"] for row in rows] == ["400", "300", "200", "100"]
    assert [row["knee"] for row in rows] == ["False", "True", "False", "False"]
    assert [row["refused"] for row in rows] == ["", "", "", "IRC204"]
    assert [float(row["overhead"]) for row in rows[:3]] == [p.overhead for p in front.points]


DISK = Tier("disk", 1 << 20, 1e9, 2e9, is_duplex=False)
HOST = Tier("host", 1 << 30, 12e9, 12e9)


def copied() -> Front:
    """`bent`, with copies to two tiers."""
    first, second, third, refused = [
        point(400, 400, 0.0),
        copying(point(300, 290, 0.05, 0.05), 30),
        copying(copying(point(200, 200, 0.4, 0.2), 50, waited=0.002), 40, "host"),
        refusal(100),
    ]
    swap = ("host:1073741824", "disk:/my scratch:1048576")
    seen = replace(bent().survey, swap=swap, tiers=(HOST, DISK))
    return Front.of("net", seen, [first, second, third, refused])


def test_the_table_csv_and_json_tell_what_is_copied() -> None:
    front = copied()
    cells = [" ".join(line.split()) for line in front.table().splitlines()]
    assert "from optimal to host B from host B to disk B from disk B waited strategy" in cells[0]
    assert cells[1].endswith("proved 0 0 0 0 0 ms ilp 0.1 s")
    assert cells[2] == "knee 300 75.0% 74.4% 290 5.00% 5.00% proved 0 0 30 30 0 ms ilp 0.1 s"
    assert cells[3].endswith("16.67% 40 40 50 50 2 ms ilp 0.1 s")
    assert "host: 1 GiB, copies at 12 GB/s there and 12 GB/s back beside computations" in cells
    assert "disk: 1 MiB, copies at 1 GB/s there and 2 GB/s back beside computations, one at a time" in cells
    options = "--budget 300 --swap host:1073741824 --swap 'disk:/my scratch:1048576'"
    assert any(line.endswith(options) for line in cells)
    data = json.loads(json.dumps(front.to_json()))
    assert data["swap"] == list(front.survey.swap) and data["tiers"] == [asdict(HOST), asdict(DISK)]
    assert data["points"] == as_json(front.points)
    assert [use["out_bytes"] for use in data["points"][2]["tiers"]] == [50, 40]
    rows = list(csv.DictReader(io.StringIO(front.to_csv())))
    for name, numbers in {
        "host_out_bytes": (0, 0, 40),
        "disk_out_bytes": (0, 30, 50),
        "disk_in_bytes": (0, 30, 50),
        "disk_held_bytes": (0, 30, 50),
        "exposed_seconds": (0, 0, 0.002),
    }.items():
        assert [float(row[name]) for row in rows[:3]] == list(numbers), name
        assert rows[3][name] == "", "nothing is known of a budget that is refused"
    assert not any("disk" in name or "exposed" in name for name in bent().to_csv().splitlines()[0].split(","))


def test_a_front_without_a_bend_says_so() -> None:
    front = Front.of("net", survey(point(400, 400, 0.0)), [point(400, 400, 0.0)])
    assert "knee: none" in front.table() and front.to_json()["knee"] is None


def test_the_picture_says_where_copies_go(tmp_path: Path) -> None:
    copied().draw(tmp_path / "front.svg")
    bent().draw(tmp_path / "bent.svg")
    shown, without = ((tmp_path / name).read_text() for name in ("front.svg", "bent.svg"))
    for text in (
        "net: overhead against memory, with copies to host and disk",
        "peak memory of a training step on the device [B]",
        "copied out [B]",
        "copied to host in a step",
        "copied to disk in a step",
    ):
        assert text in shown, text
        assert text not in without, text


@given(outcomes())
def test_the_drawn_steps_hold_at_any_memory(given: list[Point | Refusal]) -> None:
    points, refusals = merge(given)
    if not points:
        return
    front = Front("net", survey(*points), points, refusals)
    edges, reached, bound = steps(front)
    assert edges == sorted(edges) and edges[0] == points[-1].peak_bytes
    for p in points:
        at = edges.index(p.budget_bytes)
        assert reached[at] == p.overhead and (at == 0 or bound[at - 1] == p.bound)
    for series in (reached, bound):
        assert series == sorted(series, reverse=True)
    assert all(low <= high for low, high in zip(bound, reached, strict=True))


def test_a_known_strategy_that_is_better_between_two_budgets_is_on_the_line() -> None:
    points = (point(100, 100, 0.0), point(50, 50, 0.5))
    front = Front("net", survey(*points, known=(Known("every-2", 70, 0.1), Known("sqrt-n", 80, 0.2))), points)
    assert steps(front) == ([50, 70, 80, 100], [0.5, 0.1, 0.1, 0.0], [0.0] * 4)


@pytest.mark.parametrize(
    ("nbytes", "unit"), [(3, "B"), (2048, "KiB"), (5 << 20, "MiB"), (1 << 30, "GiB"), (1 << 42, "GiB")]
)
def test_the_unit_suits_the_amount(nbytes: int, unit: str) -> None:
    assert memory_unit(nbytes)[1] == unit


def test_the_picture_names_all_that_it_shows(tmp_path: Path) -> None:
    front = bent()
    front.save(tmp_path / "new" / "folder")
    svg = (tmp_path / "new" / "folder" / "front.svg").read_text()
    for text in (
        "net: overhead against memory",
        "peak memory of a training step [B]",
        "overhead [% of the baseline's time]",
        "proved lower bound",
        "plan, proved optimal",
        "baseline: everything is kept",
        "floor: nothing fits below",
        "knee: 290 B (72%), +5.0%",
        ">sqrt-n<",
    ):
        assert text in svg, text
    assert ">every-k<" not in svg, "it lies far to the right of the picture"
    assert (tmp_path / "new" / "folder" / "front.png").read_bytes().startswith(b"\x89PNG")
    front.draw(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == svg
    flat = Front.of("flat", survey(point(400, 400, 0.0)), [point(400, 400, 0.0)])
    flat.draw(tmp_path / "flat.svg")
    assert "knee" not in (tmp_path / "flat.svg").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.svg", "flat.svg", "new"], (
        "nothing is left over"
    )


# ---------------------------------------------------------------------- from a model


@pytest.fixture
def mlp(models: Path) -> Loaded:
    return load(Source(f"{models}:mlp"))


@pytest.mark.slow
def test_the_front_of_a_model(mlp: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    captures, costs = counted(monkeypatch, tracing, "capture"), counted(monkeypatch, Cost, "run")
    front = irc.pareto(mlp.module, mlp.args, points=5, time_limit=LIMIT, costs="analytic")
    assert (len(captures), len(costs)) == (1, 1)
    seen, plans = front.survey, front.points
    assert isinstance(front, irc.Front) and front.model == "Sequential" and not front.refusals
    assert len(plans) == 5 and plans[0].overhead == 0 and seen.costs == "analytic:cpu"
    assert plans[0].budget_bytes == plans[0].peak_bytes == seen.baseline_bytes
    assert plans[-1].budget_bytes == plans[-1].peak_bytes == seen.minimum_bytes >= seen.floor_bytes
    assert {"keep-all", "sqrt-n", "every-2", "every-4", "min-cut"} <= {k.strategy for k in seen.known}
    assert all(p.overhead - p.bound <= 1e-3 for p in plans) and 0 < plans[-1].bound <= plans[-1].overhead
    one = irc.optimize(mlp.module, mlp.args, plans[2].budget_bytes, time_limit=LIMIT, costs="analytic").plan
    assert plans[2].overhead == pytest.approx(one.overhead) and plans[2].peak_bytes <= one.budget_bytes
    assert plans[2].seconds == pytest.approx(one.step_seconds * (1 + one.overhead))


def test_budgets_may_be_given(mlp: Loaded) -> None:
    budgets = ["4GiB", "80%", 1000, "100%"]
    front = irc.pareto(mlp.module, mlp.args, budgets=budgets, time_limit=LIMIT, costs="analytic")
    baseline = front.survey.baseline_bytes
    assert [p.budget_bytes for p in front.points] == [4 << 30, baseline, int(0.8 * baseline)]
    assert [(r.budget_bytes, r.code) for r in front.refusals] == [(1000, "IRC204")]
    assert front.points[0].peak_bytes == baseline


def counted(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[Any]:
    """Notes the arguments of each call of a function, which does as before."""
    original: Callable[..., Any] = getattr(place, name)
    calls: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(place, name, call)
    return calls


# ---------------------------------------------------------------------- interrupted and resumed


def chain(depth: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.GELU())))


def costed(module: nn.Module) -> Program:
    return Cost(profile="cpu").run(Program(capture(module, (torch.ones(64, 16),)).graph))


@pytest.fixture(scope="module")
def program() -> Program:
    return costed(chain(4))


SWEEP = Sweep(points=4, time_limit=LIMIT)


class Watch:
    """Notes what is planned, and interrupts before the point of a number."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.interrupt_at = interrupt_at
        self.started: tuple[int, int] | None = None
        self.planned: list[int] = []
        self.found: list[Point | Refusal] = []

    def start(self, budgets: int, finished: int) -> None:
        self.started = budgets, finished

    def before(self, budget_bytes: int) -> None:
        if len(self.planned) == self.interrupt_at:
            raise KeyboardInterrupt
        self.planned.append(budget_bytes)

    def after(self, outcome: Point | Refusal) -> None:
        self.found.append(outcome)


def trace(program: Program, folder: Path | None, watch: Watch | None = None, **options: Any) -> Front:
    sweep = options.pop("sweep", SWEEP)
    return trace_front(program, "chain", sweep, folder=folder, observer=watch, **options)


def choices(front: Front) -> list[Point]:
    return [replace(p, plan_seconds=0.0) for p in front.points]


@pytest.fixture(scope="module")
def two_points(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two of four points."""
    folder = tmp_path_factory.mktemp("two") / "front"
    watch = Watch(interrupt_at=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        trace(program, folder, watch)
    assert watch.started == (4, 0) and len(watch.planned) == len(watch.found) == 2
    assert caught.value.__notes__ == ["2 of 4 points are finished; the same command goes on from there"]
    assert [path.name for path in folder.iterdir()] == ["points.jsonl"]
    return folder


@pytest.fixture
def interrupted(two_points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder; nothing is drawn into it."""
    monkeypatch.setattr(Front, "draw", lambda *_: None)
    return Path(shutil.copytree(two_points, tmp_path / "front"))


def test_an_interrupted_front_goes_on_where_it_was(
    program: Program, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surveys, watch = counted(monkeypatch, tracing, "_survey"), Watch()
    front = trace(program, interrupted, watch)
    assert watch.started == (4, 2) and len(watch.planned) == 2 and not surveys
    assert choices(front) == choices(trace(program, None))
    watch = Watch()
    assert trace(program, interrupted, watch) == front and watch.started == (4, 4) and not watch.planned
    assert json.loads((interrupted / "front.json").read_text()) == json.loads(json.dumps(front.to_json()))


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_that_was_cut_off_is_planned_again(program: Program, interrupted: Path, cut: int) -> None:
    path = interrupted / "points.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    watch = Watch()
    trace(program, interrupted, watch)
    assert watch.started == (4, 1) and len(watch.planned) == 3
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 5 and [list(row) for row in rows[1:]] == [["point"]] * 4


def test_a_first_line_that_was_cut_off_is_written_again(program: Program, interrupted: Path) -> None:
    path = interrupted / "points.jsonl"
    path.write_bytes(path.read_bytes()[:30])
    watch = Watch()
    trace(program, interrupted, watch)
    assert watch.started == (4, 0) and len(path.read_text().splitlines()) == 5


def test_points_of_something_else_are_not_taken(program: Program, interrupted: Path) -> None:
    assert program.costs is not None
    slower = replace(program.costs, seconds={n: 2 * s for n, s in program.costs.seconds.items()})
    for other, sweep, text in (
        (costed(chain(3)), SWEEP, "other model, other costs"),
        (replace(program, costs=slower), SWEEP, "something else: other costs"),
        (program, replace(SWEEP, points=5), "something else: other options"),
    ):
        with pytest.raises(irc.UsageError, match=text) as caught:
            trace(other, interrupted, sweep=sweep)
        assert caught.value.code == "IRC441" and caught.value.help
    watch = Watch()
    front = trace(program, interrupted, watch, sweep=replace(SWEEP, points=3), restart=True)
    assert watch.started == (3, 0) and len(front.points) == 3


def test_points_stay_where_a_line_of_the_model_moves(program: Program) -> None:
    assert program.costs is not None
    moved = {n: replace(n, at=Location(source="elsewhere.py:7")) for n in program.graph.nodes}
    costs = replace(
        program.costs,
        seconds={moved[n]: seconds for n, seconds in program.costs.seconds.items()},
        workspace_bytes={moved[n]: nbytes for n, nbytes in program.costs.workspace_bytes.items()},
    )
    other = Program(replace(program.graph, nodes=tuple(moved.values())), costs)
    assert print_graph(other.graph) != print_graph(program.graph)
    assert Identity.of(other, "") == Identity.of(program, "") != Identity.of(program, "other")


def test_points_of_another_version_are_not_taken(
    program: Program, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(irc, "__version__", "0.0.0")
    with pytest.raises(irc.UsageError, match="other version of irc"):
        trace(program, interrupted)


@pytest.mark.parametrize(
    ("line", "damage", "text"),
    [
        (1, "not json", "line 1: JSONDecodeError"),
        (1, '{"format": "irc-points-0"}', "line 1: ValueError: its format is"),
        (2, "{}", "line 2: ValueError"),
        (2, '{"guess": {}}', "line 2: KeyError"),
        (2, '{"refusal": {"budget_bytes": 1}}', "line 2: ValueError: Refusal has other fields"),
        (
            2,
            '{"refusal": {"budget_bytes": "1", "code": "", "reason": "", "plan_seconds": 0}}',
            "bytes is '1'",
        ),
        (3, "[]", "line 3: AttributeError"),
    ],
)
def test_damage_is_named(program: Program, interrupted: Path, line: int, damage: str, text: str) -> None:
    path = interrupted / "points.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[: line - 1], damage, *lines[line:]]) + "\n")
    with pytest.raises(irc.UsageError, match=text) as caught:
        trace(program, interrupted)
    assert caught.value.code == "IRC446" and caught.value.help
    if damage == "{}":
        assert len(trace(program, interrupted, restart=True).points) == 4


# ---------------------------------------------------------------------- with copies to tiers


def offered(swap: str = "disk", tier: Tier = DISK) -> OfferTiers:
    """Tiers as if this machine had been measured."""
    return OfferTiers(swap, tiers=(tier,))


COPYING = replace(SWEEP, offered=offered())


@pytest.fixture(scope="module")
def kept() -> Program:
    """A program in which nothing may run twice: without copies there is one budget."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
    module = nn.Sequential(nn.Linear(16, 16), *blocks)
    for layer in module:
        irc.keep(layer)
    return costed(module)


def test_each_point_copies_within_its_budget(kept: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: dict[int, Program] = {}
    choose = PlanMemory.choose

    def noted(step: PlanMemory, planner: Planner) -> Program:
        found = choose(step, planner)
        if isinstance(step.budget, int) and found.tiers:
            programs[step.budget] = found
        return found

    monkeypatch.setattr(PlanMemory, "choose", noted)
    front = trace(kept, None, sweep=COPYING)
    points, seen = front.points, front.survey
    assert not front.refusals and points[0].overhead == 0 and not points[0].copied_bytes
    assert points[0].budget_bytes == seen.baseline_bytes and points[-1].budget_bytes == seen.minimum_bytes
    assert seen.minimum_bytes == smallest_budget(Planner(replace(kept, tiers=(DISK,))))
    assert seen.minimum_bytes < trace(kept, None).survey.minimum_bytes, "copies reach lower"
    for larger, smaller in pairwise(points):
        assert larger.overhead <= smaller.overhead and larger.bound <= smaller.bound
        assert larger.peak_bytes >= smaller.peak_bytes
    for p in points:
        program = programs[p.found_at_bytes]
        assert program.schedule is not None and program.costs is not None and program.tiers == (DISK,)
        verify_schedule(
            program.schedule,
            program.costs.workspace_bytes,
            budget_bytes=p.budget_bytes,
            peak_bytes=p.peak_bytes,
            tiers=(DISK,),
        )
        times = step_times(program.schedule, program.costs.seconds, (DISK,))
        assert p.copied_bytes == sum(copy.storage.nbytes for copy in times.copies)
        assert p.exposed_seconds == pytest.approx(times.exposed_seconds)
    assert points[-1].copied_bytes
    assert seen.tiers == (DISK,) and {"lms-1", "sqrt-n"} <= {k.strategy for k in seen.known}


def test_a_bound_without_copies_is_none_with_them(program: Program) -> None:
    alone = trace(program, None).points
    beside = trace(program, None, sweep=replace(COPYING, strategy="recompute")).points
    assert alone[-1].bound > 0 and alone[-1].proved
    assert [p.peak_bytes for p in beside] == [p.peak_bytes for p in alone]
    assert [p.overhead for p in beside] == [p.overhead for p in alone]
    assert not any(p.bound or p.copied_bytes for p in beside) and not beside[-1].proved
    fast = replace(COPYING, offered=offered(tier=Tier("disk", 1 << 30, 1e15, 1e15)))
    budgets = tuple(p.budget_bytes for p in alone)
    joint = trace(program, None, sweep=replace(fast, budgets=budgets)).points
    assert joint[-1].overhead < alone[-1].bound, "copies go below what is proved of recomputation"
    assert all(p.bound <= p.overhead for p in joint)


def test_a_front_with_copies_goes_on_with_the_tiers_that_it_began_with(
    kept: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Front, "draw", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        trace(kept, tmp_path / "front", Watch(interrupt_at=2), sweep=COPYING)
    surveys, watch = counted(monkeypatch, tracing, "_survey"), Watch()
    again = replace(COPYING, offered=offered(tier=replace(DISK, out_bytes_per_second=1e6)))
    front = trace(kept, tmp_path / "front", watch, sweep=again)
    assert watch.started == (4, 2) and len(watch.planned) == 2 and not surveys
    assert front.survey.tiers == (DISK,) and front.points[-1].tiers[0].tier == "disk"
    assert choices(front) == choices(trace(kept, None, sweep=COPYING))
    assert trace(kept, tmp_path / "front", sweep=COPYING) == front


def test_points_with_other_tiers_are_not_taken(kept: Program, tmp_path: Path) -> None:
    machine = MACHINES["gtx1080"]
    for name, speed in (("one", 1e9), ("two", 2e9)):
        tiers = (replace(machine.tiers[0], out_bytes_per_second=speed),)
        (tmp_path / f"{name}.json").write_text(json.dumps(replace(machine, tiers=tiers).to_json()))
    one, two = (OfferTiers("host", str(tmp_path / f"{name}.json")) for name in ("one", "two"))
    begun = {"none": None, "disk": offered(), "one": one}
    for name, tiers in begun.items():
        with pytest.raises(KeyboardInterrupt):
            trace(kept, tmp_path / name, Watch(interrupt_at=0), sweep=replace(SWEEP, offered=tiers))
    sizes = {name: (tmp_path / name / "points.jsonl").read_bytes() for name in begun}
    for name, other in (
        ("none", offered()),
        ("disk", None),
        ("disk", offered("disk:1MiB")),
        ("disk", offered(f"disk:{tmp_path}")),
        ("disk", OfferTiers("disk", "cpu")),
        ("one", two),
    ):
        with pytest.raises(irc.UsageError, match="something else: other tiers") as caught:
            trace(kept, tmp_path / name, sweep=replace(SWEEP, offered=other))
        assert caught.value.code == "IRC441" and caught.value.help
    assert {name: (tmp_path / name / "points.jsonl").read_bytes() for name in begun} == sizes


@pytest.mark.slow
def test_the_front_of_a_model_that_may_copy(mlp: Loaded, tmp_path: Path) -> None:
    swap = f"disk:{tmp_path}:1MiB"
    front = irc.pareto(mlp.module, mlp.args, points=3, time_limit=1, costs="analytic", swap=[swap])
    (tier,) = front.survey.tiers
    assert (tier.name, tier.capacity_bytes) == ("disk", 1 << 20)
    assert front.survey.swap == (f"disk:{tmp_path}:{1 << 20}",) and "to disk KiB" in front.table()
    assert parse_tiers(list(front.survey.swap)) == parse_tiers(swap)
    assert len(front.points) == 3 and list(tmp_path.iterdir()) == [tmp_path / "models.py"]


def test_tiers_of_this_machine_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "this_machine", lambda *_: None)
    monkeypatch.setattr(swapping, "measure_tier", lambda *_, **__: DISK)
    module, x = chain(1), torch.ones(2, 16)
    asked = Sweep(offered=offer(f"disk:{tmp_path}:2MiB", "measured"))
    found = asked.measured(module, (x,))
    assert found.offered is not None and found.offered.tiers == (replace(DISK, capacity_bytes=2 << 20),)
    assert found.tiers == asked.tiers and str(found) == str(asked)
    assert SWEEP.measured(module, (x,)) == SWEEP


def test_tiers_that_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = counted(monkeypatch, swapping, "measure_tier")
    captures, costs = counted(monkeypatch, tracing, "capture"), counted(monkeypatch, Cost, "run")
    module, x = chain(1), torch.ones(2, 16)
    for swap, code in (
        ("tape:1GiB", "IRC424"),
        ("disk:/nowhere/at/all", "IRC427"),
        ("disk:1%", "IRC425"),
        (["disk", "disk"], "IRC426"),
        ([], "IRC423"),
        (["disk:1GiB", "params"], "IRC447"),
    ):
        refused(code, lambda swap=swap: irc.pareto(module, x, swap=swap))
    refused("IRC408", lambda: irc.pareto(module, x, swap="host", costs="cpu"))
    refused("IRC575", lambda: irc.pareto(module, x, swap="host:1GiB"), irc.TierError)
    refused("IRC403", lambda: irc.pareto(module, x, strategy="lms"))
    assert not measured and not captures and not costs
    Sweep(strategy="lms", offered=offered()).check()


def test_budgets_that_are_refused_with_copies(kept: Program) -> None:
    minimum = trace(kept, None, sweep=COPYING).survey.minimum_bytes
    tight = replace(COPYING, budgets=(minimum - 1,))
    error = refused("IRC443", lambda: trace(kept, None, sweep=tight), irc.BudgetError)
    assert isinstance(error, irc.BudgetError) and error.minimum_bytes == minimum
    assert "at least with copies to disk; " in error.message


# ---------------------------------------------------------------------- what is refused


def refused(code: str, act: Callable[[], object], kind: type[irc.IrcError] = irc.UsageError) -> irc.IrcError:
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.code == code and caught.value.help
    return caught.value


def test_a_model_of_any_name_is_drawn(tmp_path: Path) -> None:
    replace(bent(), model="a$^$b<i>&\x1b[31m\n").draw(tmp_path / "front.svg")
    ElementTree.fromstring((tmp_path / "front.svg").read_text())


def test_folders_that_are_refused(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a text")
    refused("IRC442", lambda: check_folder(file))
    refused("IRC442", lambda: check_folder(file / "below"))
    assert "is not empty" in refused("IRC442", lambda: check_folder(tmp_path)).message
    refused("IRC442", lambda: check_folder(tmp_path, restart=True))
    refused("IRC442", lambda: trace(program, tmp_path))
    front = bent()
    refused("IRC442", lambda: front.save(file))
    refused("IRC442", lambda: front.draw(tmp_path / "nowhere" / "front.svg"))
    refused("IRC445", lambda: front.draw(tmp_path / "front.pdf"))
    front.save(tmp_path / "front")
    refused("IRC442", lambda: check_folder(tmp_path / "front"))
    check_folder(tmp_path / "front", restart=True)
    check_folder(tmp_path / "new" / "front")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "front"]


def test_a_folder_that_goes_away_is_an_error_of_the_user(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "front"

    class Vandal(Watch):
        def before(self, budget_bytes: int) -> None:
            shutil.rmtree(folder)
            folder.write_text("a file now")

    refused("IRC442", lambda: trace(program, folder, Vandal()))


def test_budgets_that_are_refused(program: Program) -> None:
    minimum = trace(program, None).survey.minimum_bytes
    tight = Sweep(budgets=(1000, minimum - 1), time_limit=LIMIT)
    error = refused("IRC443", lambda: trace(program, None, sweep=tight), irc.BudgetError)
    assert isinstance(error, irc.BudgetError) and error.minimum_bytes == minimum


def test_a_front_without_a_plan_is_refused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = PlanMemory.choose

    def too_slow(step: PlanMemory, planner: Planner) -> Program:
        if step.strategy == "auto":
            raise irc.TimeLimitError("IRC205", "the time limit ended")
        return choose(step, planner)

    monkeypatch.setattr(PlanMemory, "choose", too_slow)
    refused("IRC444", lambda: trace(program, None), irc.TimeLimitError)


def test_arguments_that_are_wrong() -> None:
    module, x = chain(1), torch.ones(2, 16)
    not_an_int: Any = 2.5
    for points in (1, True, not_an_int):
        refused("IRC440", lambda points=points: irc.pareto(module, x, points=points))
    refused("IRC401", lambda: irc.pareto(module, x, budgets=["much"]))
    refused("IRC403", lambda: irc.pareto(module, x, strategy="best"))
    refused("IRC410", lambda: irc.pareto(module, x, costs="tpu"))
    wrong: Any = 3
    refused("IRC406", lambda: irc.pareto(wrong, x))
    refused("IRC406", lambda: irc.pareto(module, wrong))
    refused("IRC406", lambda: irc.pareto(module, x, example_kwargs=wrong))
    refused("IRC406", lambda: irc.pareto(module, x, loss=wrong))
