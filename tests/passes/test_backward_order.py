"""Large gradients made last: any order is one of backward, and memory is what it is for."""

import torch
from hypothesis import given
from support.examples import examples
from support.exhaustive import chains, problem_of
from support.strategies import Sample, graphs
from torch import nn

from irc.frontends.torch import capture
from irc.ir import Region, verify_schedule
from irc.passes import CheckpointProblem, Cost, Program, recomputation_problem
from irc.passes.remat.backward_order import weight_gradients_last

FEW = examples(60)


@given(chains() | graphs())
@FEW
def test_the_order_is_one_of_backward(sample: Sample) -> None:
    given = problem_of(sample)
    order = weight_gradients_last(sample.graph, given.costs)
    assert sorted(n.name for n in order) == sorted(n.name for n in given.backward)
    later = CheckpointProblem(sample.graph, given.costs, order)
    assert later.backward == order
    verify_schedule(later.keep_all.schedule, sample.workspace_bytes, peak_bytes=later.keep_all.peak_bytes)
    chosen = recomputation_problem(Program(sample.graph, given.costs))
    tightest = min(p.keep_all.peak_bytes + p.floor_bytes for p in (given, later))
    assert chosen.keep_all.peak_bytes + chosen.floor_bytes <= tightest
    assert chosen.keep_all.seconds == given.keep_all.seconds


def test_a_gradient_larger_than_what_it_is_made_from_waits() -> None:
    """The gradient of the middle layer is 512 times as large as its input: it is made at the end."""
    model = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 8))
    graph = capture(model, (torch.randn(4, 8),), None).graph
    program = Cost(profile="cpu").run(Program(graph))
    assert program.costs is not None
    order = weight_gradients_last(graph, program.costs)
    backward = [n for n in graph.operations if n.region is Region.BACKWARD]
    makers = [n for n in backward if any(s.nbytes == 4096 * 4096 * 4 for s in graph.allocates(n))]
    last = max(i for i, n in enumerate(order) if "tanh" in n.op)
    assert len(makers) == 1 and order.index(makers[0]) > last
    assert backward.index(makers[0]) < max(i for i, n in enumerate(backward) if "tanh" in n.op)


def test_nothing_waits_where_what_is_read_is_larger() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    graph = capture(model, (torch.randn(512, 8),), None).graph
    program = Cost(profile="cpu").run(Program(graph))
    assert program.costs is not None
    backward = tuple(n for n in graph.operations if n.region is Region.BACKWARD)
    assert weight_gradients_last(graph, program.costs) == backward
