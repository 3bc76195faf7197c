from dataclasses import replace

import pytest
from hypothesis import given
from support.strategies import Sample, graphs

from irc.ir import (
    DType,
    Graph,
    Input,
    InputRole,
    Node,
    Output,
    OutputRole,
    Storage,
    TensorType,
    Value,
    VerificationError,
    parse_graph,
    verify_graph,
)

SOUND = """\
graph loss_bytes=0 {
  storage @x 32 cpu
  storage @w 32 cpu
  storage @b 8 cpu
  storage @t 32 cpu
  storage @y 32 cpu
  storage @z 32 cpu
  storage @g 32 cpu
  input %x: float32[2,4]{4,1} @x input "0"
  input %w: float32[8]{1} @w parameter "w" requires_grad
  input %b: float32[2]{1} @b buffer "b"
  input %t: float32[8]{1} @t tangent "0"
forward:
  y = op(%x, %w) -> %y: float32[8]{1} @y loc(source="m.py:1")
  v = view(%y) -> %v: float32[4]{2} @y traits(view) loc(source="m.py:2")
  z = op(%v) -> %z: float32[8]{1} @z loc(source="m.py:3")
  e = write(%b, %z) -> %e: float32[2]{1} @b traits(effect) loc(source="m.py:4")
backward:
  g = op(%t, %z) -> %g: float32[8]{1} @g loc(source="m.py:5")
  output %z "0"
  gradient %g "parameter:w"
  gradient none "input:0"
}
"""


@given(graphs())
def test_random_graphs_are_well_formed(sample: Sample) -> None:
    verify_graph(sample.graph)


def test_the_sound_graph_is_sound() -> None:
    verify_graph(parse_graph(SOUND))


@pytest.mark.parametrize(
    ("old", "new", "code", "line", "message"),
    [
        # A type reaches past the end of its storage, or cannot be understood.
        ("@y 32", "@y 31", "IRC113", 1, "%y reaches 32 B into storage y of 31 B"),
        ("%v: float32[4]{2}", "%v: float32[4]{3}", "IRC113", 2, "%v reaches 40 B into storage y of 32 B"),
        (
            "%x: float32[2,4]{4,1}",
            "%x: float32[2,4]{4,2}",
            "IRC113",
            None,
            "%x reaches 44 B into storage x of 32 B",
        ),
        ("%x: float32[2,4]{4,1}", "%x: float32[2,4]{4}", "IRC113", None, "%x has 2 dimensions and 1 strides"),
        # Forward depends on backward.
        ("z = op(%v)", "z = op(%t)", "IRC114", 3, "forward node z reads %t, which exists only in backward"),
        (
            '  output %z "0"',
            'forward:\n  late = op(%x) loc(source="m.py:6")\n  output %z "0"',
            "IRC114",
            6,
            "forward node late stands after backward node g",
        ),
        # Views and aliases.
        (
            "%v: float32[4]{2} @y",
            "%v: float32[4]{2} @z",
            "IRC115",
            2,
            "view v returns %v in storage z, in which none of its operands lies",
        ),
        (
            "{2} @y traits(view)",
            "{2} @y",
            "IRC116",
            2,
            "v is not a view but returns %v in storage y, which exists already",
        ),
        (
            "%g: float32[8]{1} @g",
            "%g: float32[8]{1} @w",
            "IRC116",
            5,
            "g is not a view but returns %g in storage w, which exists already",
        ),
        (
            "%e: float32[2]{1} @b",
            "%e: float32[2]{1} @z",
            "IRC116",
            4,
            "effect e returns %e in storage z, which exists already and is not the one it writes",
        ),
        # Outputs.
        ('output %z "0"', "", "IRC117", None, "the graph has no output"),
        ('output %z "0"', 'output none "0"', "IRC117", None, "output 0 has no value"),
        ('output %z "0"', 'output %g "0"', "IRC117", None, "output 0 is %g, which exists only in backward"),
        (
            '"parameter:w"',
            '"parameter:u"',
            "IRC118",
            None,
            "gradient of parameter:u belongs to no input of the graph",
        ),
        (
            '"parameter:w"',
            '"tangent:0"',
            "IRC118",
            None,
            "gradient of tangent:0 belongs to no input of the graph",
        ),
        ('"parameter:w"', '"input:0"', "IRC110", None, "gradient of input:0 is delivered twice"),
        # Effects.
        (
            "write(%b, %z)",
            "write(%z, %b)",
            "IRC119",
            4,
            "effect e does not write a static storage by its first operand",
        ),
        (
            "write(%b, %z)",
            "write(3)",
            "IRC119",
            4,
            "effect e does not write a static storage by its first operand",
        ),
        ("traits(effect)", "traits(effect, view)", "IRC119", 4, "effect e does not write a static storage"),
    ],
)
def test_a_fault_in_the_text_is_named(old: str, new: str, code: str, line: int | None, message: str) -> None:
    assert SOUND.count(old) == 1
    with pytest.raises(VerificationError) as caught:
        verify_graph(parse_graph(SOUND.replace(old, new)))
    assert caught.value.code == code
    assert caught.value.message.startswith(message)
    assert (caught.value.at and caught.value.at.source) == (line and f"m.py:{line}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%x: float32[2,4]{4,1} @x", "%x: float32[2,4]{} @x"),  # Strides are not known.
        ("%v: float32[4]{2} @y", "%v: float32[1000,0]{99,1} @y"),  # Nothing is in it.
        ("%v: float32[4]{2} @y", "%v: float32[1000,8]{0,1} @y"),  # Expanded.
        ("-> %e: float32[2]{1} @b ", ""),
        ('parameter "w" requires_grad', 'parameter "w"'),
    ],
)
def test_what_is_unusual_may_still_be_sound(old: str, new: str) -> None:
    assert SOUND.count(old) == 1
    verify_graph(parse_graph(SOUND.replace(old, new)))


# What the text form cannot say.


def value(name: str, storage: Storage | None = None) -> Value:
    return Value(name, TensorType.contiguous((2,), DType.FLOAT32), storage or Storage(name, 8))


def graph_of(x: Value, *nodes: Node) -> Graph:
    return Graph((Input(x, InputRole.INPUT, "0"),), nodes, (Output(x, OutputRole.OUTPUT, "0"),))


def refused(graph: Graph) -> tuple[str, str]:
    with pytest.raises(VerificationError) as caught:
        verify_graph(graph)
    return caught.value.code, caught.value.message


def test_names_are_unique() -> None:
    x, y = value("x"), value("y")
    assert refused(graph_of(x, Node("a", "op", (x,), ()), Node("a", "op", (x,), ()))) == (
        "IRC110",
        "two nodes are named a",
    )
    assert refused(graph_of(x, Node("a", "op", (x,), (value("x"),)))) == ("IRC110", "two values are named x")
    assert refused(graph_of(x, Node("a", "op", (x,), (value("y", Storage("x", 8)),)))) == (
        "IRC110",
        "two storages are named x",
    )
    verify_graph(graph_of(x, Node("x", "op", (x,), (y,))))


def test_a_value_is_written_before_it_is_read() -> None:
    x, y = value("x"), value("y")
    first, second = Node("a", "op", (x, (y,)), ()), Node("b", "op", (x,), (y,))
    assert refused(graph_of(x, first, second)) == ("IRC111", "%y is read by a before it is written")
    assert refused(graph_of(x, first)) == ("IRC111", "%y is read by a but never written")
    assert refused(graph_of(x, Node("c", "op", (), (), (("key", y),)))) == (
        "IRC111",
        "%y is read by c but never written",
    )


def test_a_value_is_written_once() -> None:
    x, y = value("x"), value("y")
    a, b = Node("a", "op", (x,), (y,)), Node("b", "op", (x,), (y,))
    assert refused(graph_of(x, a, b)) == ("IRC112", "%y is written again by b")
    assert refused(graph_of(x, Node("a", "op", (x,), (x,)))) == ("IRC112", "%x is written again by a")
    twice = Input(x, InputRole.CONSTANT, "1")
    graph = graph_of(x)
    assert refused(replace(graph, inputs=(*graph.inputs, twice))) == ("IRC112", "%x is written again")


def test_outputs_are_written() -> None:
    x, y = value("x"), value("y")
    graph = graph_of(x)
    missing = replace(graph, outputs=(Output(y, OutputRole.OUTPUT, "0"),))
    assert refused(missing) == ("IRC117", "output 0 is %y, which is never written")


# Gradients that are released.

RELEASED = """\
graph loss_bytes=0 reserved_bytes=32 {
  storage @x 32 cpu
  storage @w 32 cpu
  storage @u 32 cpu
  storage @t 32 cpu
  storage @z 32 cpu
  storage @g 32 cpu
  storage @h 32 cpu
  input %x: float32[8]{1} @x input "0"
  input %w: float32[8]{1} @w parameter "w" requires_grad
  input %u: float32[8]{1} @u parameter "u" requires_grad
  input %t: float32[8]{1} @t tangent "0"
forward:
  z = op(%x, %w) -> %z: float32[8]{1} @z loc(source="m.py:1")
backward:
  g = op(%t, %w) -> %g: float32[8]{1} @g loc(source="m.py:2")
  h = op(%t) -> %h: float32[8]{1} @h loc(source="m.py:3")
  r = irc.accumulate_grad(%w, %g) traits(effect) loc(source="m.py:4")
  output %z "0"
  gradient none "parameter:w"
  gradient none "parameter:u"
  gradient none "input:0"
}
"""
APPLIED = RELEASED.replace("reserved_bytes=32", "reserved_bytes=40").replace(
    "accumulate_grad(%w, %g)", "apply_gradient(%w, %g, state_bytes=40, workspace_bytes=0, seconds=0.5)"
)


def test_a_gradient_may_be_released() -> None:
    verify_graph(parse_graph(RELEASED))
    verify_graph(parse_graph(APPLIED))


def test_a_tied_parameter_is_released_once_for_all_its_names() -> None:
    tied = RELEASED.replace("%u: float32[8]{1} @u", "%u: float32[8]{1} @w")
    verify_graph(parse_graph(tied))
    for old, new, message in (
        ("  output", SECOND.replace("%w, %h", "%u, %h"), "s releases the gradient of %u again"),
        ('none "parameter:u"', '%h "parameter:u"', "r releases the gradient of %w, which is delivered"),
    ):
        with pytest.raises(VerificationError) as caught:
            verify_graph(parse_graph(tied.replace(old, new)))
        assert (caught.value.code, caught.value.message) == ("IRC133", message)


SECOND = '  s = irc.accumulate_grad(%w, %h) traits(effect) loc(source="m.py:5")\n  output'


@pytest.mark.parametrize(
    ("old", "new", "code", "message"),
    [
        ("traits(effect) ", "", "IRC133", "r is not an effect of backward without results"),
        (
            "traits(effect) ",
            "-> %r: float32[2]{1} @w traits(effect) ",
            "IRC133",
            "r is not an effect of backward without results",
        ),
        ("(%w, %g)", "(%w)", "IRC133", "r does not take a parameter that requires a gradient"),
        ("(%w, %g)", "(%x, %g)", "IRC133", "r does not take a parameter that requires a gradient"),
        (
            '"w" requires_grad',
            '"w"',
            "IRC133",
            "r does not take a parameter that requires a gradient, and its gradient",
        ),
        ("%g: float32[8]{1}", "%g: float32[4]{1}", "IRC133", "r takes %g as the gradient of %w"),
        ("%g: float32[8]{1}", "%g: int32[8]{1}", "IRC133", "r takes %g as the gradient of %w"),
        ("(%w, %g)", "(%w, %t)", "IRC133", "r releases %t, whose storage somebody else holds"),
        ("(%w, %g)", "(%w, %u)", "IRC133", "r releases %u, whose storage somebody else holds"),
        ('none "input:0"', '%g "input:0"', "IRC133", "r releases %g, whose storage somebody else holds"),
        (
            'none "parameter:w"',
            '%h "parameter:w"',
            "IRC133",
            "r releases the gradient of %w, which is delivered",
        ),
        ("  output", SECOND, "IRC133", "s releases the gradient of %w again"),
        ("  output", SECOND.replace("%w, %h", "%u, %g"), "IRC133", "s releases %g, whose storage"),
        (
            "  output",
            SECOND.replace("accumulate_grad(%w", "apply_gradient(%u"),
            "IRC133",
            "s releases its gradient in another way than the nodes before it",
        ),
        ("bytes=32 {", "bytes=31 {", "IRC133", "31 B are reserved, and what is released takes 32 B"),
        (
            "  r = irc.accumulate_grad",
            "  r = op",
            "IRC133",
            "32 B are reserved, and what is",
        ),
    ],
)
def test_a_gradient_that_is_released_wrongly_is_named(old: str, new: str, code: str, message: str) -> None:
    assert RELEASED.count(old) == 1
    with pytest.raises(VerificationError) as caught:
        verify_graph(parse_graph(RELEASED.replace(old, new)))
    assert caught.value.code == code and caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "code", "message"),
    [
        ("state_bytes=40, ", "", "IRC133", "r has state_bytes=None"),
        ("workspace_bytes=0", "workspace_bytes=-1", "IRC133", "r has workspace_bytes=-1"),
        ("workspace_bytes=0", "workspace_bytes=0.5", "IRC133", "r has workspace_bytes=0.5"),
        ("seconds=0.5", 'seconds="soon"', "IRC133", "r has seconds='soon'"),
        ("  output", "  late = op(%w)\n  output", "IRC134", "late reads %w, which r has updated before"),
        (
            "  output",
            "  v = view(%w) -> %v: float32[4]{1} @w traits(view)\n  late = op(%v)\n  output",
            "IRC134",
            "late reads %v, which r has updated before",
        ),
        ('none "input:0"', '%w "input:0"', "IRC134", "gradient of input:0 reads %w, which r has updated"),
    ],
)
def test_a_gradient_that_is_applied_wrongly_is_named(old: str, new: str, code: str, message: str) -> None:
    assert APPLIED.count(old) == 1
    with pytest.raises(VerificationError) as caught:
        verify_graph(parse_graph(APPLIED.replace(old, new)))
    assert caught.value.code == code and caught.value.message.startswith(message)


# Sparse gradients.

SPARSE = """\
graph loss_bytes=0 {
  storage @i 24 cpu
  storage @w 80 cpu
  storage @t 48 cpu
  storage @z 48 cpu
  storage @g 48 cpu
  input %i: int64[3]{1} @i input "0"
  input %w: float32[5,4]{4,1} @w parameter "w" requires_grad
  input %t: float32[3,4]{4,1} @t tangent "0"
forward:
  z = op(%i, %w) -> %z: float32[3,4]{4,1} @z
backward:
  n = view(%i) -> %n: int64[1,3]{3,1} @i traits(view)
  g = op(%t) -> %g: float32[3,4]{4,1} @g
  output %z "0"
  gradient %n "parameter:w" part "indices"
  gradient %g "parameter:w" part "values"
}
"""


def test_the_parts_of_a_sparse_gradient_are_sound() -> None:
    graph = parse_graph(SPARSE)
    verify_graph(graph)
    assert graph.sparse_gradients == ("parameter:w",)
    verify_graph(parse_graph(SPARSE.replace('"values"', '"strided values"')))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('  gradient %n "parameter:w" part "indices"\n', ""),
        ('  gradient %g "parameter:w" part "values"\n', ""),
        ('part "values"', 'part "others"'),
        ('gradient %g "parameter:w" part "values"', 'gradient none "parameter:w" part "values"'),
        ('  gradient %n "parameter:w"', '  gradient %g "parameter:w"\n  gradient %n "parameter:w"'),
        ("float32[5,4]{4,1} @w", "float32[4,5]{5,1} @w"),
        ("float32[5,4]{4,1} @w", "int32[5,4]{4,1} @w"),
        ("int64[1,3]{3,1}", "int32[1,3]{3,1}"),
        ("int64[1,3]{3,1}", "int64[3]{1}"),
        ("int64[1,3]{3,1}", "int64[3,1]{1,1}"),
    ],
)
def test_parts_that_make_no_gradient_are_refused(old: str, new: str) -> None:
    assert SPARSE.count(old) == 1
    assert refused(parse_graph(SPARSE.replace(old, new))) == (
        "IRC118",
        "gradient of parameter:w is not made of indices and values that fit it",
    )


def test_an_output_has_no_parts() -> None:
    for other in ('output %z "0" part "values"', 'output %z "0"\n  output %z "0" part "values"'):
        graph = parse_graph(SPARSE.replace('output %z "0"', other))
        assert refused(graph) == ("IRC118", "values of the output 0 is none of a gradient")


def test_no_other_forward_is_in_flight_beside_a_sparse_gradient() -> None:
    code, message = refused(replace(parse_graph(SPARSE), forwards_in_flight=2))
    assert code == "IRC566" and "sparse gradients grow" in message
