"""What lives in a tier between steps: its text, and each fault that the verifier finds, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from irc.ir import (
    Compute,
    Fetch,
    Free,
    Instruction,
    Loss,
    Offload,
    Schedule,
    Tier,
    UsageError,
    VerificationError,
    Wait,
    liveness,
    parse_graph,
    print_graph,
    print_program,
    stored_bytes,
    verify_graph,
    verify_schedule,
)

DISK = Tier("disk", 100, 1.0, 1.0)

TEXT = """\
graph loss_bytes=0 reserved_bytes=20 {
  storage @x 4 cpu
  storage @w 8 cpu
  storage @v 8 cpu
  storage @t 4 cpu
  storage @m 16 cpu
  storage @y 4 cpu
  storage @g 8 cpu
  input %x: float32[1]{1} @x input "0"
  input %w: float32[2]{1} @w parameter "w" requires_grad
  input %v: float32[2]{1} @v parameter "v"
  input %t: float32[1]{1} @t tangent "0"
  offloaded state %m: uint8[16]{1} @m disk "w"
  offloaded %w disk "w"
forward:
  f = op(%x, %w, %v) -> %y: float32[1]{1} @y
backward:
  b = op(%t, %x) -> %g: float32[2]{1} @g
  apply_w = irc.apply_gradient(%w, %g, state_bytes=20, workspace_bytes=0, seconds=1.0, moving_bytes=16) \
traits(effect)
  output %y "0"
  gradient none "parameter:w"
}
"""

GRAPH = parse_graph(TEXT)
F, B, APPLY = GRAPH.operations
W, M, Y, G = (next(s for s in GRAPH.storages if s.name == name) for name in "wmyg")
(OUTPUT,) = (frozenset((Y,)),)

LINE: tuple[Instruction, ...] = (
    Fetch(W, "disk"),
    Wait(W),
    Compute(F, OUTPUT),
    Loss(),
    Fetch(M, "disk"),
    Compute(B, frozenset((G,))),
    Wait(M),
    Compute(APPLY, frozenset()),
    Free(G),
    Offload(W, "disk"),
    Offload(M, "disk"),
    Wait(W),
    Free(W),
    Wait(M),
    Free(M),
)


def test_the_text_of_offloaded_parameters_is_read_back() -> None:
    assert print_graph(GRAPH) == TEXT
    assert [offloaded.name for offloaded in GRAPH.offloaded_parameters] == [
        "optimizer state of w",
        "parameter w",
    ]
    verify_graph(GRAPH)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('offloaded %w disk "w"', 'offloaded %z disk "w"', "line 14: expected a value written above"),
        ('offloaded %w disk "w"', "offloaded %w disk w", "line 14: expected a string"),
        ('offloaded %w disk "w"', "offloaded %w", "line 14: expected a tier"),
    ],
)
def test_a_mistake_in_the_text_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_graph(TEXT.replace(old, new))
    assert caught.value.code == "IRC101"


def test_what_lives_in_a_tier_takes_memory_while_it_is_there() -> None:
    schedule = Schedule(GRAPH, LINE)
    timeline = verify_schedule(schedule, {}, tiers=[DISK])
    assert GRAPH.static_bytes == 4 + 8 + 20 - 16
    static = GRAPH.static_bytes
    assert timeline.after_bytes == (
        static + 8,  # w
        static + 8,
        static + 8 + 4,  # y
        static + 8 + 4 + 4,  # the tangent
        static + 16 + 16,  # m
        static + 16 + 16 + 8,  # g
        static + 16 + 16 + 8,
        static + 16 + 16 + 8,
        static + 16 + 16,
        static + 16 + 16,
        static + 16 + 16,
        static + 16 + 16,
        static + 8 + 16,
        static + 8 + 16,
        static + 8,
    )
    assert timeline == liveness(schedule, {})
    assert stored_bytes(schedule) == {"disk": (24,) * len(LINE)}
    assert "  fetch @m from disk\n" in print_program(schedule)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda line: line[2:], "IRC120", "f reads %w in storage w .8 B., which is not resident"),
        (lambda line: [i for i in line if i not in (Fetch(M, "disk"), Wait(M))], "IRC120", "apply_w changes"),
        (lambda line: [i for i in line[:6] + line[7:]], "IRC138", "apply_w changes storage m .* arrived"),
        (
            lambda line: [i for i in line if i != Offload(W, "disk")][:-4] + list(line[-3:]),
            "IRC121",
            "storage w .8 B. is freed, and disk does not have its new numbers",
        ),
        (lambda line: [*line[:2], Offload(W, "disk"), *line[2:]], "IRC135", "disk has the same numbers"),
        (
            lambda line: [*line[:10], Offload(W, "disk"), *line[10:]],
            "IRC135",
            "it is being copied to disk already",
        ),
        (lambda line: [*line[:9], Offload(W, "host"), *line[9:]], "IRC135", "it is offloaded to disk"),
        (lambda line: [*line[:2], Fetch(W, "disk"), *line[2:]], "IRC136", "resident already"),
        (lambda line: [Fetch(W, "host"), *line[1:]], "IRC136", "fetched from host, which does not hold it"),
        (lambda line: [*line[:11], Free(W), *line[13:]], "IRC138", "is freed before its copy has ended"),
        (lambda line: line[:-1], "IRC127", "storage m .16 B. is never freed"),
        (
            lambda line: [*line, Fetch(W, "disk"), Wait(W), Compute(F, frozenset()), Free(W)],
            "IRC134",
            "f reads %w, which apply_w has updated",
        ),
    ],
)
def test_a_fault_of_a_schedule_is_found(
    change: Callable[[Sequence[Instruction]], Sequence[Instruction]], code: str, message: str
) -> None:
    with pytest.raises(VerificationError, match=message) as caught:
        verify_schedule(Schedule(GRAPH, tuple(change(LINE))), {}, tiers=[DISK])
    assert caught.value.code == code


def test_what_lives_in_a_tier_has_room_there() -> None:
    for tiers, message in (
        ([Tier("disk", 20, 1.0, 1.0)], "disk would hold 24 B; it takes 20 B"),
        ([], "there is no such tier"),
    ):
        with pytest.raises(VerificationError, match=message) as caught:
            verify_schedule(Schedule(GRAPH, LINE), {}, tiers=tiers)
        assert caught.value.code == "IRC139"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'offloaded %w disk "w"',
            'offloaded %w disk "w"\n  offloaded %w disk "w"',
            "parameter w is offloaded twice",
        ),
        ('offloaded %w disk "w"', 'offloaded %w disk "v"', "the graph has no such parameter"),
        ('offloaded %w disk "w"', 'offloaded %x disk "0"', "shares its memory with something else"),
        ("uint8[16]{1} @m", "uint8[16]{2} @m", "is not one block of memory"),
        ("moving_bytes=16", "moving_bytes=12", "no optimizer has so much of it"),
        ('@m disk "w"', '@m disk "v"', "no optimizer has so much of it"),
        (
            '  input %v: float32[2]{1} @v parameter "v"',
            '  input %v: float32[1]{1} @w buffer "v"',
            "shares its memory with something else",
        ),
        ('output %y "0"', 'output %y "0"\n  output %w "1"', "is delivered to the caller or written"),
    ],
)
def test_a_offloaded_parameter_that_cannot_be_is_found(old: str, new: str, message: str) -> None:
    text = TEXT.replace(old, new)
    if "{2}" in new:
        text = text.replace("storage @m 16", "storage @m 31").replace("moving_bytes=16", "moving_bytes=31")
    assert text != TEXT
    with pytest.raises(VerificationError, match=message) as caught:
        verify_graph(parse_graph(text))
    assert caught.value.code == "IRC140"
