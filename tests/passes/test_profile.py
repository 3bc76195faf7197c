"""Measurements: what they leave behind, what they keep, and that they are exact where they must be."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn
from torch.autograd import profiler_legacy

import irc
from irc.frontends.torch import capture
from irc.ir import (
    DType,
    Graph,
    IrcError,
    Location,
    Node,
    Region,
    Storage,
    Symbol,
    TensorType,
    Trait,
    UnsupportedError,
    UsageError,
    Value,
)
from irc.passes.costs import profiling as profile
from irc.passes.costs.allocations import allocation_events, peak_bytes, recorded_allocations
from irc.passes.costs.machines import machine_named
from irc.passes.costs.profiling import Level, Measured, ProfileStore, allocation_levels, profile_costs
from irc.passes.costs.table import StepCost, analytic_costs, signature
from irc.passes.rewrites.release_gradients import release_gradients

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def graph() -> Graph:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5))
    return capture(net, (torch.randn(2, 3, 10, 10),)).graph


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The operations that are prepared for a run from here on."""
    prepared: list[Node] = []
    original: Any = vars(profile)["runner"]

    def runner(node: Node) -> Any:
        prepared.append(node)
        return original(node)

    monkeypatch.setattr(profile, "runner", runner)
    return prepared


# ---------------------------------------------------------------------- costs


def test_a_profile_covers_every_operation_with_positive_times(graph: Graph) -> None:
    costs = profile_costs(graph, repeats=2)
    assert set(costs.seconds) == set(costs.workspace_bytes) == set(graph.operations)
    assert all(seconds > 0 for seconds in costs.seconds.values())
    assert all(workspace_bytes >= 0 for workspace_bytes in costs.workspace_bytes.values())
    assert costs.source.startswith(f"profile:torch-{torch.__version__}") and "1-threads" in costs.source


def test_profiling_leaves_the_generator_the_gradients_and_the_model_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(3, 4)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    before, given = torch.get_rng_state(), x.clone()
    profile_costs(capture(net, (x,)).graph, repeats=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, given) and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.is_grad_enabled()


def test_an_operation_that_stands_there_twice_is_measured_once(runs: list[Node]) -> None:
    net = nn.Sequential(*(nn.Tanh() for _ in range(5)))
    graph = capture(net, (torch.randn(3, 4, requires_grad=True),)).graph
    profile_costs(graph, repeats=1)
    once = {signature(node) for node in graph.operations}
    assert len(once) < len(graph.operations)
    assert {signature(node) for node in runs} == once
    assert len(runs) == 2 * len(once)  # for the time and for the allocations


def test_the_workspace_is_what_an_operation_takes_beyond_its_results() -> None:
    x = torch.randn(64, 32)
    graph = capture(nn.Sequential(nn.Linear(32, 8), nn.ReLU()), (x,)).graph
    costs = profile_costs(graph, repeats=1)
    relu = next(node for node in graph.operations if node.op == "aten.relu.default")
    assert costs.workspace_bytes[relu] == 0
    dropout = capture(nn.Dropout(0.5), (x.requires_grad_(),)).graph.operations[0]
    results_bytes = sum(value.storage.nbytes for value in dropout.values)
    measured = profile_costs(Graph((), (dropout,), ()), repeats=1).workspace_bytes[dropout]
    with torch.no_grad():
        assert measured + results_bytes == peak_bytes(lambda: torch.native_dropout(x, 0.5, True))


def test_a_first_run_that_fills_a_cache_is_not_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    relu = capture(nn.ReLU(), (torch.randn(64, 32, requires_grad=True),)).graph.operations[0]
    cache: list[Tensor] = []
    original: Any = vars(profile)["runner"]

    def runner(node: Node) -> Callable[[], Any]:
        run = original(node)

        def fill_and_run() -> Any:
            if not cache:
                cache.append(torch.empty(1 << 16, dtype=torch.uint8))
            return run()

        return fill_and_run

    monkeypatch.setattr(profile, "runner", runner)
    assert profile_costs(Graph((), (relu,), ()), repeats=1).workspace_bytes[relu] == 0
    assert cache


@pytest.mark.parametrize(
    ("first", "times", "timed", "best"),
    [
        (0.09, [0.02, 0.0], 1, 0.02),  # together that is long enough
        (0.03, [0.02, 0.0201, 0.0], 2, 0.02),  # two agree
        (0.03, [0.02, 0.01, 0.005, 0.004], 4, 0.004),  # none agree
        (1e-4, [1e-4, 1e-4, 1e-4, 1e-4], 4, 1e-4),  # too short for that to mean anything
    ],
)
def test_an_operation_is_timed_until_two_runs_agree(
    monkeypatch: pytest.MonkeyPatch, first: float, times: list[float], timed: int, best: float
) -> None:
    relu = capture(nn.ReLU(), (torch.randn(4, requires_grad=True),)).graph.operations[0]
    given = iter(times)
    taken: list[float] = []

    def run_seconds(run: Callable[[], Any], device: str) -> float:
        taken.append(next(given))
        return taken[-1]

    def first_runs(nodes: Sequence[Node]) -> list[Measured]:
        return [Measured(first, 0, 1)] * len(nodes)

    monkeypatch.setattr(profile, "run_seconds", run_seconds)
    monkeypatch.setattr(profile, "first_runs", first_runs)
    costs = profile_costs(Graph((), (relu,), ()), repeats=5)
    assert (len(taken), costs.seconds[relu]) == (timed, best)


@pytest.mark.parametrize(("first", "timed"), [(0.03, 0), (0.003, 1)])
def test_a_long_operation_that_runs_once_is_not_run_again_for_its_time(
    monkeypatch: pytest.MonkeyPatch, first: float, timed: int
) -> None:
    relu = capture(nn.ReLU(), (torch.randn(4, requires_grad=True),)).graph.operations[0]
    taken: list[float] = []

    def run_seconds(run: Callable[[], Any], device: str) -> float:
        taken.append(0.1)
        return taken[-1]

    monkeypatch.setattr(profile, "run_seconds", run_seconds)
    monkeypatch.setattr(profile, "first_runs", lambda nodes: [Measured(first, 0, 1)] * len(nodes))
    for once in (replace(relu, region=Region.BACKWARD), replace(relu, traits=frozenset({Trait.PINNED}))):
        taken.clear()
        costs = profile_costs(Graph((), (once,), ()), repeats=5)
        assert (len(taken), costs.seconds[once]) == (timed, first)


def test_the_first_time_of_an_operation_that_runs_once_does_not_count_where_it_may_run_again() -> None:
    assert Measured(0.5, 0, 1).is_timed(1) and not Measured(0.5, 0, 1).is_timed(2)
    assert not Measured(0.001, 0, 1).is_timed(1) and not Measured(None, 0, 0).is_timed(1)
    assert Measured(0.001, 0).is_timed(2)


def test_a_peak_is_counted_above_the_level_at_the_start() -> None:
    x = torch.randn(64, 32)
    assert peak_bytes(lambda: torch.relu(x).neg()) == 2 * x.nbytes
    assert peak_bytes(lambda: x.relu_()) == 0


def test_levels_tell_what_a_run_takes_and_what_it_leaves() -> None:
    x, kept = torch.randn(64, 32), list[Tensor]()
    runs = [lambda: torch.relu(x).neg(), lambda: x.relu_(), lambda: kept.append(torch.relu(x)), kept.clear]
    levels = [(level.peak_bytes, level.left_bytes) for level in allocation_levels(runs, "cpu")]
    assert levels == [(2 * x.nbytes, x.nbytes), (0, 0), (x.nbytes, x.nbytes), (0, -x.nbytes)]
    assert allocation_levels([], "cpu") == []


def test_accumulating_is_measured_and_an_optimizer_s_step_is_taken_from_its_node() -> None:
    module, x = nn.Linear(32, 64), torch.randn(3, 32)
    graph = capture(module, (x,)).graph
    accumulated = release_gradients(graph)
    costs = profile_costs(accumulated, repeats=2)
    assert all(costs.seconds[node] > 0 for node in accumulated.releases)
    assert all(costs.workspace_bytes[node] == 0 for node in accumulated.releases)
    steps = {i.value: StepCost(8, 5, 0.25) for i in graph.inputs if i.requires_grad}
    applied = release_gradients(graph, steps)
    costs = profile_costs(applied, repeats=2)
    assert [costs.seconds[node] for node in applied.releases] == [0.25, 0.25]
    assert [costs.workspace_bytes[node] for node in applied.releases] == [5, 5]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_an_operation_that_does_not_run_by_itself_is_named() -> None:
    type = TensorType.contiguous((2, 3), DType.FLOAT32)
    a, b = (Value(name, type, Storage(name, 24)) for name in "ab")
    out = Value("c", TensorType.contiguous((2, 3), DType.FLOAT32), Storage("c", 24))
    node = Node("mm", "aten.mm.default", (a, b), (out,), at=Location(source="net.py:7"))
    with pytest.raises(IrcError) as raised:
        profile_costs(Graph((), (node,), ()), repeats=1)
    assert raised.value.code == "IRC411"
    assert "aten.mm.default cannot be measured by itself" in str(raised.value) and "net.py:7" in str(
        raised.value
    )
    assert raised.value.help is not None and "analytic" in raised.value.help


def test_a_result_that_was_traced_too_small_is_refused_beside_an_equal_call() -> None:
    type = TensorType.contiguous((2, 3), DType.FLOAT32)
    x, large, small = (Value(name, type, Storage(name, 8 * (name != "c") + 16)) for name in "abc")
    nodes = [Node(out.name, "aten.sin.default", (x,), (out,)) for out in (large, small)]
    assert signature(nodes[0]) != signature(nodes[1])
    with pytest.raises(UnsupportedError) as raised:
        profile_costs(Graph((), tuple(nodes), ()), repeats=1)
    assert raised.value.code == "IRC412"


def lu_solved(x: Tensor) -> Tensor:
    factors, pivots = torch.linalg.lu_factor(x)
    return torch.linalg.lu_solve(factors, pivots, x, adjoint=True)


def lu_unpacked(x: Tensor) -> Tensor:
    return torch.lu_unpack(*torch.linalg.lu_factor(x))[1]


def ldl_solved(x: Tensor) -> Tensor:
    return torch.linalg.ldl_solve(*torch.linalg.ldl_factor(x.detach()), x.detach()) + x


def reduced_segments(x: Tensor) -> Tensor:
    return torch.segment_reduce(x.flatten(), "sum", lengths=torch.tensor([5, 3, 8]))


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lu_solve": lambda x, n: lu_solved(x),
    "lu_unpack": lambda x, n: lu_unpacked(x),
    "ldl_solve": lambda x, n: ldl_solved(x),
    "det": lambda x, n: torch.linalg.det(x),
    "cholesky": lambda x, n: torch.cholesky(x @ x.mT + torch.eye(4)),
    "segment_reduce": lambda x, n: reduced_segments(x),
    "remainder": lambda x, n: x * (7 % n),
    "remainder_": lambda x, n: x * torch.full_like(n, 7).remainder_(n),
    "fmod": lambda x, n: x * torch.fmod(n, n),
    "floor_divide": lambda x, n: x * (7 // n),
    "div": lambda x, n: x * torch.div(7, n, rounding_mode="trunc"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_operations_that_refuse_some_numbers_are_measured(name: str) -> None:
    module = Model(lambda m, x, n: NUMBERS[name](m.weight + x, n), weight=nn.Parameter(torch.eye(4)))
    args = torch.eye(4) + 0.1, torch.tensor([1, 2, 3, 4])
    planned = irc.optimize(module, args, "100%", loss=torch.sum, costs="measured", time_limit=1)
    torch.sum(planned(*args)).backward()
    assert irc.measured_peak_bytes(planned, args, loss=torch.sum) == planned.plan.peak_bytes


def test_constants_of_every_kind_reach_the_operation() -> None:
    type = TensorType.contiguous((4,), DType.FLOAT16)
    out = Value("full", type, Storage("full", 8))
    keywords = (("dtype", Symbol("dtype", "float16")), ("device", Symbol("device", "cpu")))
    node = Node("full", "aten.full.default", ((4,), 2.5), (out,), keywords=keywords)
    assert profile_costs(Graph((), (node,), ()), repeats=1).workspace_bytes[node] == 0


@pytest.mark.parametrize("is_apart", [True, False])
def test_operands_of_one_storage_share_it_when_they_are_measured(is_apart: bool) -> None:
    type = TensorType.contiguous((4,), DType.FLOAT32)
    storage = Storage("ab", 32 if is_apart else 16)
    a, b, other = Value("a", type, storage), Value("b", type, storage), Value("c", type, Storage("c", 16))
    total = Value("d", type, Storage("d", 16))
    shared, single = (Node("add", "aten.add.Tensor", (a, each), (total,)) for each in (b, other))
    assert signature(shared) != signature(single)
    seen: list[Tensor] = profile.made_up_operands(shared)
    assert seen[0].untyped_storage().data_ptr() == seen[1].untyped_storage().data_ptr()
    assert seen[1].storage_offset() == (4 if is_apart else 0)
    written = replace(shared, traits=frozenset({Trait.EFFECT}))
    assert signature(written) == signature(single)


# ---------------------------------------------------------------------- events


def test_events_tell_what_is_taken_and_given_back() -> None:
    def run() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a
        c = torch.empty(700, dtype=torch.uint8)
        del b, c

    assert allocation_events(run) == [1000, 500, -1000, 700, -500, -700]
    assert peak_bytes(run) == 1500
    assert peak_bytes(lambda: None) == 0


def test_an_error_in_a_measured_run_arrives_and_the_next_one_is_measured() -> None:
    def fail() -> None:
        raise ValueError("from the run")

    with pytest.raises(ValueError, match="from the run"):
        peak_bytes(fail)
    assert peak_bytes(lambda: torch.empty(123, dtype=torch.uint8)) == 123


def test_costs_are_the_same_within_a_session(graph: Graph) -> None:
    with torch.profiler.profile(profile_memory=True) as session:
        within = profile_costs(graph, repeats=1)
        torch.ones(3).erfinv()
    assert "aten::erfinv" in _operations(session)
    assert within.workspace_bytes == profile_costs(graph, repeats=1).workspace_bytes


def _operations(session: Any) -> list[str]:
    events = session.function_events if hasattr(session, "function_events") else session.events()
    return [event.name for event in events if event.name.startswith("aten::")]


_SESSIONS: dict[str, Callable[[], Any]] = {
    "kineto": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "memory": lambda: torch.profiler.profile(profile_memory=True, record_shapes=True),
    "autograd": torch.autograd.profiler.profile,
    "first": lambda: vars(profiler_legacy)["profile"](profile_memory=True),
}


@pytest.mark.parametrize("kind", [kind for kind in _SESSIONS if kind != "first"])
def test_levels_are_measured_beside_a_session_which_sees_its_own_operations_alone(kind: str) -> None:
    x = torch.randn(64, 32)
    with _SESSIONS[kind]() as session:
        before = x.sin()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            runs = [lambda: torch.relu(x).neg(), lambda: x @ x.T]
            levels = allocation_levels(runs, "cpu")
        before.cos()
    assert _operations(session) == ["aten::sin", "aten::cos"]
    half_precision_bytes = 64 * 64 * 2
    assert levels[0] == Level(2 * x.nbytes, x.nbytes)
    assert levels[1].left_bytes == half_precision_bytes < levels[1].peak_bytes


@pytest.mark.parametrize("kind", _SESSIONS)
def test_a_session_that_begins_while_allocations_are_recorded_has_its_operations(kind: str) -> None:
    with recorded_allocations() as recording:
        torch.empty(1000, dtype=torch.uint8)
        with _SESSIONS[kind]() as session:
            torch.ones(3).sin()
    assert "aten::sin" in str(session.key_averages()) and not recording.is_whole
    assert peak_bytes(lambda: torch.empty(123, dtype=torch.uint8)) == 123


def test_the_peak_of_what_opens_a_session_is_not_known() -> None:
    def run() -> None:
        with torch.profiler.profile():
            torch.ones(3).sin()

    for measured, session in ((run, contextlib.nullcontext()), (torch.Tensor, torch.profiler.profile())):
        with session, pytest.raises(UsageError, match="IRC458"):
            peak_bytes(measured)


def test_sessions_of_two_threads_do_not_meet() -> None:
    names: list[str] = []
    began, is_over = threading.Event(), threading.Event()

    def profiled() -> None:
        with torch.profiler.profile(profile_memory=True) as session:
            began.set()
            assert is_over.wait(60)
            torch.ones(3).sin()
        names.extend(_operations(session))

    def measured() -> None:
        thread.start()
        assert began.wait(60)
        torch.empty(123, dtype=torch.uint8)
        is_over.set()
        thread.join()

    thread = threading.Thread(target=profiled)
    assert allocation_events(measured) == [123, -123]
    assert names == ["aten::ones", "aten::empty", "aten::fill_", "aten::sin"]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_session_on_a_schedule_has_its_step_if_irc_measures_while_it_warms_up() -> None:
    steps: list[list[str]] = []
    run = partial(torch.empty, 123, dtype=torch.uint8)

    def end_cycle(session: Any) -> None:
        steps.append(_operations(session))

    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=end_cycle) as session:
        for _ in range(2):
            assert allocation_levels([run], "cpu") == [Level(123, 123)]
            torch.ones(3).sin()
            session.step()
    assert "aten::sin" in steps[0]


def test_a_recording_that_another_thread_ends_is_no_obstacle() -> None:
    recorded = recorded_allocations()
    recording = recorded.__enter__()
    thread = threading.Thread(target=lambda: recorded.__exit__(None, None, None))
    thread.start()
    thread.join()
    assert not recording.is_whole
    with torch.profiler.profile() as session:
        torch.ones(3).sin()
    assert "aten::sin" in _operations(session)
    assert peak_bytes(lambda: torch.empty(123, dtype=torch.uint8)) == 123


def test_the_profiler_s_messages_do_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: torch.empty(10))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


# ---------------------------------------------------------------------- store


def _only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "new" / "folder")
    measured = {"a(1)": Measured(0.125, 64), "b": Measured(1e-7, 0), "untimed": Measured(None, 8)}
    assert store.load("some device: 2") == {}
    store.save("some device: 2", measured)
    store.save("some device: 2", {"b": Measured(2.0, 1)})
    assert store.load("some device: 2") == {**measured, "b": Measured(2.0, 1)}
    assert store.load("another device") == {}
    assert [p.suffix for p in (tmp_path / "new" / "folder").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe\x00",
        b'{"operations": []}',
        b'{"operations": {"a": 1}}',
        b'{"operations": {"a": [1]}}',
        b'{"operations": {"a": ["x", "y"]}}',
        b'{"operations": {"a": [2, null]}}',
    ],
)
def test_a_file_that_cannot_be_read_counts_as_empty_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    store = ProfileStore(tmp_path)
    store.save("d", {"a": Measured(1.0, 1)})
    _only_file(tmp_path).write_bytes(content)
    assert store.load("d") == {}
    store.save("d", {"a": Measured(2.0, 2)})
    assert store.load("d") == {"a": Measured(2.0, 2)}


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path, graph: Graph) -> None:
    (tmp_path / "file").write_text("in the way")
    store = ProfileStore(tmp_path / "file" / "below")
    costs = profile_costs(graph, store=store, repeats=1)
    assert set(costs.seconds) == set(graph.operations)


def test_what_is_known_is_not_measured_again(tmp_path: Path, graph: Graph, runs: list[Node]) -> None:
    store = ProfileStore(tmp_path)
    first = profile_costs(graph, store=store, repeats=1)
    assert runs
    runs.clear()
    second = profile_costs(graph, store=store, repeats=1)
    assert not runs
    assert second == first
    path = _only_file(tmp_path)
    content = json.loads(path.read_text())
    forgotten = next(iter(content["operations"]))
    del content["operations"][forgotten]
    path.write_text(json.dumps(content))
    profile_costs(graph, store=store, repeats=1)
    assert {signature(node) for node in runs} == {forgotten}


def test_times_are_measured_when_they_are_asked_for_and_workspaces_once(
    tmp_path: Path, graph: Graph, runs: list[Node]
) -> None:
    store, distinct = ProfileStore(tmp_path), {signature(node) for node in graph.operations}
    untimed = profile_costs(graph, store=store, repeats=1, with_times=False)
    assert not untimed.has_times and len(runs) == len(distinct), "only workspaces are measured"
    assert {signature(node) for node in runs} == distinct
    modelled = analytic_costs(graph, machine_named("cpu"))
    assert untimed.seconds == modelled.seconds and untimed.workspace_bytes != modelled.workspace_bytes
    runs.clear()
    timed = profile_costs(graph, store=store, repeats=1)
    assert timed.has_times and len(runs) == len(distinct), "only times are measured"
    assert timed.workspace_bytes == untimed.workspace_bytes and timed.seconds != untimed.seconds
    runs.clear()
    assert profile_costs(graph, store=store, repeats=1, with_times=False) == timed, "what is known is taken"
    assert not runs


def test_several_graphs_are_measured_together(runs: list[Node]) -> None:
    one, both = nn.Tanh(), nn.Sequential(nn.Tanh(), nn.ReLU())
    graphs = [capture(module, (torch.randn(3, 4, requires_grad=True),)).graph for module in (one, both)]
    costs = profile_costs(*graphs, repeats=1)
    operations = {node for graph in graphs for node in graph.operations}
    assert set(costs.seconds) == set(costs.workspace_bytes) == operations
    assert len(runs) == 2 * len({signature(node) for node in operations})


def test_the_default_store_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRC_CACHE_DIR", str(tmp_path / "irc"))
    assert ProfileStore.default().folder == tmp_path / "irc"
    monkeypatch.delenv("IRC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ProfileStore.default().folder == tmp_path / "irc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ProfileStore.default().folder == tmp_path / ".cache" / "irc"


def test_a_store_without_a_folder_keeps_nothing() -> None:
    store = ProfileStore(None)
    store.save("d", {"a": Measured(1.0, 1)})
    assert store.load("d") == {}


def test_made_up_indices_are_in_range() -> None:
    class Gather(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            found = self.embedding(tokens)
            return found.gather(1, tokens[:, None].expand(-1, 1)).masked_fill(mask[:, None], 0.0)

    args = (torch.tensor([3, 1, 2]), torch.tensor([True, False, True]))
    costs = profile_costs(capture(Gather(), args).graph, repeats=1)
    assert all(seconds > 0 for seconds in costs.seconds.values())


# ---------------------------------------------------------------------- CUDA


class History:
    """The allocator's history of two devices, in place of torch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_recording: bool = False) -> None:
        self.traces: list[list[dict[str, Any]]] = [[], []]
        self.is_recording = is_recording
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(
            vars(torch)["_C"], "_cuda_isHistoryEnabled", lambda: self.is_recording, raising=False
        )
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)

    def snapshot(self) -> dict[str, Any]:
        return {"device_traces": copy.deepcopy(self.traces)}

    def record(self, enabled: str | None, **_: object) -> None:
        self.is_recording = enabled is not None

    def note(self, device: int, *entries: tuple[str, int]) -> None:
        if self.is_recording:
            self.traces[device] += [{"action": action, "size": nbytes} for action, nbytes in entries]


def test_the_history_of_cuda_s_allocator_counts_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(monkeypatch, is_recording=True)
    history.note(1, ("alloc", 4096))  # of before
    history.is_recording = False

    def run() -> None:
        history.note(0, ("alloc", 9999))
        history.note(1, ("segment_alloc", 2 << 20), ("alloc", 1), ("alloc", 1300), ("free_requested", 1))
        history.note(1, ("alloc", 512), ("free_completed", 1), ("free_completed", 1300), ("alloc", 513))

    assert allocation_events(run, "cuda:1") == [512, 1536, 512, -512, -1536, 1024]
    assert peak_bytes(run, torch.device("cuda", 1)) == 2560
    assert allocation_levels([run, lambda: None], "cuda:1") == [Level(2560, 1536), Level(0, 0)]
    assert not history.is_recording


def test_the_history_ends_with_a_run_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 // 0, "cuda:0")
    assert not history.is_recording


def test_a_history_of_the_user_s_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(monkeypatch, is_recording=True)
    with pytest.raises(UsageError, match="history of CUDA memory") as raised:
        peak_bytes(lambda: None, "cuda:0")
    assert raised.value.code == "IRC458" and raised.value.help and history.is_recording


def convolution_on(device: str) -> Graph:
    def at(*shape: int) -> Value:
        type = TensorType.contiguous(shape, DType.FLOAT32, device)
        return Value(str(shape), type, Storage(str(shape), type.nbytes, device))

    rest = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    node = Node("c", "aten.convolution.default", (at(1, 2, 4, 4), at(3, 2, 1, 1), *rest), (at(1, 3, 4, 4),))
    return Graph((), (node,), ())


def test_convolutions_of_a_gpu_are_not_chosen_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.raises(UsageError, match=r"cudnn\.benchmark is on") as raised:
        profile_costs(convolution_on("cuda:0"))
    assert raised.value.code == "IRC457" and "benchmark = False" in (raised.value.help or "")
    assert profile_costs(convolution_on("cpu"), repeats=1).seconds


def test_measurements_on_a_gpu_are_kept_by_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    graph, names = convolution_on("cuda:0"), set[str]()
    names.add(vars(profile)["_device_of"]([graph]))
    for name in ("deterministic", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, not getattr(torch.backends.cudnn, name))
        names.add(vars(profile)["_device_of"]([graph]))
    assert len(names) == 3 and all("cudnn-" in name for name in names)
    assert "cudnn" not in vars(profile)["_device_of"]([convolution_on("cpu")])


@pytest.mark.parametrize(
    "row", ["NaN, 0, 2", "1e300, 0, 2", "-1, 0, 2", "1, 1e400, 2", '"x", 0, 2', "[], 0, 2"]
)
def test_measurements_that_cannot_be_count_as_none(tmp_path: Path, row: str) -> None:
    store = ProfileStore(tmp_path)
    store.save("cpu", {"kept": Measured(1.0, 0, 2)})
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    file.write_text(text.replace('"operations": {', f'"operations": {{"odd": [{row}],', 1))
    assert "odd" not in store.load("cpu")
