"""OGC: the optimum of its model on linear and branched graphs, and a valid schedule on any."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from itertools import combinations
from typing import TypeAlias

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, problem_of
from support.solutions import verify
from support.strategies import Sample, graphs

from irc.passes.published.ogc import ogc, optimal_checkpoints

Vertex = Hashable
Graph: TypeAlias = "nx.DiGraph[Vertex]"


def least(graph: Graph, nbytes: Mapping[Vertex, int], *, is_independent: bool) -> int:
    """The least of kept bytes and the largest segment, over all subsets of vertices.

    Args:
        graph: The graph.
        nbytes: The bytes of its vertices.
        is_independent: Whether each segment may hang on one kept vertex only, and lead to one: an independent
            segment of the paper. The graph has two more ends, which are kept.
    """
    joined = graph.copy()
    joined.add_edges_from(("start", v) for v in graph if not graph.in_degree(v))
    joined.add_edges_from((v, "end") for v in graph if not graph.out_degree(v))
    found: list[int] = []
    for size in range(len(graph) + 1):
        for kept in combinations(graph, size):
            parts = list(nx.weakly_connected_components(graph.subgraph(v for v in graph if v not in kept)))
            if is_independent and not all(_is_independent(joined, part) for part in parts):
                continue
            largest = max((sum(nbytes[v] for v in part) for part in parts), default=0)
            found.append(sum(nbytes[v] for v in kept) + largest)
    return min(found)


def _is_independent(graph: Graph, part: Set[Vertex]) -> bool:
    before = {u for v in part for u in graph.predecessors(v)} - part
    after = {u for v in part for u in graph.successors(v)} - part
    return len(before) == len(after) == 1


@st.composite
def series_parallel(draw: st.DrawFn) -> Graph:
    """Chains in which some links are branches of chains."""
    graph, last, count = nx.DiGraph(), 0, 1
    graph.add_node(0)
    while count < draw(st.integers(2, 8)):
        branches = draw(st.integers(1, 3))
        ends: list[int] = []
        for _ in range(branches):
            at = last
            for _ in range(draw(st.integers(1, 2))):
                graph.add_edge(at, count)
                at, count = count, count + 1
            ends.append(at)
        if len(ends) > 1:
            graph.add_edges_from((end, count) for end in ends)
            last, count = count, count + 1
        else:
            last = ends[0]
    return graph


@st.composite
def acyclic(draw: st.DrawFn) -> Graph:
    """Any small graph whose edges lead from lower numbers to higher ones."""
    count = draw(st.integers(1, 8))
    graph: Graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    pairs = list(combinations(range(count), 2))
    graph.add_edges_from(draw(st.lists(st.sampled_from(pairs), unique=True, max_size=14)) if pairs else [])
    return graph


@given(series_parallel(), st.data())
@examples(100)
def test_ogc_is_the_optimum_of_its_class_on_linear_and_branched_graphs(
    graph: Graph, data: st.DataObject
) -> None:
    nbytes = sized(graph, data)
    found = optimal_checkpoints(graph, nbytes, nbytes)
    assert found.nbytes == least(graph, nbytes, is_independent=True)
    assert found.kept_bytes == sum(nbytes[v] for v in found.kept)


@given(acyclic(), st.data())
@examples(150)
def test_it_is_no_worse_on_any_small_graph(graph: Graph, data: st.DataObject) -> None:
    nbytes = sized(graph, data)
    found = optimal_checkpoints(graph, nbytes, nbytes).nbytes
    assert least(graph, nbytes, is_independent=False) <= found
    assert found <= least(graph, nbytes, is_independent=True)


def sized(graph: Graph, data: st.DataObject) -> dict[Vertex, int]:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(graph), max_size=len(graph)))
    return dict(zip(graph, sizes, strict=True))


def test_a_chain_of_alike_tensors_keeps_about_its_square_root() -> None:
    graph = nx.path_graph(100, create_using=nx.DiGraph)
    ones: dict[Vertex, int] = dict.fromkeys(range(100), 1)
    assert optimal_checkpoints(graph, ones, ones).nbytes == 19  # 9 kept, 10 segments of 9 or 10: 9 + 10


def test_a_large_set_that_cannot_be_divided_keeps_where_its_closed_sets_meet() -> None:
    # A row of cells, of which each reads the two before it by way of a chain of five tensors.
    graph: Graph = nx.DiGraph()
    cells = 9
    for cell in range(2, cells):
        for source in (cell - 2, cell - 1):
            way = [source, *((source, cell, place) for place in range(5)), cell]
            nx.add_path(graph, way)
    ones: dict[Vertex, int] = dict.fromkeys(graph, 1)
    found = optimal_checkpoints(graph, ones, ones)
    assert set(range(1, cells - 1)) <= found.kept
    assert found.nbytes <= cells + 5 < len(graph) // 5


@given(chains() | graphs())
@examples(60)
def test_its_schedule_is_valid_after_the_deadline_too(sample: Sample) -> None:
    problem = problem_of(sample)
    for solution in (ogc(problem), ogc(problem, deadline=0.0)):
        verify(problem, solution)
        assert all(solution.order.count(node) <= 2 for node in problem.forward)
