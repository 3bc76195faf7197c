"""The published graphs: what is read, divided, kept and written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from support.partitions import best_of_all, problems

from benchmarks.partition_tables.__main__ import main
from benchmarks.partition_tables.contiguous import best_along, best_contiguous
from benchmarks.partition_tables.non_contiguous import best_non_contiguous
from benchmarks.partition_tables.page import to_section
from benchmarks.partition_tables.plain import plain_max_load
from benchmarks.partition_tables.readers import read_graph, read_piper, read_profile, read_solution
from benchmarks.partition_tables.rows import Row, known
from irc.ir import TimeLimitError, UsageError
from irc.passes.pipeline.partition_problem import PartitionProblem, evaluate

DATA = Path(__file__).parent.parent / "data" / "partition"
GRAPHS = DATA / "dnn-partitioning" / "throughput-inputs"
INSTANCES = (
    "LayerGraphs/bert24_inference",
    "LayerGraphs/bert24_training",
    "LayerGraphs/gnmt_inference",
    "LayerGraphs/gnmt_training",
    "LayerGraphs/resnet50_inference",
    "OperatorGraphs/bert_l-3_training",
)
PUBLISHED = 5e-6
"""Published loads have six digits."""


# ------------------------------------------------------------------------------------ the published figures


@pytest.mark.parametrize("name", INSTANCES)
def test_stored_partitions_cost_what_is_stated(name: str) -> None:
    graph = GRAPHS / f"{name}.json"
    problem = read_graph(graph, has_hosts=True)
    stored = read_solution(DATA / "dp_solutions" / f"{name.replace('/', '_')}.json", graph, problem)
    found = evaluate(problem, stored.assignment)
    assert found.max_load_seconds == pytest.approx(stored.max_load_seconds, rel=1e-12)
    assert found.fits and found.is_together and found.is_contiguous


@pytest.mark.parametrize("name", INSTANCES)
def test_the_published_optima_are_met_and_proved(name: str) -> None:
    problem = read_graph(GRAPHS / f"{name}.json", has_hosts=True)
    found = best_contiguous(problem)
    published = known()[name].dp_ms
    assert published is not None and found.is_proved
    assert 1e3 * found.max_load_seconds == pytest.approx(published, rel=PUBLISHED)
    assert evaluate(problem, found.assignment).is_contiguous


def test_an_order_of_any_kind_is_better_for_bert() -> None:
    problem = read_graph(GRAPHS / "LayerGraphs/bert24_training.json", has_hosts=False)
    found = best_non_contiguous(problem, seconds=60, start=best_contiguous(problem).assignment)
    published = known()["LayerGraphs/bert24_training"].any_order
    assert found.is_proved and published.endswith("opt 4.1s")
    assert 1e3 * found.max_load_seconds <= float(published.split()[0]) * (1 + PUBLISHED)


def test_known_figures_are_read() -> None:
    assert len(known()) == 16
    assert sum(each.dp_ms is not None for each in known().values()) == 14
    assert known()["LayerGraphs/inceptionv3_training"].contiguous == "125.9284 opt 63.5s"
    assert known()["LayerGraphs/gnmt_training"].expert_ms == 137.154
    assert known()["OperatorGraphs/bert_l-3_training"].expert_ms is None


# ------------------------------------------------------------------------------------------ the plain method


@given(problems())
@settings(max_examples=40, deadline=None)
def test_the_plain_method_finds_the_best_of_all(problem: PartitionProblem) -> None:
    nodes = tuple(replace(node, memory_bytes=0) for node in problem.nodes)
    free = replace(problem, nodes=nodes)
    assert plain_max_load(free, seconds=60) == pytest.approx(best_of_all(free, is_contiguous=True))


def test_the_plain_method_says_that_it_did_not_end() -> None:
    problem = read_graph(GRAPHS / "LayerGraphs/bert24_training.json", has_hosts=True)
    with pytest.raises(
        TimeLimitError, match=r"IRC478.*did not end for LayerGraphs/bert24_training in 0 s"
    ) as e:
        plain_max_load(problem, seconds=0)
    assert e.value.help == "give it more time, or leave it out"


# ---------------------------------------------------------------------------------------------- the readers


def test_profiles_are_read_with_all_their_activations() -> None:
    profile = read_profile(DATA / "pipedream" / "translation_gnmt_graph.txt")
    assert profile.name == "gnmt" and len(profile.layers) == 48 and len(profile.edges) == 58
    lstm = next(layer for layer in profile.layers if layer.name == "node7 LSTM(2048, 1024)")
    assert lstm.seconds == pytest.approx(3.190e-3 + 5.348e-3)
    assert lstm.activation_bytes == 6_291_456 + 2 * 131_072 and lstm.parameter_bytes == 50_364_416
    assert all(tail < head for tail, head in profile.edges)


def test_the_order_of_a_profile_is_no_better_than_all_orders() -> None:
    profile = read_profile(DATA / "pipedream" / "image_classification_vgg16_graph.txt")
    problem = profile.problem(4, 16e9)
    along = best_along(problem, range(len(profile.layers)))
    best = best_contiguous(problem)
    assert along.is_proved and best.is_proved
    assert best.max_load_seconds <= along.max_load_seconds


def test_a_graph_of_piper_is_read_on_its_devices() -> None:
    problem = read_piper(DATA / "piper" / "gnmt.json")
    assert len(problem.nodes) == 78 and len(problem.devices) == 10
    first = problem.nodes[0]
    assert first.seconds == (25.678,) and first.memory_bytes == 13_107_200 + 264_765_440
    assert first.transfer_seconds == pytest.approx(2 * 13_107_200 / 25e9)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"IRC476.*none\.txt cannot be read: No such file") as caught:
        read_profile(tmp_path / "none.txt")
    assert caught.value.help == "name another file or --data folder"


@pytest.mark.parametrize(
    "text, reason",
    [
        ("node1 - Input", "neither a layer nor an edge"),
        ("node1 -- a -- forward_compute_time=1", "KeyError: 'activation_size'"),
        (
            "\n".join(
                f"node{i} -- a -- forward_compute_time=1, backward_compute_time=1, "
                "activation_size=1, parameter_size=0"
                for i in (1, 2)
            )
            + "\n\tnode2 -- node1",
            "node1 reads node2, which is not before it",
        ),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "bad_graph.txt"
    path.write_text(text)
    with pytest.raises(
        UsageError, match=rf"IRC477.*bad_graph\.txt is no profile of PipeDream.*{reason}"
    ) as caught:
        read_profile(path)
    assert caught.value.help == "name another file or --data folder, or fetch the file again"


def test_a_graph_without_edges_in_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"nodes": []}))
    with pytest.raises(UsageError, match=r"IRC477.*is no graph of dnn-partitioning: KeyError: 'edges'"):
        read_graph(path, has_hosts=True)


# ----------------------------------------------------------------------------------------------- the command


def run(*options: str, data: Path = DATA) -> int:
    return main(["--data", str(data), "--seconds", "30", *options])


def test_the_command_writes_tables_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, journal = tmp_path / "page.md", tmp_path / "rows.jsonl"
    graphs = "LayerGraphs/bert24_training,vgg16,piper/gnmt"
    options = ("--plain-seconds", "30", "--journal", str(journal), "--markdown", str(page))
    assert run("--graphs", "LayerGraphs/bert24_training", *options) == 0
    assert "| LayerGraphs/bert24_training | 41.7458" in page.read_text()
    assert "vgg16" not in page.read_text()
    assert run("--graphs", graphs, *options) == 0
    told = capsys.readouterr().out
    assert told.count("LayerGraphs/bert24_training\n") == 1 and told.count("vgg16 on 4 at 16 GB/s\n") == 1
    text = page.read_text()
    assert "The 1 instances that the authors' programme finished took" in text
    assert "| vgg16   | 4 " in text and "| piper/gnmt |" in text
    before = journal.read_bytes()
    assert run("--graphs", graphs, *options) == 0 and journal.read_bytes() == before
    assert run("--graphs", graphs, "--workers", "2", *options) == 2
    assert "IRC441" in capsys.readouterr().err


def test_a_table_says_what_did_not_end() -> None:
    def row(method: str, load: float | None, bound: float) -> Row:
        return Row(method, load, bound, 1.0, load == bound)

    rows: Sequence[Row] = [
        row("contiguous", 2.0, 1.5),
        row("plain", None, 0.0),
        row("contiguous, no host", 3.0, 3.0),
        row("any order, no host", 2.5, 2.5),
    ]
    text = to_section({"LayerGraphs/bert24_training": rows}, 16.0)
    assert "bound 1.5000" in text and "took 1 s, 1 of them without coming to an end" in text


def test_a_wrong_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data=tmp_path) == 2
    assert "error[IRC476]" in (told := capsys.readouterr().err) and "none of the published graphs" in told
    assert run("--workers", "0") == 2
    assert "--workers is 0" in capsys.readouterr().err
