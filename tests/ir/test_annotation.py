"""Annotations in the graph: their text form, and what the verifiers refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from support.examples import examples
from support.strategies import Sample, graphs, with_annotations

from irc.ir import (
    Annotation,
    Compute,
    Free,
    Graph,
    Instruction,
    Loss,
    Policy,
    Schedule,
    UsageError,
    VerificationError,
    parse_graph,
    parse_program,
    print_graph,
    print_program,
    verify_graph,
    verify_schedule,
    with_frees,
)

PROGRAM = """graph loss_bytes=0 {
  storage @x 8 cpu
  storage @t 8 cpu
  storage @a 8 cpu
  storage @b 8 cpu
  storage @h 8 cpu
  storage @g 8 cpu
  annotation keep "irc.keep(layer1)"
  annotation recompute "CheckpointPolicy.MUST_RECOMPUTE at model.py:7 in f"
  annotation prefer_keep "CheckpointPolicy.PREFER_SAVE at model.py:7 in f"
  input %x: float64[1]{1} @x parameter "w" requires_grad
  input %t: float64[1]{1} @t tangent "0"
forward:
  a = test.op(%x) -> %a: float64[1]{1} @a loc(module="layer1") annotation("irc.keep(layer1)")
  b = test.op(%a) -> %b: float64[1]{1} @b annotation("CheckpointPolicy.MUST_RECOMPUTE at model.py:7 in f")
  h = test.op(%b) -> %h: float64[1]{1} @h annotation("CheckpointPolicy.PREFER_SAVE at model.py:7 in f")
backward:
  gh = test.grad(%t, %b) -> %g: float64[1]{1} @g
  output %h "0"
  gradient %g "parameter:w"
}
schedule {
  compute a keep(@a)
  compute b keep(@b)
  compute h keep(@h)
  free @b
  loss
  compute b keep(@b)
  free @a
  compute gh keep(@g)
  free @b
}
"""


def test_the_text_of_annotations_is_read_back() -> None:
    schedule = parse_program(PROGRAM)
    assert print_program(schedule) == PROGRAM
    verify_graph(schedule.graph)
    verify_schedule(schedule, {})
    assert [annotation.policy for annotation in schedule.graph.annotations] == [
        Policy.KEEP,
        Policy.RECOMPUTE,
        Policy.PREFER_KEEP,
    ]
    a, b, h, gh = schedule.graph.nodes
    assert a.annotation == Annotation(Policy.KEEP, "irc.keep(layer1)") and gh.annotation is None
    assert (a.is_recomputable, b.is_recomputable, h.is_recomputable) == (False, True, True)
    assert (a.is_transient, b.is_transient, h.is_transient) == (False, True, False)
    assert schedule.graph.transient_storages == {b.values[0].storage}


@given(with_annotations(graphs()))
@examples(60)
def test_any_graph_with_annotations_reads_back_what_it_prints(sample: Sample) -> None:
    verify_graph(sample.graph)
    text = print_graph(sample.graph)
    again = parse_graph(text)
    assert print_graph(again) == text
    assert again.annotations == sample.graph.annotations
    assert [node.annotation for node in again.nodes] == [node.annotation for node in sample.graph.nodes]


SAVE = '"CheckpointPolicy.PREFER_SAVE at model.py:7 in f"\n  input'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "annotation keep",
            "annotation hold",
            "line 8: expected a policy (keep, prefer_keep, prefer_recompute, recom",
        ),
        ("annotation prefer_keep", "annotation keep", None),
        (SAVE, '"irc.keep(layer1)"\n  input', "line 10: expected an annotation that is not declared yet"),
        (
            'annotation("irc.keep(layer1)")',
            'annotation("irc.keep(layer2)")',
            "line 14: expected an annotation declared above",
        ),
    ],
)
def test_a_mistake_in_a_annotation_is_named_with_its_line(old: str, new: str, message: str | None) -> None:
    assert PROGRAM.count(old) == 1
    text = PROGRAM.replace(old, new)
    if message is None:
        assert parse_program(text).graph.annotations[2].policy is Policy.KEEP
        return
    with pytest.raises(UsageError, match="IRC101") as caught:
        parse_program(text)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda g: replace(g, annotations=(*g.annotations, Annotation(Policy.KEEP, g.annotations[1].by))),
            "two annotations",
        ),
        (
            lambda g: replace(g, annotations=g.annotations[1:]),
            "a has the annotation irc.keep(layer1), which is not one of",
        ),
        (
            lambda g: replace(g, nodes=(*g.nodes[:3], replace(g.nodes[3], annotation=g.annotations[0]))),
            "gh has the annotation irc.keep(layer1), but is not a forward operation",
        ),
    ],
)
def test_a_annotation_out_of_place_is_refused(change: Callable[[Graph], Graph], message: str) -> None:
    graph = change(parse_program(PROGRAM).graph)
    with pytest.raises(VerificationError, match="IRC550") as caught:
        verify_graph(graph)
    assert caught.value.message.startswith(message)


def names(schedule: Schedule, *order: str) -> Schedule:
    """The schedule that runs these nodes; `|` is the loss."""
    nodes = {node.name: node for node in schedule.graph.nodes}
    split = order.index("|")
    forward, backward = order[:split], order[split + 1 :]
    return with_frees(schedule.graph, [nodes[n] for n in forward], [nodes[n] for n in backward])


def test_what_is_to_be_kept_does_not_run_again() -> None:
    schedule = names(parse_program(PROGRAM), "a", "b", "h", "|", "a", "b", "gh")
    with pytest.raises(VerificationError, match="IRC551") as caught:
        verify_schedule(schedule, {})
    assert "a runs a second time, against irc.keep(layer1)" in caught.value.message
    assert "layer1" in str(caught.value.at)


def test_what_is_transient_does_not_stay_for_backward() -> None:
    schedule = names(parse_program(PROGRAM), "a", "b", "h", "|", "gh")
    with pytest.raises(VerificationError, match="IRC552") as caught:
        verify_schedule(schedule, {})
    assert (
        "storage b (8 B) of b stays for backward, against CheckpointPolicy.MUST_REC" in caught.value.message
    )


@pytest.mark.parametrize("trait", ["random", "pinned", "nondeterministic"])
def test_what_may_run_only_once_may_stay_for_backward(trait: str) -> None:
    graph = parse_program(PROGRAM.replace("@b annotation(", f"@b traits({trait}) annotation(")).graph
    assert not graph.transient_storages
    schedule = names(Schedule(graph, ()), "a", "b", "h", "|", "gh")
    verify_schedule(schedule, {})
    with pytest.raises(VerificationError, match="IRC123"):
        verify_schedule(names(schedule, "a", "b", "h", "|", "b", "gh"), {})


def test_outputs_may_stay_whatever_is_requested() -> None:
    text = PROGRAM.replace('output %h "0"', 'output %h "0"\n  output %b "1"')
    graph = parse_program(text).graph
    assert not graph.transient_storages
    instructions: list[Instruction] = []
    for instruction in parse_program(PROGRAM).instructions:
        if isinstance(instruction, Compute):
            node = next(n for n in graph.nodes if n.name == instruction.node.name)
            retained = frozenset(s for s in graph.allocates(node))
            if all(getattr(i, "node", None) is not node for i in instructions):
                instructions.append(Compute(node, retained))
        elif isinstance(instruction, Loss):
            instructions.append(instruction)
    a = next(s for s in graph.storages if s.name == "a")
    instructions.insert(2, Free(a))
    verify_schedule(Schedule(graph, tuple(instructions)), {})
