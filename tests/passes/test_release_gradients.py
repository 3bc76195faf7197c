"""Gradients that leave within backward: where their nodes stand, what is reserved, that every plan holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.strategies import Sample, graphs

from irc.ir import (
    Gradients,
    Graph,
    InputRole,
    Node,
    OutputRole,
    Region,
    Storage,
    UsageError,
    Value,
    parse_graph,
    print_graph,
    same_graph,
    verify_graph,
    verify_schedule,
)
from irc.passes import (
    CheckpointProblem,
    Cost,
    Costs,
    PassManager,
    PlanMemory,
    Planner,
    Program,
    ReleaseGradients,
    parse_passes,
    smallest_budget,
)
from irc.passes.costs.table import StepCost
from irc.passes.remat.backward_order import weight_gradients_last
from irc.passes.remat.strategies import keeping
from irc.passes.rewrites.release_gradients import release_gradients

FEW = examples(15)
samples = graphs()


def delivered(graph: Graph) -> dict[str, Value]:
    """The gradients of parameters that a graph hands over, by parameter."""
    gradients = (o for o in graph.outputs if o.role is OutputRole.GRADIENT and o.value is not None)
    return {o.target: o.value for o in gradients if o.value and o.target.startswith("parameter:")}


def step_costs(graph: Graph) -> dict[Value, StepCost]:
    """Made-up costs of an optimizer with twice the parameter's bytes of state."""
    parameters = (i.value for i in graph.inputs if i.role is InputRole.PARAMETER)
    return {p: StepCost(2 * p.type.nbytes, p.type.nbytes, 2.0) for p in parameters}


def both_ways(graph: Graph) -> Iterator[Graph]:
    yield release_gradients(graph)
    yield release_gradients(graph, step_costs(graph))


def program_of(sample: Sample, graph: Graph) -> Program:
    """The released graph of a sample with the sample's costs; what was added takes a second."""
    steps = {n: StepCost.of(n) for n in graph.releases}
    seconds = {n: sample.seconds.get(n, 1.0) for n in graph.operations}
    workspace = {
        n: steps[n].workspace_bytes if n in steps else sample.workspace_bytes.get(n, 0)
        for n in graph.operations
    }
    return Program(graph, Costs(seconds, workspace, "analytic:test"))


# ------------------------------------------------------------------------------------- the graph


@given(samples)
def test_each_gradient_is_released_once_and_the_rest_stays(sample: Sample) -> None:
    graph = sample.graph
    for released in both_ways(graph):
        verify_graph(released)
        names = {i.value: f"parameter:{i.target}" for i in graph.inputs}
        assert [names[n.operands[0]] for n in released.releases] != [] or not delivered(graph)
        assert {names[n.operands[0]] for n in released.releases} == set(delivered(graph))
        assert len(released.releases) == len(delivered(graph)) and not delivered(released)
        added = {n for n in released.nodes if n.releases is not None or n.name.startswith("own_")}
        assert tuple(n for n in released.nodes if n not in added) == graph.nodes
        others = [o for o in graph.outputs if not o.target.startswith("parameter:")]
        assert [o for o in released.outputs if not o.target.startswith("parameter:")] == others


@given(samples)
def test_a_second_time_nothing_is_left_to_release(sample: Sample) -> None:
    for released in both_ways(sample.graph):
        again = (release_gradients(released), release_gradients(released, step_costs(released)))
        assert all(same_graph(released, once_more) for once_more in again)


@given(samples)
def test_what_is_reserved_is_what_is_released(sample: Sample) -> None:
    graph = sample.graph
    accumulated, applied = both_ways(graph)
    sizes = [gradient.type.nbytes for gradient in delivered(graph).values()]
    assert accumulated.reserved_bytes >= sum(sizes)
    assert applied.reserved_bytes == 2 * sum(sizes)
    for released in (accumulated, applied):
        assert released.static_bytes == graph.static_bytes + released.reserved_bytes
        assert same_graph(parse_graph(print_graph(released)), released)
    if sizes:
        assert (accumulated.gradients, applied.gradients) == (Gradients.ACCUMULATED, Gradients.APPLIED)


def makers(graph: Graph) -> dict[Value, Node]:
    return {value: node for node in graph.nodes for value in node.values}


@given(samples)
def test_a_gradient_is_accumulated_right_after_it_is_made(sample: Sample) -> None:
    released = release_gradients(sample.graph)
    of, nodes = makers(released), list(released.nodes)
    for node in released.releases:
        between = nodes[nodes.index(of[node.operands[1]]) + 1 : nodes.index(node)]
        assert all(n.releases is not None or n.name.startswith("own_") for n in between)


def rerun_for(graph: Graph, node: Node) -> set[Node]:
    """The backward operations that a run of a forward operation could serve, found one step at a time."""
    served: set[Node] = set()
    reached: set[Storage] = set(graph.allocates(node)) - graph.output_storages
    for later in graph.operations[graph.operations.index(node) + 1 :]:
        if reached.isdisjoint(graph.reads(later)):
            continue
        if later.region is Region.BACKWARD:
            served.add(later)
        else:
            reached |= set(graph.allocates(later)) - graph.output_storages
    return served


@given(samples)
def test_a_gradient_is_applied_once_its_parameter_is_no_longer_needed_and_no_later(
    sample: Sample,
) -> None:
    graph = sample.graph
    released = release_gradients(graph, step_costs(graph))
    place = {node: index for index, node in enumerate(released.nodes)}
    of = makers(released)
    for node in released.releases:
        parameter, gradient = node.operands
        readers = [n for n in graph.operations if parameter.storage in graph.reads(n)]
        needed = {n for n in readers if n.region is Region.BACKWARD}
        needed |= {b for n in readers if n.region is Region.FORWARD for b in rerun_for(graph, n)}
        needed |= {n for n in graph.operations if gradient.storage in graph.reads(n)}
        needed.add(of[gradient])
        latest = max(needed, key=place.__getitem__)
        assert place[latest] < place[node]
        between = released.nodes[place[latest] + 1 : place[node]]
        assert all(n.releases is not None or n.name.startswith("own_") for n in between)


SHARED = """\
graph loss_bytes=0 {
  storage @x 32 cpu
  storage @a 32 cpu
  storage @b 32 cpu
  storage @c 32 cpu
  storage @t 32 cpu
  storage @z 32 cpu
  storage @g 32 cpu
  input %x: float32[8]{1} @x input "0" requires_grad
  input %a: float32[8]{1} @a parameter "a" requires_grad
  input %b: float32[8]{1} @b parameter "b" requires_grad
  input %c: float32[8]{1} @c parameter "c" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  z = op(%x, %a, %b, %c) -> %z: float32[8]{1} @z
backward:
  g = op(%t, %x) -> %g: float32[8]{1} @g
  h = op(%g, %a)
  output %z "0"
  gradient %t "input:0"
  gradient %g "parameter:a"
  gradient %g "parameter:b"
  gradient %t "parameter:c"
}
"""

SHARED_APPLIED = """\
graph loss_bytes=0 reserved_bytes=192 {
  storage @x 32 cpu
  storage @a 32 cpu
  storage @b 32 cpu
  storage @c 32 cpu
  storage @t 32 cpu
  storage @z 32 cpu
  storage @own_c 32 cpu
  storage @g 32 cpu
  storage @own_b 32 cpu
  input %x: float32[8]{1} @x input "0" requires_grad
  input %a: float32[8]{1} @a parameter "a" requires_grad
  input %b: float32[8]{1} @b parameter "b" requires_grad
  input %c: float32[8]{1} @c parameter "c" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  z = op(%x, %a, %b, %c) -> %z: float32[8]{1} @z
backward:
  own_c = aten.clone.default(%t, memory_format=memory_format(contiguous_format)) -> %own_c: float32[8]{1} @own_c
  apply_c = irc.apply_gradient(%c, %own_c, state_bytes=64, workspace_bytes=32, seconds=2.0, moving_bytes=0) traits(effect)
  g = op(%t, %x) -> %g: float32[8]{1} @g
  own_b = aten.clone.default(%g, memory_format=memory_format(contiguous_format)) -> %own_b: float32[8]{1} @own_b
  apply_b = irc.apply_gradient(%b, %own_b, state_bytes=64, workspace_bytes=32, seconds=2.0, moving_bytes=0) traits(effect)
  h = op(%g, %a)
  apply_a = irc.apply_gradient(%a, %g, state_bytes=64, workspace_bytes=32, seconds=2.0, moving_bytes=0) traits(effect)
  output %z "0"
  gradient %t "input:0"
  gradient none "parameter:a"
  gradient none "parameter:b"
  gradient none "parameter:c"
}
"""  # noqa: E501


def test_what_others_hold_too_is_copied_and_what_is_read_later_waits() -> None:
    graph = parse_graph(SHARED)
    verify_graph(graph)
    applied = release_gradients(graph, step_costs(graph))
    assert print_graph(applied) == SHARED_APPLIED
    verify_graph(applied)
    assert same_graph(parse_graph(SHARED_APPLIED), applied)


WAITING = """\
graph loss_bytes=0 {
  storage @x 32 cpu
  storage @w 32 cpu
  storage @b 32 cpu
  storage @t 32 cpu
  storage @a 32 cpu
  storage @c 32 cpu
  storage @z 32 cpu
  storage @g 32 cpu
  storage @h 32 cpu
  input %x: float32[8]{1} @x input "0"
  input %w: float32[8]{1} @w parameter "w" requires_grad
  input %b: float32[8]{1} @b parameter "b" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  a = op(%x, %w) -> %a: float32[8]{1} @a
  c = op(%a) -> %c: float32[8]{1} @c
  z = op(%c, %b) -> %z: float32[8]{1} @z
backward:
  g = op(%t) -> %g: float32[8]{1} @g
  h = op(%t) -> %h: float32[8]{1} @h
  reads_gradient = op(%h)
  serves = op(%t, %c)
  last = op(%t)
  output %z "0"
  gradient %g "parameter:w"
  gradient %h "parameter:b"
}
"""


def test_a_gradient_waits_for_what_reads_it_and_for_runs_of_what_reads_its_parameter() -> None:
    graph = parse_graph(WAITING)
    order = [node.name for node in release_gradients(graph, step_costs(graph)).nodes[3:]]
    assert order == ["g", "h", "reads_gradient", "apply_b", "serves", "apply_w", "last"]
    order = [node.name for node in release_gradients(graph).nodes[3:]]
    assert order == ["g", "accumulate_w", "h", "accumulate_b", "reads_gradient", "serves", "last"]


TIED = """\
graph loss_bytes=0 {
  storage @x 32 cpu
  storage @w 32 cpu
  storage @t 32 cpu
  storage @z 32 cpu
  storage @g 32 cpu
  storage @h 32 cpu
  input %x: float32[8]{1} @x input "0"
  input %w: float32[8]{1} @w parameter "a.weight" requires_grad
  input %v: float32[8]{1} @w parameter "b.weight" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  z = op(%x, %w, %v) -> %z: float32[8]{1} @z
backward:
  h = op(%t, %w) -> %h: float32[8]{1} @h
  g = op(%t, %v) -> %g: float32[8]{1} @g
  last = op(%t, %v)
  output %z "0"
  gradient %g "parameter:a.weight"
  gradient %h "parameter:b.weight"
}
"""

TIED_APPLIED = """\
  g = op(%t, %v) -> %g: float32[8]{1} @g
  sum_0_a.weight = aten.add.Tensor(%h, %g) -> %sum_0_a.weight: float32[8]{1} @sum_0_a.weight
  last = op(%t, %v)
  apply_a.weight = irc.apply_gradient(%w, %sum_0_a.weight, state_bytes=64, workspace_bytes=32, \
seconds=2.0, moving_bytes=0) traits(effect)
  output %z "0"
  gradient none "parameter:a.weight"
  gradient none "parameter:b.weight"
"""


def test_the_gradients_of_a_tied_parameter_are_summed_up_in_the_order_of_backward() -> None:
    graph = parse_graph(TIED)
    applied = release_gradients(graph, step_costs(graph))
    verify_graph(applied)
    assert TIED_APPLIED in print_graph(applied)
    assert (applied.reserved_bytes, len(applied.releases)) == (64, 1)
    accumulated = release_gradients(graph)
    verify_graph(accumulated)
    assert (accumulated.reserved_bytes, len(accumulated.releases)) == (32, 1)


def test_names_that_are_taken_are_left_alone() -> None:
    text = SHARED.replace("h = op", "apply_a = op").replace("g = op(%t, %x)", "own_b = op(%t, %x)")
    graph = parse_graph(text)
    verify_graph(release_gradients(graph, step_costs(graph)))
    verify_graph(release_gradients(graph))


# ------------------------------------------------------------------------------------- schedules


@given(samples, st.sampled_from(("auto", "ilp", "eviction", "sqrt-n", "every-2", "keep-all")), st.data())
@FEW
def test_every_strategy_leaves_updated_parameters_alone(
    sample: Sample, strategy: str, data: st.DataObject
) -> None:
    for released in both_ways(sample.graph):
        program = program_of(sample, released)
        assert program.costs is not None
        baseline = verify_schedule(program.baseline, program.costs.workspace_bytes).peak_bytes
        least = smallest_budget(Planner(program))
        exact = strategy in ("auto", "ilp")
        budget = data.draw(st.integers(least, max(least, baseline))) if exact else 10 * baseline
        result = PlanMemory(budget, strategy, 5.0).run(program)
        assert result.schedule is not None
        verify_schedule(result.schedule, program.costs.workspace_bytes, budget_bytes=budget)


@given(samples)
@FEW
def test_releasing_never_costs_more_than_what_it_reserves(sample: Sample) -> None:
    """Freed as they come, gradients take less than together, but for the copies that share memory."""
    graph = sample.graph
    if any(g.storage not in graph.producers or g.storage in others for g, others in shared(graph)):
        return
    before = verify_schedule(Program(graph).baseline, sample.workspace_bytes).peak_bytes
    released = release_gradients(graph)
    after = verify_schedule(Program(released).baseline, sample.workspace_bytes).peak_bytes
    assert after - released.reserved_bytes <= before


def shared(graph: Graph) -> Iterator[tuple[Value, set[Storage]]]:
    outputs = [o.value for o in graph.outputs if o.value is not None]
    for gradient in delivered(graph).values():
        rest = list(outputs)
        rest.remove(gradient)
        forward = {s for n in graph.nodes if n.region is Region.FORWARD for s in graph.allocates(n)}
        yield gradient, {value.storage for value in rest} | forward


# ------------------------------------------------------------------------------------- the pass


def test_the_pass_in_words() -> None:
    (step,) = parse_passes("release-gradients")
    assert step == ReleaseGradients("accumulate")
    assert str(PassManager([step])) == "release-gradients{mode=accumulate}"
    applied = ReleaseGradients("apply", lambda params: torch.optim.SGD(params, lr=0.1))
    assert str(PassManager([applied])) == "release-gradients{mode=apply}"
    with pytest.raises(UsageError, match=r"IRC404.*no option 'optimizer=x'"):
        parse_passes("release-gradients{optimizer=x}")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (ReleaseGradients("free"), "IRC413.*no way 'free' to release"),
        (ReleaseGradients("apply"), "IRC413.*applied by an optimizer"),
        (ReleaseGradients(optimizer=lambda p: torch.optim.SGD(p)), "IRC413.*no other way takes one"),
    ],
)
def test_options_that_do_not_fit_are_refused(step: ReleaseGradients, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        step.check()
    with pytest.raises(UsageError, match=message):
        step.run(Program(parse_graph(SHARED)))


def test_it_comes_before_the_costs() -> None:
    program = Cost("cpu").run(Program(parse_graph(SHARED.replace("op(", "aten.add.Tensor("))))
    with pytest.raises(UsageError, match=r"IRC413.*after the operations' costs"):
        ReleaseGradients().run(program)


def test_a_pipeline_measures_the_optimizer_and_counts_its_state() -> None:
    graph = parse_graph(SHARED)

    def momentum(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    program = PassManager([ReleaseGradients("apply", momentum)]).run(Program(graph))
    assert program.graph.reserved_bytes == 3 * 32
    keywords: list[dict[str, Any]] = [dict(node.keywords) for node in program.graph.releases]
    assert all(row["state_bytes"] == 32 and row["seconds"] > 0 for row in keywords)
    assert replace(program.graph, reserved_bytes=0).static_bytes == graph.static_bytes


INPUT_GRADIENT = """\
graph loss_bytes=0 {
  storage @x 800 cpu
  storage @w 32 cpu
  storage @t 32 cpu
  storage @z 32 cpu
  storage @h 32 cpu
  storage @g 32 cpu
  storage @d 800 cpu
  input %x: float32[200]{1} @x input "0" requires_grad
  input %w: float32[8]{1} @w parameter "w" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  z = op(%x, %w) -> %z: float32[8]{1} @z
backward:
  h = op(%t) -> %h: float32[8]{1} @h
  g = op(%h, %x) -> %g: float32[8]{1} @g
  d = op(%h, %w) -> %d: float32[200]{1} @d
  last = op(%t)
  output %z "0"
  gradient %d "input:0"
  gradient %g "parameter:w"
}
"""


def test_a_large_gradient_of_an_input_does_not_wait_beyond_the_update_that_it_must_not_see() -> None:
    graph = parse_graph(INPUT_GRADIENT)
    for released in (release_gradients(graph), release_gradients(graph, step_costs(graph))):
        nothing = dict.fromkeys(released.operations, 0)
        program = Program(released, Costs(dict.fromkeys(released.operations, 1.0), nothing, "analytic:test"))
        result = PlanMemory("100%", "auto", 5.0).run(program)
        assert result.schedule is not None
        verify_schedule(result.schedule, nothing)


SCALED = """\
graph loss_bytes=0 {
  storage @x 32 cpu
  storage @p 32 cpu
  storage @w 320 cpu
  storage @t 32 cpu
  storage @s 32 cpu
  storage @z 32 cpu
  storage @gw 320 cpu
  storage @gs 32 cpu
  storage @gp 32 cpu
  input %x: float32[8]{1} @x input "0"
  input %p: float32[8]{1} @p parameter "p" requires_grad
  input %w: float32[80]{1} @w parameter "w" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  s = op(%x, %p) -> %s: float32[8]{1} @s
  z = op(%s, %w) -> %z: float32[8]{1} @z
backward:
  gw = op(%t, %s) -> %gw: float32[80]{1} @gw
  gs = op(%t, %w) -> %gs: float32[8]{1} @gs
  gp = op(%gs, %x) -> %gp: float32[8]{1} @gp
  output %z "0"
  gradient %gp "parameter:p"
  gradient %gw "parameter:w"
}
"""


def test_a_gradient_does_not_wait_if_what_it_reads_would_be_made_of_an_updated_parameter() -> None:
    graph = parse_graph(SCALED)
    for released, waits in (
        (release_gradients(graph), True),
        (release_gradients(graph, step_costs(graph)), False),
    ):
        costs = Costs(dict.fromkeys(released.operations, 1.0), dict.fromkeys(released.operations, 0), "test")
        order = weight_gradients_last(released, costs)
        assert [node.name for node in order].index("gw") == (3 if waits else 0)
        solution = keeping(CheckpointProblem(released, costs, order), frozenset())
        verify_schedule(solution.schedule, costs.workspace_bytes)
