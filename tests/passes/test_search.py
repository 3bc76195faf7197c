"""The search goes on where the programme over cuts chooses what no schedule can do."""

import time
from collections.abc import Mapping

import pytest

from irc.ir import Storage, parse_graph
from irc.passes import CheckpointProblem, Costs
from irc.passes.remat import search
from irc.passes.remat.candidates import find_candidates
from irc.passes.remat.cut_ilp import Solved

MASKED = """\
graph loss_bytes=0 {
  storage @x 8 cpu
  storage @w 8 cpu
  storage @t 8 cpu
  storage @r 80 cpu
  storage @a 80 cpu
  storage @c 80 cpu
  storage @d 80 cpu
  storage @y 8 cpu
  storage @g 8 cpu
  storage @h 8 cpu
  input %x: float32[2]{1} @x input "0"
  input %w: float32[2]{1} @w parameter "w" requires_grad
  input %t: float32[2]{1} @t tangent "0"
forward:
  r = mask(%x) -> %r: float32[20]{1} @r traits(random)
  a = op(%r, %w) -> %a: float32[20]{1} @a
  c = op(%a) -> %c: float32[20]{1} @c
  d = op(%c) -> %d: float32[20]{1} @d
  y = op(%d) -> %y: float32[2]{1} @y
backward:
  g = op(%t, %c) -> %g: float32[2]{1} @g
  h = op(%g, %a) -> %h: float32[2]{1} @h
  output %y "0"
  gradient %h "parameter:w"
}
"""


def test_a_choice_that_runs_something_between_forward_and_the_loss_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mask stays until the last operation of forward, and what is made of it is there at the loss."""
    graph = parse_graph(MASKED)
    costs = Costs(dict.fromkeys(graph.nodes, 1.0), dict.fromkeys(graph.nodes, 0), "analytic:test")
    problem = CheckpointProblem(graph, costs)
    mask, made = (next(s for s in problem.producer if s.name == name) for name in "ra")
    resident: Mapping[int, frozenset[Storage]] = {4: frozenset({mask}), 5: frozenset({made})}
    for eager in (True, False):
        with pytest.raises(ValueError, match="r may run only once"):
            problem.repeats_between(resident, eager=eager)
    asked: list[object] = []

    class Relaxation:
        def __init__(self, *args: object, **options: object) -> None:
            asked.append(args[2])

        def solve(self, **options: object) -> Solved:
            return Solved(resident, 0.0, False, True)

    monkeypatch.setattr(search, "Relaxation", Relaxation)
    monkeypatch.setattr(search, "is_small", lambda problem: False)
    candidates = find_candidates(problem)
    budget = problem.keep_all.peak_bytes - 1
    found = search.search(problem, budget, candidates, deadline=time.monotonic() + 20)
    assert found is not None and found.best.peak_bytes <= budget
    assert asked[0] == [5] and len(asked) > 1, "more cuts are asked for"
