import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import Sample, graphs

from irc.ir import (
    Argument,
    Compute,
    DType,
    Free,
    Gradients,
    Graph,
    Input,
    InputRole,
    Location,
    Loss,
    Node,
    Output,
    OutputRole,
    Region,
    Schedule,
    Storage,
    Symbol,
    TensorType,
    Trait,
    UsageError,
    Value,
    parse_graph,
    parse_program,
    print_graph,
    print_program,
    print_schedule,
    same_graph,
    same_schedule,
    verify_graph,
    with_frees,
)

SPEAKING = """\
graph loss_bytes=4 {
  storage @w 864 cuda:0
  storage @mean 32 cuda:0
  storage @x 1536 cuda:0
  storage @t 4096 cuda:0
  storage @conv 4096 cuda:0
  storage @drop 4096 cuda:0
  storage @mask 1024 cuda:0
  storage @dw 864 cuda:0
  input %w: float32[8,3,3,3]{27,9,3,1} @w parameter "c.weight" requires_grad
  input %mean: float32[8]{1} @mean buffer "bn.running_mean"
  input %x: float32[2,3,8,8]{192,64,8,1} @x input "0"
  input %t: float32[2,8,8,8]{512,64,8,1} @t tangent "0"
forward:
  conv = aten.convolution.default(%x, %w, none, (1, 1), (1, 1), false) -> \
%conv: float32[2,8,8,8]{512,64,8,1} @conv loc(module="c", source="m.py:42")
  "0/Drop out" = aten.native_dropout.default(%conv, 0.5, train=true) -> \
(%drop: float32[2,8,8,8]{512,64,8,1} @drop, \
%mask: bool[2,8,8,8]{512,64,8,1} @mask) traits(random) loc(onnx="0/Drop out")
  flat = aten.view.default(%drop, (2, -1)) -> %flat: float32[2,512]{512,1} @drop traits(view)
  update = aten.copy_.default(%mean, %mean, memory_format=memory_format(preserve)) traits(effect, pinned)
backward:
  dw = aten.conv_dw.default(%t, %x, %mask, (true,), dtype(float32), scale=inf) -> none, \
%dw: float32[8,3,3,3]{27,9,3,1} @dw
  output %drop "0"
  gradient %dw "parameter:c.weight"
  gradient none "input:0"
}
schedule {
  compute conv keep(@conv)
  compute "0/Drop out" keep(@drop, @mask)
  free @conv
  compute update keep()
  loss
  compute dw keep(@dw)
  free @mask
}
"""


RELEASING = """\
graph loss_bytes=0 loss_held_bytes=8 reserved_bytes=96 {
  storage @w 32 cpu
  storage @t 32 cpu
  storage @z 32 cpu
  storage @g 32 cpu
  input %w: float32[8]{1} @w parameter "fc.weight" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  z = aten.neg.default(%w) -> %z: float32[8]{1} @z
backward:
  g = aten.neg.default(%t) -> %g: float32[8]{1} @g
  apply_fc.weight = irc.apply_gradient(%w, %g, state_bytes=96, workspace_bytes=64, seconds=2.5e-06) \
traits(effect)
  output %z "0"
  gradient none "parameter:fc.weight"
}
schedule {
  compute z keep(@z)
  loss
  compute g keep(@g)
  compute apply_fc.weight keep()
  free @g
}
"""


def test_a_program_that_releases_gradients_reads_as_it_stands_here() -> None:
    schedule = parse_program(RELEASING)
    assert print_program(schedule) == RELEASING
    graph = schedule.graph
    assert (graph.loss_held_bytes, graph.reserved_bytes, graph.static_bytes) == (8, 96, 128)
    (node,) = graph.releases
    assert node.releases is graph.gradients is Gradients.APPLIED
    assert node.keywords == (("state_bytes", 96), ("workspace_bytes", 64), ("seconds", 2.5e-06))
    alone = parse_graph(RELEASING.split("schedule")[0].replace(" loss_held_bytes=8", ""))
    assert (alone.loss_held_bytes, alone.reserved_bytes) == (0, 96)
    with pytest.raises(UsageError, match="line 1: expected bytes, found `many`"):
        parse_graph(RELEASING.replace("reserved_bytes=96", "reserved_bytes=many"))


def test_a_program_reads_as_it_stands_here() -> None:
    schedule = parse_program(SPEAKING.replace("forward:", "# A comment.\n\n forward :  # Another."))
    graph = schedule.graph
    assert print_program(schedule) == SPEAKING
    assert print_graph(graph) + print_schedule(schedule) == print_program(schedule)

    conv, dropout, flat, update, dw = graph.nodes
    assert conv.arguments[2:] == (None, (1, 1), (1, 1), False)
    assert conv.at == Location(module="c", source="m.py:42")
    assert (conv.is_sequence, dropout.is_sequence) == (False, True)
    assert dropout.name == "0/Drop out" and dropout.keywords == (("train", True),)
    assert flat.values[0].storage is dropout.values[0].storage
    assert flat.is_view and update.traits == {Trait.EFFECT, Trait.PINNED}
    assert update.keywords == (("memory_format", Symbol("memory_format", "preserve")),)
    assert dw.region is Region.BACKWARD and dw.results[0] is None
    assert dw.arguments[3:] == ((True,), Symbol("dtype", "float32"))
    assert graph.inputs[0] == Input(conv.operands[1], InputRole.PARAMETER, "c.weight", True)
    assert [o.value for o in graph.outputs] == [dropout.values[0], dw.values[0], None]
    assert graph.loss_bytes == 4
    assert conv.values[0].type == TensorType.contiguous((2, 8, 8, 8), DType.FLOAT32, "cuda:0")
    assert schedule.instructions[2] == Free(conv.values[0].storage)
    assert schedule.instructions[3] == Compute(update, frozenset())
    assert schedule.instructions[4] == Loss()
    verify_graph(graph)


# ------------------------------------------------------------------------------------------- round trip


def fields_of(thing: Any) -> Any:
    """Everything that is in a graph or a schedule, as plain data: what two equal ones agree on."""
    match thing:
        case Storage():
            return ("storage", thing.name, thing.nbytes, thing.device)
        case Value():
            kind = thing.type
            type_fields = (kind.shape, kind.dtype, kind.strides, kind.device)
            return ("value", thing.name, type_fields, fields_of(thing.storage))
        case Node():
            keywords = tuple((key, fields_of(argument)) for key, argument in thing.keywords)
            parts = fields_of(thing.arguments), keywords, fields_of(thing.results)
            traits = thing.traits, thing.region, thing.is_sequence
            return ("node", thing.name, thing.op, *parts, *traits, thing.at)
        case Input():
            attributes = thing.requires_grad, thing.part, thing.adds_apart
            return ("input", fields_of(thing.value), thing.role, thing.target, *attributes)
        case Output():
            return ("output", fields_of(thing.value), thing.role, thing.target, thing.part)
        case Graph():
            parts = fields_of(thing.inputs), fields_of(thing.nodes), fields_of(thing.outputs)
            return ("graph", *parts, thing.loss_bytes)
        case Compute():
            return ("compute", fields_of(thing.node), {fields_of(s) for s in thing.retained})
        case Free():
            return ("free", fields_of(thing.storage))
        case Schedule():
            return ("schedule", fields_of(thing.graph), fields_of(thing.instructions))
        case tuple():
            return tuple(fields_of(item) for item in thing)  # pyright: ignore[reportUnknownVariableType]
        case _:
            # `repr` tells 1 from 1.0 and True, 0.0 from -0.0, and finds nan equal to itself.
            return (type(thing).__name__, repr(thing))


def shared(graph: Graph) -> list[int]:
    """For each value and storage met along the graph, where it was met first: its identity structure."""
    met: list[object] = []
    for entry in graph.inputs:
        met += [entry.value, entry.value.storage]
    for node in graph.nodes:
        for value in (*node.operands, *node.values):
            met += [value, value.storage]
    met += [output.value for output in graph.outputs]
    first: dict[object, int] = {}
    return [first.setdefault(thing, index) for index, thing in enumerate(met)]


def assert_reads_back(graph: Graph) -> None:
    text = print_graph(graph)
    again = parse_graph(text)
    assert fields_of(again) == fields_of(graph)
    assert shared(again) == shared(graph)
    assert print_graph(again) == text
    assert same_graph(again, graph)


names = st.one_of(
    st.sampled_from(
        ("", "graph", "none", "storage", "}", "loss", "inf", "nan.x", "a:0", "a:b", "#", '"', "%", "a=b")
    ),
    st.text(max_size=6),
    st.from_regex(r"[a-z_0-9.:/]{1,8}", fullmatch=True),
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.builds(Symbol, st.one_of(st.sampled_from(("dtype", "complex", "none", "inf")), names), names),
)


@given(graphs(max_forward=5))
def test_graphs_read_back_equal(sample: Sample) -> None:
    assert_reads_back(sample.graph)


@given(
    st.lists(st.tuples(names, st.recursive(atoms, lambda a: st.lists(a, max_size=3).map(tuple))), max_size=4)
)
def test_attributes_and_keywords_read_back_equal(items: list[tuple[str, Argument]]) -> None:
    kind = TensorType((), DType.COMPLEX64, (), "meta")
    x, y = (Value(name, kind, Storage(name, 8, "cpu")) for name in ("x", "y"))
    arguments = (*(argument for _, argument in items), (x, (x,), ()))
    node = Node("n", "op", arguments, (y,), (*items, ("last", x)))
    graph = Graph((Input(x, InputRole.INPUT, "0"),), (node,), (Output(y, OutputRole.OUTPUT, "0"),))
    assert_reads_back(graph)


@given(
    st.lists(names, min_size=12, max_size=12, unique=True),
    st.lists(st.none() | names, min_size=3, max_size=3),
    st.frozensets(st.sampled_from(Trait)),
    st.lists(st.sampled_from((0, 1, 2)), max_size=3),
    st.booleans(),
    st.tuples(st.booleans(), names, st.booleans()),
)
def test_odd_names_traits_and_locations_read_back_equal(
    drawn: list[str],
    place: list[str | None],
    traits: frozenset[Trait],
    which: list[int],
    is_sequence: bool,
    attributes: tuple[bool, str, bool],
) -> None:
    kind = TensorType((2, 3), DType.FLOAT16, (-1, 0), drawn[0])
    values = [Value(name, kind, Storage(name, 7, drawn[1])) for name in drawn[2:6]]
    results = (None, values[1], values[2])
    at = Location(*place) if drawn[6] else None
    node = Node(
        drawn[7],
        drawn[8],
        (values[0],),
        tuple(results[i] for i in dict.fromkeys(which)),
        at=at,
        traits=traits,
    )
    node = replace(node, is_sequence=is_sequence, region=Region.BACKWARD)
    after = Node(drawn[9], drawn[8], (), (values[3],), ((drawn[10], values[0]),))
    graph = Graph(
        (Input(values[0], InputRole.CONSTANT, drawn[11], *attributes),),
        (node, after),
        (
            Output(values[3], OutputRole.OUTPUT, drawn[0]),
            Output(None, OutputRole.GRADIENT, drawn[1], drawn[2]),
        ),
        7,
    )
    assert_reads_back(graph)


@given(graphs(max_forward=5))
def test_programs_read_back_equal(sample: Sample) -> None:
    operations = sample.graph.operations
    count = sum(node.region is Region.FORWARD for node in operations)
    schedule = with_frees(sample.graph, operations[:count], operations[count:])
    again = parse_program(print_program(schedule))
    assert fields_of(again) == fields_of(schedule)
    assert same_schedule(again, schedule)
    assert all(node in again.graph.nodes for node in again.computed)
    assert print_schedule(schedule) == print_schedule(again)


def test_floats_keep_their_last_bit() -> None:
    for number in (0.1 + 0.2, 5e-324, 1e16, -0.0, math.pi, 1.7976931348623157e308):
        node = Node("n", "op", (number, complex(-0.0, number)), ())
        again = parse_graph(print_graph(Graph((), (node,), ()))).nodes[0]
        assert repr(again.arguments) == repr(node.arguments)


def test_same_graph_sees_a_difference() -> None:
    graph = parse_program(SPEAKING).graph
    assert same_graph(graph, parse_program(SPEAKING).graph)
    assert not same_graph(graph, replace(graph, loss_bytes=5))
    assert not same_graph(graph, parse_program(SPEAKING.replace("0.5", "0.25")).graph)


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph loss", "grahp loss", "line 1: expected `graph`, found `grahp`"),
        ("=4 {", "=4.5 {", "line 1: expected bytes, found `4.5`"),
        ("@w 864", "864", "line 2: expected a storage such as `@s0`, found `864`"),
        ("@mean 32", "@w 32", "line 3: expected a storage that is not declared yet, found `@w`"),
        ("%mean: float32", "%mean: f32", "line 11: expected an element type (bfloat16, bits16, bits1x8"),
        ("%mean: float32", "%w: float32", "line 11: expected a value that is not written yet, found `%w`"),
        ("@mean buffer", "@nowhere buffer", "line 11: expected a storage declared above, found `@nowhere`"),
        (
            "buffer",
            "bufer",
            "line 11: expected a role (buffer, constant, input, parameter, tangent), found `bufer`",
        ),
        ("forward:", "", "line 15: expected `forward:` or `backward:` above the first node, found `conv`"),
        ("forward:", "foreword:", "line 14: expected a region (backward, forward), found `foreword`"),
        ("(%x, %w", "(%y, %w", "line 15: expected a value written above, found `%y`"),
        ("none, (1, 1)", "none, (1)", "line 15: expected `,` after the only item of a tuple, found `)`"),
        (
            "none, (1, 1)",
            "nome, (1, 1)",
            "line 15: expected an argument (false, inf, nan, none, true), found `nome`",
        ),
        ("false) ->", "false ->", "line 15: expected `)`, found `->`"),
        ("train=true", "train=true, 3", "line 16: expected a keyword and `=`, found `3`"),
        (
            "flat = aten",
            "conv = aten",
            "line 17: expected a node's name that is not in use yet, found `conv`",
        ),
        ("traits(view)", "traits(view", "line 17: expected `)`, found the end of the line"),
        (
            "traits(view)",
            "traits(vieuw)",
            "line 17: expected a trait (effect, exchange, in_place, nondeterministic, overwrites, pinned, "
            "random, reordered, view), found `vieuw`",
        ),
        ('gradient none "input:0"', "gradient none", "line 23: expected a string, found the end of the line"),
        ('gradient none "input:0"', 'gradient none "\\q"', 'line 23: expected a JSON string, found `"\\q"`'),
        (
            '  gradient none "input:0"',
            "  ?",
            "line 23: expected a storage, an annotation, an input, an offloaded parameter, a region, a node, "
            "an output or `}`",
        ),
        ("compute conv", "compute convv", "line 26: expected a node of the graph, found `convv`"),
        (
            "  loss\n",
            "  lost\n",
            "line 30: expected `compute`, `free`, `loss`, `offload`, `fetch`, `wait` or `}`, found `lost`",
        ),
        (
            "free @mask\n}\n",
            "free @mask\n",
            "line 33: expected a statement or `}`, found the end of the text",
        ),
        ("free @mask\n}\n", "free @mask\n}\n\n}", "line 35: expected the end of the text, found `}`"),
        ("0.5", "(" * 99 + ")" * 99, "line 16: expected tuples nested at most 64 deep, found `(`"),
        ("0.5", "complex(" + "9" * 999 + ", 0)", "line 16: expected a number that fits a float"),
    ],
)
def test_a_mistake_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert SPEAKING.count(old) >= 1
    with pytest.raises(UsageError) as caught:
        parse_program(SPEAKING.replace(old, new, 1))
    assert caught.value.code == "IRC101"
    assert caught.value.message.startswith(message)


@given(st.integers(0, len(SPEAKING)), st.integers(0, 6), st.text('()[]{}"%@:=,->#09.ab\n\\é ', max_size=3))
def test_a_damaged_text_is_refused_or_read_and_nothing_else(start: int, length: int, new: str) -> None:
    text = SPEAKING[:start] + new + SPEAKING[start + length :]
    try:
        schedule = parse_program(text)
    except UsageError as error:
        assert error.code == "IRC101" and error.message.startswith("line ")
    else:
        assert same_schedule(parse_program(print_program(schedule)), schedule)


def test_a_text_of_ten_thousand_nodes_is_read_in_linear_time() -> None:
    lines = ["graph loss_bytes=0 {", "storage @s 4 cpu", 'input %v0: float32[]{} @s input "0"', "forward:"]
    lines += [
        f"n{i} = aten.view.default(%v{i}, (1, 2), none) -> %v{i + 1}: float32[]{{}} @s" for i in range(10_000)
    ]
    graph = parse_graph("\n".join([*lines, 'output %v10000 "0"', "}"]))
    assert len(graph.nodes) == 10_000


def test_a_string_without_an_end_is_refused_in_time() -> None:
    """Each of its quotes was tried as a beginning before: this text took half a minute."""
    text = 'graph loss_bytes=0 {\n  annotation keep "' + '\\"' * 60_000 + "\n}\n"
    with pytest.raises(UsageError, match="IRC101"):
        parse_graph(text)
