"""Random problems with tiers: what the tests of copies have in common."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from irc.ir import Tier, parse_program
from irc.passes import Costs, Program
from irc.passes.offload.offload_problem import OffloadProblem
from support.exhaustive import chains, problem_of
from support.strategies import Sample, graphs

__all__ = ["chain", "program_of", "samples", "tiers", "works"]

samples = chains() | graphs()


@st.composite
def tiers(draw: st.DrawFn) -> tuple[Tier, ...]:
    """One or two tiers, from much slower to much faster than computing."""
    rates = st.sampled_from((1.0, 4.0, 2.0**10, 2.0**28, 2.0**40))
    made = [
        Tier(
            name,
            draw(st.sampled_from((1 << 60, 1 << 60, 20, 1 << 31))),
            draw(rates),
            draw(rates),
            draw(st.sampled_from((0.0, 0.0, 0.5))),
            draw(st.booleans()),
        )
        for name in draw(st.sampled_from((["host"], ["host"], ["host", "disk"])))
    ]
    return tuple(made)


@st.composite
def works(draw: st.DrawFn, of: st.SearchStrategy[Sample] = samples) -> OffloadProblem:
    """A problem with a budget between its floor and what keeping all takes.

    Args:
        draw: Given by hypothesis.
        of: The graphs.
    """
    problem = problem_of(draw(of))
    low, high = problem.floor_bytes, problem.keep_all.peak_bytes
    part = draw(st.integers(0, 16))
    return OffloadProblem(problem, draw(tiers()), low + (high - low) * part // 16)


def program_of(sample: Sample, offered: tuple[Tier, ...]) -> Program:
    costs = Costs(sample.seconds, sample.workspace_bytes, "analytic:test")
    return Program(sample.graph, costs, tiers=offered)


def chain(count: int = 6, nbytes: int | Sequence[int] = 600) -> Program:
    """A chain whose backward reads every value; each operation takes a second, forward and back.

    Args:
        count: Of the values.
        nbytes: Of each value, or of all.
    """
    names = [f"v{index}" for index in range(count)]
    sizes = [nbytes] * count if isinstance(nbytes, int) else nbytes
    storages = "".join(f"  storage @{name} {size} cpu\n" for name, size in zip(names, sizes, strict=True))
    forward = "".join(
        f"  f{k} = test.f(%{'w' if not k else names[k - 1]}) -> %{name}: int8[{size}]{{1}} @{name}\n"
        for k, (name, size) in enumerate(zip(names, sizes, strict=True))
    )
    backward = "".join(
        f"  b{k} = test.b({'%t' if k == count - 1 else f'%g{k + 1}'}, %{names[k - 1] if k else 'w'}) "
        f"-> %g{k}: int8[10]{{1}} @g{k}\n"
        for k in reversed(range(count))
    )
    gradients = "".join(f"  storage @g{k} 10 cpu\n" for k in range(count))
    text = f"""
graph loss_bytes=0 {{
  storage @w 10 cpu
  storage @t 10 cpu
{storages}{gradients}  input %w: int8[10]{{1}} @w parameter "w" requires_grad
  input %t: int8[10]{{1}} @t tangent "0"
forward:
{forward}backward:
{backward}  output %{names[-1]} "0"
  gradient %g0 "parameter:w"
}}
schedule {{
  loss
}}
"""
    graph = parse_program(text).graph
    return Program(
        graph, Costs({n: 1.0 for n in graph.operations}, dict.fromkeys(graph.operations, 0), "test")
    )
