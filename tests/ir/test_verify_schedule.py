from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.strategies import Sample, graphs

import irc.ir.verify.schedule
from irc.ir import (
    Compute,
    Free,
    Graph,
    Instruction,
    Loss,
    Node,
    Region,
    Schedule,
    Storage,
    Timeline,
    VerificationError,
    liveness,
    parse_program,
    verify_schedule,
    with_frees,
)


def keep_all(graph: Graph) -> Schedule:
    """The order of the graph: nothing is recomputed."""
    forward = [node for node in graph.operations if node.region is Region.FORWARD]
    return with_frees(graph, forward, graph.operations[len(forward) :])


def on_demand(graph: Graph, kept: frozenset[Storage], forgets: Callable[[], bool]) -> Schedule:
    """Backward in the order of the graph, each storage that is not kept recomputed where it is needed.

    Args:
        graph: A training graph.
        kept: Storages held from forward to backward, beyond those that cannot be recomputed.
        forgets: Asked at each backward node: whether what was recomputed up to here is given up.
    """
    producers = graph.producers
    held = graph.static_storages | graph.output_storages | graph.tangent_storages | kept
    held |= {storage for storage, node in producers.items() if not node.is_recomputable}
    available = set(held)
    order: list[Node] = []

    def run(node: Node) -> None:
        for storage in graph.reads(node):
            if storage not in available:
                run(producers[storage])
        order.append(node)
        available.update(graph.allocates(node))

    forward = [node for node in graph.operations if node.region is Region.FORWARD]
    backward_storages: set[Storage] = set()
    for node in graph.operations[len(forward) :]:
        if forgets():
            available = {*held, *backward_storages}
        run(node)
        backward_storages.update(graph.allocates(node))
    return with_frees(graph, forward, order)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Sample, Schedule]:
    sample = draw(graphs())
    storages = list(sample.graph.producers)
    kept = frozenset(storage for storage in storages if draw(st.booleans()))
    return sample, on_demand(sample.graph, kept, lambda: draw(st.booleans()))


def edited(schedule: Schedule, instructions: Iterable[Instruction]) -> Schedule:
    return Schedule(schedule.graph, tuple(instructions))


def code_of(schedule: Schedule, sample: Sample) -> str:
    """The code with which a broken schedule is refused."""
    with pytest.raises(VerificationError) as caught:
        verify_schedule(schedule, sample.workspace_bytes)
    assert "instruction" in caught.value.message
    return caught.value.code


def pick(data: st.DataObject, choices: Sequence[int]) -> int:
    assume(choices)
    return data.draw(st.sampled_from(choices))


# ------------------------------------------------------------------------------------- what is accepted


@given(graphs())
def test_keep_all_is_accepted_and_the_peaks_agree(sample: Sample) -> None:
    schedule = keep_all(sample.graph)
    peak_bytes = liveness(schedule, sample.workspace_bytes).peak_bytes
    timeline = verify_schedule(
        schedule, sample.workspace_bytes, budget_bytes=peak_bytes, peak_bytes=peak_bytes
    )
    assert timeline == liveness(schedule, sample.workspace_bytes)
    assert schedule.computed == sample.graph.operations
    delivered = sample.graph.static_storages | sample.graph.tangent_storages | sample.graph.output_storages
    assert timeline.after_bytes[-1] == sum(storage.nbytes for storage in delivered)


@given(schedules())
def test_recomputation_is_accepted_and_the_peaks_agree(drawn: tuple[Sample, Schedule]) -> None:
    sample, schedule = drawn
    timeline = verify_schedule(schedule, sample.workspace_bytes)
    assert timeline == liveness(schedule, sample.workspace_bytes)


@given(schedules(), st.integers(1, 9))
def test_budget_and_claimed_peak_are_exact(drawn: tuple[Sample, Schedule], less: int) -> None:
    sample, schedule = drawn
    peak_bytes = verify_schedule(schedule, sample.workspace_bytes).peak_bytes
    with pytest.raises(VerificationError, match=f"over the budget of {peak_bytes - less} B") as caught:
        verify_schedule(schedule, sample.workspace_bytes, budget_bytes=peak_bytes - less)
    assert caught.value.code == "IRC128"
    with pytest.raises(VerificationError, match=f"not the {peak_bytes + less} B claimed") as caught:
        verify_schedule(schedule, sample.workspace_bytes, peak_bytes=peak_bytes + less)
    assert caught.value.code == "IRC129"


# -------------------------------------------------------------------------------- mutations, all caught


@given(schedules(), st.data())
def test_a_dropped_free_is_caught(drawn: tuple[Sample, Schedule], data: st.DataObject) -> None:
    sample, schedule = drawn
    instructions = schedule.instructions
    index = pick(data, [i for i, item in enumerate(instructions) if isinstance(item, Free)])
    broken = edited(schedule, instructions[:index] + instructions[index + 1 :])
    assert code_of(broken, sample) in ("IRC122", "IRC127")


@given(schedules(), st.data())
def test_a_second_free_is_caught(drawn: tuple[Sample, Schedule], data: st.DataObject) -> None:
    sample, schedule = drawn
    instructions = schedule.instructions
    index = pick(data, [i for i, item in enumerate(instructions) if isinstance(item, Free)])
    broken = edited(schedule, (*instructions[:index], instructions[index], *instructions[index:]))
    assert code_of(broken, sample) == "IRC121"


@given(schedules(), st.data())
def test_a_free_of_what_the_caller_holds_is_caught(
    drawn: tuple[Sample, Schedule], data: st.DataObject
) -> None:
    sample, schedule = drawn
    graph = sample.graph
    held = graph.static_storages | graph.tangent_storages | graph.output_storages
    storage = data.draw(st.sampled_from(sorted(held, key=lambda s: s.name)))
    assert code_of(edited(schedule, (*schedule.instructions, Free(storage))), sample) == "IRC121"


@given(schedules(), st.data())
def test_a_free_moved_before_the_last_read_is_caught(
    drawn: tuple[Sample, Schedule], data: st.DataObject
) -> None:
    sample, schedule = drawn
    instructions = list(schedule.instructions)
    index = pick(data, [i for i, item in enumerate(instructions) if isinstance(item, Free)])
    moved = instructions.pop(index)
    # `with_frees` frees right behind the last reader.
    reader = max(i for i in range(index) if isinstance(instructions[i], Compute))
    instructions.insert(reader, moved)
    assert code_of(edited(schedule, instructions), sample) == "IRC120"


@given(schedules(), st.data())
def test_a_node_moved_before_what_it_reads_is_caught(
    drawn: tuple[Sample, Schedule], data: st.DataObject
) -> None:
    sample, schedule = drawn
    instructions = list(schedule.instructions)
    written: dict[Storage, int] = {}
    moves: list[tuple[int, int]] = []
    for index, item in enumerate(instructions):
        if isinstance(item, Compute):
            moves += [(index, written[s]) for s in sample.graph.reads(item.node) if s in written]
            written.update(dict.fromkeys(item.retained, index))
    assume(moves)
    source, target = data.draw(st.sampled_from(moves))
    instructions.insert(target, instructions.pop(source))
    assert code_of(edited(schedule, instructions), sample) in ("IRC120", "IRC124", "IRC125")


@given(schedules(), st.data())
def test_a_missing_recomputation_is_caught(drawn: tuple[Sample, Schedule], data: st.DataObject) -> None:
    sample, schedule = drawn
    instructions = schedule.instructions
    seen: set[Node] = set()
    again: list[int] = []
    for index, item in enumerate(instructions):
        if isinstance(item, Compute):
            if item.node in seen:
                again.append(index)
            seen.add(item.node)
    index = pick(data, again)
    broken = edited(schedule, instructions[:index] + instructions[index + 1 :])
    assert code_of(broken, sample) in ("IRC120", "IRC121")


@given(schedules(), st.data())
def test_a_second_run_of_what_cannot_be_recomputed_is_caught(
    drawn: tuple[Sample, Schedule], data: st.DataObject
) -> None:
    sample, schedule = drawn
    instructions = schedule.instructions
    once = [
        i
        for i, item in enumerate(instructions)
        if isinstance(item, Compute) and not item.node.is_recomputable
    ]
    index = pick(data, once)
    item = instructions[index]
    assert isinstance(item, Compute)
    again = Compute(item.node, frozenset())
    broken = edited(schedule, (*instructions[: index + 1], again, *instructions[index + 1 :]))
    assert code_of(broken, sample) == "IRC123"


# ------------------------------------------------------------------------------------ each error, in words

SOUND = """\
graph loss_bytes=5 {
  storage @x 32 cpu
  storage @w 32 cpu
  storage @b 8 cpu
  storage @t 32 cpu
  storage @r 32 cpu
  storage @a 32 cpu
  storage @z 32 cpu
  storage @g 32 cpu
  input %x: float32[8]{1} @x input "0"
  input %w: float32[8]{1} @w parameter "w" requires_grad
  input %b: float32[2]{1} @b buffer "b"
  input %t: float32[8]{1} @t tangent "0"
forward:
  r = op(%x) -> %r: float32[8]{1} @r traits(random) loc(source="m.py:1")
  p = op(%b) traits(pinned) loc(source="m.py:2")
  a = op(%r, %w) -> %a: float32[8]{1} @a loc(source="m.py:3")
  v = view(%a) -> %v: float32[4]{1} @a traits(view) loc(source="m.py:4")
  e = write(%b, %v) -> %e: float32[2]{1} @b traits(effect) loc(source="m.py:5")
  z = op(%v, %e) -> %z: float32[8]{1} @z loc(source="m.py:6")
backward:
  g = op(%t, %a) -> %g: float32[8]{1} @g loc(source="m.py:7")
  output %z "0"
  output %e "1"
  gradient %g "parameter:w"
}
schedule {
  compute r keep(@r)
  compute p keep()
  compute a keep(@a)
  compute e keep()
  compute z keep(@z)
  free @a
  loss
  compute a keep(@a)
  free @r
  compute g keep(@g)
  free @a
}
"""


def refused(text: str) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify_schedule(parse_program(text), {})
    return caught.value


def test_the_sound_schedule_is_sound() -> None:
    timeline = verify_schedule(parse_program(SOUND), {}, peak_bytes=200)
    assert timeline == Timeline(
        (104, 104, 136, 136, 168, 168, 173, 200, 200, 200, 200),
        (104, 104, 136, 136, 168, 136, 168, 200, 168, 200, 168),
    )


def test_a_draw_of_forward_runs_before_the_loss() -> None:
    draw = '  s = op() -> %s: float32[8]{1} @s traits(random) loc(source="m.py:8")'
    text = SOUND.replace("  storage @g", "  storage @s 32 cpu\n  storage @g").replace(
        "backward:", f"{draw}\nbackward:"
    )
    late = refused(text.replace("  loss\n", "  loss\n  compute s keep()\n"))
    assert late.code == "IRC124" and "the loss is computed before s runs" in late.message
    verify_schedule(parse_program(text.replace("  loss\n", "  compute s keep()\n  loss\n")), {})


@pytest.mark.parametrize(
    ("old", "new", "code", "line", "message"),
    [
        (
            "compute z keep(@z)\n  free @a",
            "free @a\n  compute z keep(@z)",
            "IRC120",
            6,
            "instruction 5: z reads %v in storage a (32 B), which is not resident",
        ),
        (
            "free @r",
            "free @w",
            "IRC121",
            None,
            "instruction 8: storage w (32 B) is freed, but exists before and after",
        ),
        ("free @r", "free @t", "IRC121", None, "instruction 8: storage t (32 B) is freed, but is a tangent"),
        (
            "free @r",
            "free @z",
            "IRC121",
            6,
            "instruction 8: storage z (32 B) is freed, but is delivered to the caller",
        ),
        (
            "free @r",
            "free @g",
            "IRC121",
            7,
            "instruction 8: storage g (32 B) is freed, but is delivered to the caller",
        ),
        (
            "loss\n",
            "loss\n  free @a\n",
            "IRC121",
            3,
            "instruction 7: storage a (32 B) is freed, but not resident",
        ),
        (
            "keep(@z)",
            "keep(@z, @r)",
            "IRC122",
            6,
            "instruction 4: z retains storage r (32 B), which it does not allocate",
        ),
        (
            "  free @a\n  loss",
            "  loss",
            "IRC122",
            3,
            "instruction 6: a retains storage a (32 B), which is resident already",
        ),
        (
            "  loss",
            "  compute p keep()\n  loss",
            "IRC123",
            2,
            "instruction 6: p must run exactly once (pinned) and runs a",
        ),
        (
            "  loss",
            "  compute r keep()\n  loss",
            "IRC123",
            1,
            "instruction 6: r must run exactly once (random) and runs a",
        ),
        (
            "  compute z",
            "  compute e keep()\n  compute z",
            "IRC123",
            5,
            "instruction 4: e must run exactly once (effect)",
        ),
        (
            "  compute p keep()\n",
            "",
            "IRC124",
            5,
            "instruction 2: effect e runs before p, which reads the old values",
        ),
        (
            "compute e keep()\n  compute z keep(@z)",
            "compute z keep(@z)\n  compute e keep()",
            "IRC124",
            6,
            "instruction 3: z reads what e writes, which has not run yet",
        ),
        (
            "compute p keep()",
            "compute v keep()",
            "IRC125",
            4,
            "instruction 1: v is a view, which no schedule runs",
        ),
        (
            "  compute p keep()",
            "  compute g keep()",
            "IRC125",
            7,
            "instruction 1: backward node g runs before the loss",
        ),
        ("  loss\n", "  loss\n  loss\n", "IRC125", None, "instruction 7: the loss occurs twice"),
        (
            "keep(@z)",
            "keep()",
            "IRC126",
            6,
            "instruction 6: output 0 in storage z (32 B) is not resident at the loss",
        ),
        (
            "keep(@g)",
            "keep()",
            "IRC126",
            7,
            "after the last instruction: gradient of parameter:w in storage g (32 B)",
        ),
        ("  free @r\n", "", "IRC127", 1, "after the last instruction: storage r (32 B) is never freed"),
    ],
)
def test_a_fault_is_named(old: str, new: str, code: str, line: int | None, message: str) -> None:
    assert SOUND.count(old) == 1
    error = refused(SOUND.replace(old, new))
    assert (error.code, error.message[: len(message)]) == (code, message)
    assert (error.at and error.at.source) == (line and f"m.py:{line}")


def test_what_never_runs_is_named() -> None:
    graph, _ = SOUND.split("schedule {")
    assert refused(graph + "schedule {\n}\n").message == "after the last instruction: there is no loss"
    # A random node whose result nobody wants still draws from the generator.
    text = (
        SOUND.replace("op(%r, %w)", "op(%x, %w)")
        .replace("  free @r\n", "")
        .replace("  compute r keep(@r)\n", "")
    )
    text = text.replace("traits(random) ", "traits(pinned) ")
    error = refused(text)
    assert error.code == "IRC123"
    assert error.message == "after the last instruction: r must run exactly once (pinned) and does not run"
    # An output that is the new value of a buffer must be written by then.
    text = SOUND.replace("op(%v, %e)", "op(%v)")
    error = refused(
        text.replace("  compute e keep()\n", "").replace("  compute g", "  compute e keep()\n  compute g")
    )
    assert error.code == "IRC126"
    assert error.message == "instruction 5: output 1 is written by e, which has not run at the loss"


def test_random_nodes_and_effects_keep_their_order() -> None:
    text = SOUND.replace("op(%b) traits(pinned)", "op(%b) traits(random)")
    first, second = "  compute r keep(@r)\n", "  compute p keep()\n"
    error = refused(text.replace(first + second, second + first))
    assert error.code == "IRC124"
    assert error.message == "instruction 0: p runs before r: not the order of the graph"


def test_a_node_of_another_graph_is_refused() -> None:
    schedule, other = parse_program(SOUND), parse_program(SOUND)
    with pytest.raises(VerificationError) as caught:
        verify_schedule(edited(schedule, other.instructions), {})
    assert caught.value.code == "IRC125"
    assert caught.value.message == "instruction 0: r is not a node of the graph"


def test_a_disagreement_with_liveness_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(schedule: Schedule, workspace_bytes: dict[Node, int]) -> Timeline:
        timeline = liveness(schedule, workspace_bytes)
        loss = next(i for i, item in enumerate(schedule.instructions) if isinstance(item, Loss))
        during = list(timeline.during_bytes)
        during[loss] -= schedule.graph.loss_bytes
        return Timeline(tuple(during), timeline.after_bytes)

    monkeypatch.setattr(irc.ir.verify.schedule, "liveness", careless)
    error = refused(SOUND)
    assert error.code == "IRC129"
    assert error.message == (
        "instruction 6: 173 B during, 168 B after by this check; 168 B during, 168 B after by liveness"
    )


APPLIED = """\
graph loss_bytes=0 reserved_bytes=40 {
  storage @x 32 cpu
  storage @w 32 cpu
  storage @t 32 cpu
  storage @a 16 cpu
  storage @z 32 cpu
  storage @h 8 cpu
  storage @g 32 cpu
  input %x: float32[8]{1} @x input "0"
  input %w: float32[8]{1} @w parameter "w" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  a = op(%x, %w) -> %a: float32[4]{1} @a
  z = op(%a) -> %z: float32[8]{1} @z
backward:
  h = op(%t, %a) -> %h: float32[2]{1} @h
  g = op(%t, %h) -> %g: float32[8]{1} @g
  r = irc.apply_gradient(%w, %g, state_bytes=40, workspace_bytes=0, seconds=0.0) traits(effect)
  output %z "0"
  gradient none "parameter:w"
}
schedule {
  compute a keep(@a)
  compute z keep(@z)
  free @a
  loss
  compute a keep(@a)
  compute h keep(@h)
  free @a
  compute g keep(@g)
  free @h
  compute r keep()
  free @g
}
"""


def test_reserved_bytes_are_there_all_along_and_a_released_gradient_dies() -> None:
    timeline = verify_schedule(parse_program(APPLIED), {}, peak_bytes=64 + 40 + 32 + 32 + 16 + 8 + 32 - 16)
    assert timeline.during_bytes[0] == 64 + 40 + 16
    assert timeline.after_bytes[-1] == 64 + 40 + 32 + 32


def test_a_parameter_that_is_read_after_its_gradient_was_applied_is_named() -> None:
    again = "  compute a keep(@a)\n  free @a\n"
    error = refused(APPLIED.replace("  free @g\n", f"  free @g\n{again}"))
    assert error.code == "IRC134"
    assert error.message == "instruction 11: a reads %w, which r has updated"
    error = refused(APPLIED.replace("  compute r keep()\n  free @g\n", "  free @g\n"))
    assert error.code == "IRC123"
    assert error.message == "after the last instruction: r must run exactly once (effect) and does not run"
