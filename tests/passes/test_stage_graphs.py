"""Stages of random training graphs compute what the whole graph does, and no stage waits for a later one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.strategies import Sample, graphs

from irc.ir import (
    RECEIVE,
    SEND,
    Argument,
    Graph,
    InputRole,
    Node,
    OutputRole,
    Region,
    Value,
    parse_graph,
    verify_graph,
    verify_schedule,
)
from irc.passes import Program
from irc.passes.pipeline.boundaries import boundary_bytes, boundary_values
from irc.passes.pipeline.placement import Dataflow, place_backward
from irc.passes.pipeline.stage_graphs import StageGraph, cut_graph

_ADD = "aten.add.Tensor"


def with_sums(sample: Sample) -> Graph:
    """The graph in which sums of gradients are torch's additions."""
    nodes = tuple(replace(n, op=_ADD) if n.op == "test.sum" else n for n in sample.graph.nodes)
    return replace(sample.graph, nodes=nodes)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Graph, dict[Node, int], int]:
    """A graph and a stage for each operation of forward; those of one overwritten buffer are together."""
    graph = with_sums(draw(graphs(zero_sizes=False)))
    flow = Dataflow(graph)
    count = draw(st.integers(1, 4))
    makers = graph.producers
    stages: dict[Node, int] = {}
    for node in flow.forward:
        behind = [stages[m] for s in graph.reads(node) if (m := makers.get(s)) in stages]
        stages[node] = draw(st.integers(max(behind, default=0), count - 1))
    if any(len({stages[node] for node in group}) > 1 for group in flow.together):
        stages = dict.fromkeys(stages, count - 1)
    return graph, stages, count


class Terms:
    """What each value is, as a number: the same number stands for the same computation."""

    def __init__(self) -> None:
        self.known: dict[object, int] = {}

    def number(self, what: object) -> int:
        return self.known.setdefault(what, len(self.known))

    def input(self, role: InputRole, target: str) -> Counter[int]:
        return Counter([self.number((role, target))])

    def result(self, node: Node, index: int, there: Mapping[Value, Counter[int]]) -> Counter[int]:
        if node.op == _ADD and node.region is Region.BACKWARD:
            left, right = (there[value] for value in node.operands)
            return left + right
        said = tuple(self.said(argument, there) for argument in node.arguments)
        return Counter([self.number((node.name, node.op, said, index))])

    def said(self, argument: Argument, there: Mapping[Value, Counter[int]]) -> object:
        if isinstance(argument, Value):
            return tuple(sorted(there[argument].items()))
        return tuple(self.said(a, there) for a in argument) if isinstance(argument, tuple) else argument


def run(
    graph: Graph,
    region: Region,
    there: dict[Value, Counter[int]],
    terms: Terms,
    mail: dict[str, Counter[int]],
) -> None:
    for node in graph.nodes:
        if node.region is not region:
            continue
        if node.op == SEND:
            value, key = node.arguments
            assert isinstance(value, Value) and isinstance(key, str)
            mail[f"{region.value} {key}"] = there[value]
        elif node.op == RECEIVE:
            (value,) = node.values
            there[value] = mail.pop(f"{region.value} {node.arguments[0]}")
        else:
            for index, value in enumerate(node.results):
                if value is not None:
                    there[value] = terms.result(node, index, there)


def delivered(graphs: list[Graph], terms: Terms) -> dict[tuple[str, str], Counter[int]]:
    """What stages deliver together; the parts of a gradient are added."""
    mail: dict[str, Counter[int]] = {}
    known = [{i.value: terms.input(i.role, i.target) for i in graph.inputs} for graph in graphs]
    for graph, there in zip(graphs, known, strict=True):
        run(graph, Region.FORWARD, there, terms, mail)
        assert all(key.startswith("forward") for key in mail)
    assert not mail
    for graph, there in zip(reversed(graphs), reversed(known), strict=True):
        run(graph, Region.BACKWARD, there, terms, mail)
    assert not mail
    found: dict[tuple[str, str], Counter[int]] = {}
    for graph, there in zip(graphs, known, strict=True):
        for output in graph.outputs:
            if output.value is not None:
                key = (output.role.value, output.target)
                found[key] = found.get(key, Counter()) + there[output.value]
    return found


@given(cuts(), st.booleans())
def test_stages_compute_what_the_graph_does(case: tuple[Graph, dict[Node, int], int], split: bool) -> None:
    graph, stages, count = case
    cut_up = cut_graph(graph, stages, count, split_backward=split)
    assert len(cut_up) == count
    terms = Terms()
    assert delivered([stage.graph for stage in cut_up], terms) == delivered([graph], terms)


@given(cuts(), st.booleans())
def test_stages_are_graphs_that_schedules_carry_out(
    case: tuple[Graph, dict[Node, int], int], split: bool
) -> None:
    """Left out are stages whose forward nothing reads, and which make gradients of nothing."""
    for stage in cut_graph(*case, split_backward=split):
        exchanges = any(node.op in (SEND, RECEIVE) for node in stage.graph.nodes)
        if exchanges or any(output.role is OutputRole.OUTPUT for output in stage.graph.outputs):
            verify_graph(stage.graph)
            verify_schedule(Program(stage.graph).baseline, {})


@given(cuts())
def test_every_operation_of_forward_is_in_its_stage(case: tuple[Graph, dict[Node, int], int]) -> None:
    graph, stages, count = case
    cut_up = cut_graph(graph, stages, count)
    repeated = Dataflow(graph).repeated
    for index, stage in enumerate(cut_up):
        mine = {n for n in stage.graph.operations if n in graph.operations and n.region is Region.FORWARD}
        assert mine - repeated == {node for node, at in stages.items() if at == index}


@given(cuts())
def test_neighbours_agree_on_what_they_exchange(case: tuple[Graph, dict[Node, int], int]) -> None:
    def keys(stage: StageGraph, op: str, region: Region) -> list[str]:
        nodes = (n for n in stage.graph.nodes if n.op == op and n.region is region)
        return [str(node.arguments[-1]) for node in nodes]

    stages = cut_graph(*case)
    for left, right in itertools.pairwise(stages):
        assert left.after == right.before
        assert keys(left, SEND, Region.FORWARD) == keys(right, RECEIVE, Region.FORWARD)
        assert keys(right, SEND, Region.BACKWARD) == keys(left, RECEIVE, Region.BACKWARD)


@given(cuts())
def test_one_stage_is_the_whole_graph(case: tuple[Graph, dict[Node, int], int]) -> None:
    graph, stages, _ = case
    (stage,) = cut_graph(graph, dict.fromkeys(stages, 0), 1)
    read = {value for node in graph.nodes for value in node.operands}
    dead = [n for n in graph.operations if n in Dataflow(graph).repeated and read.isdisjoint(n.values)]
    assert set(stage.graph.operations) == set(graph.operations) - set(dead)
    assert not stage.before.activations and not stage.after.activations


@given(cuts())
def test_bytes_at_boundaries_are_those_of_the_values_that_cross_them(
    made: tuple[Graph, dict[Node, int], int],
) -> None:
    graph, stages, count = made
    flow = Dataflow(graph)
    placement = place_backward(flow, stages, count)
    expected = [(b.forward_bytes, b.backward_bytes) for b in boundary_values(flow, placement, count)]
    assert boundary_bytes(flow, placement, count) == expected


def test_draws_from_a_generator_that_a_forward_makes_are_in_one_stage() -> None:
    draws = (
        f'  r{k} = rand((4,), generator=seeded("{name}")) -> %r{k}: float32[4]{{1}} @r{k} traits(random)'
        for k, name in enumerate(("0:7@cpu", "1:7@cpu", "0:7@cpu"))
    )
    storages = (f"  storage @r{k} 64 cpu" for k in range(3))
    graph = parse_graph(
        "\n".join(["graph loss_bytes=0 {", *storages, "forward:", *draws, "backward:", "}", ""])
    )
    first, other, second = graph.nodes
    assert set(Dataflow(graph).together) == {frozenset({first, second}), frozenset({other})}
