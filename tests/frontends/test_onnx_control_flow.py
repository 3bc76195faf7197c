"""Branches, loops, lists and shapes: unrolled where constants decide, else settled in each run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import irc
from irc.frontends.onnx import OnnxModule, from_onnx
from irc.ir.errors import UnsupportedError, UsageError

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Node = onnx.NodeProto


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Node:
    return helper.make_node(op, inputs, outputs, name=f"the_{outputs[0]}", **attributes)


def tensor(name: str, kind: int, shape: tuple[int | str, ...] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def save(
    path: Path,
    nodes: list[Node],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 17,
) -> Path:
    initializers = [numpy_helper.from_array(v, k) for k, v in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, str(path / "m.onnx"))
    return path / "m.onnx"


def agrees(path: Path, module: OnnxModule, *inputs: Tensor) -> list[Tensor]:
    """The outputs, which onnxruntime gives too."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {v.name: x.numpy() for v, x in zip(session.get_inputs(), inputs, strict=True)}
    expected: Any = session.run(None, feed)
    found = module(*inputs)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    for got, want in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-5, atol=1e-6)
    return outputs


W = np.arange(6, dtype=np.float32).reshape(2, 3)


def reshaped(path: Path) -> Path:
    nodes = [node("MatMul", ["x", "w"], ["t"]), node("Reshape", ["t", "shape"], ["y"])]
    inputs = [tensor("x", FLOAT, (4, 2)), tensor("shape", INT, (2,))]
    return save(path, nodes, inputs, [tensor("y", FLOAT, None)], {"w": W})


def test_a_shape_that_is_an_input_is_read_in_each_run(tmp_path: Path) -> None:
    path = reshaped(tmp_path)
    module = from_onnx(path)
    for shape in ((3, 4), (2, -1)):
        (y,) = agrees(path, module, torch.randn(4, 2), torch.tensor(shape))
        y.sum().backward()
        assert module.get_parameter("w").grad is not None


def test_a_plan_wants_such_a_shape_at_import(tmp_path: Path) -> None:
    path = reshaped(tmp_path)
    x, shape = torch.randn(4, 2), torch.tensor([3, 4])
    with pytest.raises(UnsupportedError, match="with a shape that is not a constant") as caught:
        irc.optimize(from_onnx(path), (x, shape), budget="1MiB", costs="analytic")
    assert "the_y" in str(caught.value) and "constants=" in str(caught.value.help)
    module = from_onnx(path, constants={"shape": shape})
    fitted: Any = irc.optimize(module, (x,), budget="1MiB", costs="analytic")
    assert torch.equal(fitted(x), module(x)) and fitted(x).shape == (3, 4)


def branches(condition: str) -> list[Node]:
    def graph(name: str, op: str) -> onnx.GraphProto:
        return helper.make_graph([node(op, ["x", "w"], [name])], name, [], [tensor(name, FLOAT, None)])

    return [
        node("If", [condition], ["t"], then_branch=graph("a", "Add"), else_branch=graph("b", "Mul")),
        node("Tanh", ["t"], ["y"]),
    ]


def test_a_branch_that_an_input_decides(tmp_path: Path) -> None:
    inputs = [tensor("x", FLOAT, (2, 3)), tensor("c", BOOL, ())]
    path = save(tmp_path, branches("c"), inputs, [tensor("y", FLOAT, (2, 3))], {"w": W})
    module = from_onnx(path)
    x = torch.randn(2, 3)
    for choice in (True, False, True):
        (y,) = agrees(path, module, x, torch.tensor(choice))
        assert y.shape == (2, 3)
    with pytest.raises(irc.IrcError) as caught:
        irc.optimize(module, (x, torch.tensor(True)), budget="1MiB", costs="analytic")
    assert "the_t" in str(caught.value) and "depends on 'c'" in caught.value.message
    assert "--constant c=VALUE" in str(caught.value.help)
    taken = from_onnx(path, constants={"c": torch.tensor(False)})
    assert taken.onnx_node_names == ("the_b", "the_y")
    torch.testing.assert_close(taken(x), torch.tanh(x * torch.from_numpy(W)))


def by_rate(path: Path, refused: str) -> Path:
    """`If` on the value of an input; one branch holds an LSTM that is refused, or an unknown operator."""
    lstm = node("LSTM", ["x", "l", "r"], ["o", "h"], hidden_size=3, direction="sideways")
    other = lstm if refused == "LSTM" else node(refused, ["x"], ["o"])

    def graph(name: str, nodes: list[Node], result: str) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [tensor(result, FLOAT, None)])

    taken = graph("sixteen", [node("Mul", ["x", "w"], ["a"])], "a")
    decide = [node("Identity", ["sr"], ["rate"]), node("Equal", ["rate", "sixteen"], ["c"])]
    nodes = [*decide, node("If", ["c"], ["y"], then_branch=taken, else_branch=graph("eight", [other], "o"))]
    inputs = [tensor("x", FLOAT, (5, 2, 3)), tensor("sr", INT, ())]
    arrays = {"w": np.ones(3, np.float32), "sixteen": np.array(16)}
    arrays |= {"l": np.ones((1, 12, 3), np.float32), "r": np.ones((1, 12, 3), np.float32)}
    return save(path, nodes, inputs, [tensor("y", FLOAT, None)], arrays)


@pytest.mark.parametrize("refused", ["LSTM", "Unknown"])
def test_a_refused_branch_names_what_decides_it(refused: str, tmp_path: Path) -> None:
    path = by_rate(tmp_path, refused)
    with pytest.raises(UnsupportedError) as caught:
        from_onnx(path)
    assert "condition 'c', which depends on the input 'sr'" in caught.value.message
    assert refused in caught.value.message and "the_y" in str(caught.value)
    assert "--constant sr=VALUE" in str(caught.value.help)
    module = from_onnx(path, constants={"sr": 16})
    x = torch.randn(5, 2, 3)
    assert module.onnx_node_names == ("the_a",) and torch.equal(module(x), x)


def loop_body(condition: Callable[[str], Node]) -> onnx.GraphProto:
    """`h <- tanh(h * w + i)`, and each `h` is stacked."""
    nodes = [
        node("Cast", ["i"], ["number"], to=FLOAT),
        node("Mul", ["h", "w"], ["product"]),
        node("Add", ["product", "number"], ["sum"]),
        node("Tanh", ["sum"], ["h_out"]),
        node("Identity", ["h_out"], ["each"]),
        condition("go_on"),
    ]
    inputs = [tensor("i", INT, ()), tensor("go", BOOL, ()), tensor("h", FLOAT, (2, 3))]
    outputs = [tensor("go_on", BOOL, ()), tensor("h_out", FLOAT, (2, 3)), tensor("each", FLOAT, (2, 3))]
    return helper.make_graph(nodes, "body", inputs, outputs)


def same_condition(name: str) -> Node:
    return node("Identity", ["go"], [name])


def before_three(name: str) -> Node:
    return node("Less", ["i", "two"], [name])


def loop(path: Path, inputs: list[str], condition: Callable[[str], Node], **weights: Any) -> Path:
    nodes = [node("Loop", inputs, ["y", "all"], body=loop_body(condition))]
    given = [tensor("x", FLOAT, (2, 3))] + (
        [tensor("n", INT, ())] if "n" in inputs and "n" not in weights else []
    )
    outputs = [tensor("y", FLOAT, None), tensor("all", FLOAT, None)]
    arrays = {"w": W, "two": np.array(2), **{k: np.asarray(v) for k, v in weights.items()}}
    return save(path, nodes, given, outputs, arrays)


@pytest.mark.parametrize("count", [-1, 0])
def test_a_loop_of_no_iteration(count: int, tmp_path: Path) -> None:
    """A count below zero is none, as in onnxruntime, and no loop without an end."""
    x = torch.randn(2, 3)
    path = loop(tmp_path, ["n", "", "x"], same_condition, n=count)
    y, _ = agrees(path, from_onnx(path), x)
    assert torch.equal(y, x)
    late = loop(tmp_path, ["n", "", "x"], same_condition)
    agrees(late, from_onnx(late), x, torch.tensor(count))


def test_a_declared_type_that_no_node_makes(tmp_path: Path) -> None:
    path = save(tmp_path, [node("Tanh", ["x"], ["y"])], [tensor("x", FLOAT, (2,))], [tensor("y", INT, (2,))])
    with pytest.raises(UsageError, match=r"IRC305.*float32.*declares torch.int64") as caught:
        from_onnx(path)
    assert "the_y" in str(caught.value)


def test_a_loop_of_constant_count_is_unrolled_and_planned(tmp_path: Path) -> None:
    path = loop(tmp_path, ["n", "", "x"], same_condition, n=5)
    module, x = from_onnx(path), torch.randn(2, 3)
    y, each = agrees(path, module, x)
    assert each.shape == (5, 2, 3) and module.onnx_node_names.count("the_product") == 5
    fitted: Any = irc.optimize(module, (x,), budget="1MiB", costs="analytic")
    for got, want in zip(fitted(x), (y, each), strict=True):
        assert torch.equal(got, want)


def test_a_loop_that_constants_end_early(tmp_path: Path) -> None:
    path = loop(tmp_path, ["", "", "x"], before_three)
    _, each = agrees(path, from_onnx(path), torch.randn(2, 3))
    assert each.shape == (3, 2, 3)


@pytest.mark.parametrize("count", [4, 1, 0])
def test_a_loop_whose_count_is_an_input(tmp_path: Path, count: int) -> None:
    path = loop(tmp_path, ["n", "", "x"], same_condition)
    module, x = from_onnx(path), torch.randn(2, 3, requires_grad=False)
    y, each = agrees(path, module, x, torch.tensor(count))
    assert each.shape == (count, 2, 3)
    if count:
        (y.sum() + each.sum()).backward()
        gradient = module.get_parameter("w").grad
        assert gradient is not None and gradient.abs().sum() > 0


def test_a_loop_that_the_data_end(tmp_path: Path) -> None:
    def small(name: str) -> Node:
        return node("Less", ["total", "bound"], [name])

    body = loop_body(small)
    body.node.insert(5, node("ReduceSum", ["h_out"], ["total"], keepdims=0))
    nodes = [node("Loop", ["most", "", "x"], ["y", "all"], body=body)]
    outputs = [tensor("y", FLOAT, None), tensor("all", FLOAT, None)]
    arrays = {"w": W, "most": np.array(2**62), "bound": np.array(5.0, np.float32)}
    path = save(tmp_path, nodes, [tensor("x", FLOAT, (2, 3))], outputs, arrays)
    _, each = agrees(path, from_onnx(path), torch.zeros(2, 3))
    assert 1 < len(each) < 10


def test_a_loop_that_never_ends(tmp_path: Path) -> None:
    path = loop(tmp_path, ["", "", "x"], same_condition)
    with pytest.raises(UnsupportedError, match="unrolls to more than 100,000 nodes") as caught:
        from_onnx(path)
    assert caught.value.code == "IRC302" and "the_y" in str(caught.value)


def test_a_scan_in_both_directions(tmp_path: Path) -> None:
    nodes = [
        node("Mul", ["h", "w0"], ["p"]),
        node("Add", ["p", "e"], ["h_out"]),
        node("Tanh", ["h_out"], ["o"]),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        [tensor("h", FLOAT, (3,)), tensor("e", FLOAT, (3,))],
        [tensor("h_out", FLOAT, (3,)), tensor("o", FLOAT, (3,))],
    )
    scan = node(
        "Scan",
        ["h0", "x"],
        ["last", "y"],
        body=body,
        num_scan_inputs=1,
        scan_input_directions=[1],
        scan_output_axes=[1],
        scan_output_directions=[1],
    )
    inputs = [tensor("h0", FLOAT, (3,)), tensor("x", FLOAT, (4, 3))]
    outputs = [tensor("last", FLOAT, None), tensor("y", FLOAT, None)]
    path = save(tmp_path, [scan], inputs, outputs, {"w0": W[1]})
    _, y = agrees(path, from_onnx(path), torch.randn(3), torch.randn(4, 3))
    assert y.shape == (3, 4)


def test_a_list_that_a_loop_fills(tmp_path: Path) -> None:
    """Of a constant count it is unrolled; of a count that is an input, it grows in each run."""
    nodes = [node("Identity", ["go"], ["go_on"]), node("SequenceInsert", ["s", "x"], ["s_out"])]
    items = helper.make_tensor_sequence_value_info("s", FLOAT, None)
    body = helper.make_graph(
        nodes,
        "body",
        [tensor("i", INT, ()), tensor("go", BOOL, ()), items],
        [tensor("go_on", BOOL, ()), helper.make_tensor_sequence_value_info("s_out", FLOAT, None)],
    )
    graph = [
        node("SequenceEmpty", [], ["none"]),
        node("Loop", ["n", "", "none"], ["list"], body=body),
        node("ConcatFromSequence", ["list"], ["y"], axis=0),
        node("SequenceLength", ["list"], ["length"]),
    ]
    inputs = [tensor("x", FLOAT, (2, 3)), tensor("n", INT, ())]
    outputs = [tensor("y", FLOAT, None), tensor("length", INT, ())]
    path = save(tmp_path, graph, inputs, outputs)
    x = torch.randn(2, 3)
    y, length = agrees(path, from_onnx(path), x, torch.tensor(3))
    assert y.shape == (6, 3) and length == 3
    module = from_onnx(path, constants={"n": torch.tensor(2)})
    y, length = module(x)
    assert torch.equal(y, torch.cat([x, x])) and length == 2


def test_lists_and_optional_values_come_and_go(tmp_path: Path) -> None:
    items = helper.make_tensor_sequence_value_info("s", FLOAT, None)
    maybe = helper.make_value_info(
        "maybe", helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, (2,)))
    )
    body = helper.make_graph(
        [node("Tanh", ["e"], ["te"])], "body", [tensor("e", FLOAT, None)], [tensor("te", FLOAT, None)]
    )
    nodes = [
        node("SequenceMap", ["s"], ["mapped"], body=body),
        node("SequenceErase", ["mapped", "first"], ["rest"]),
        node("OptionalHasElement", ["maybe"], ["there"]),
    ]
    outputs = [helper.make_tensor_sequence_value_info("rest", FLOAT, None), tensor("there", BOOL, ())]
    path = save(tmp_path, nodes, [items, maybe], outputs, {"first": np.array(0)}, opset=18)
    module = from_onnx(path)
    given = [torch.randn(2), torch.randn(3), torch.randn(1)]
    rest, there = module(given, None)
    assert [torch.equal(a, torch.tanh(b)) for a, b in zip(rest, given[1:], strict=True)] == [True, True]
    assert not there and module(given, torch.randn(2))[1]
    arrays = [x.numpy() for x in given]
    expected: Any = ReferenceEvaluator(str(path)).run(None, {"s": arrays, "maybe": None})
    assert len(expected[0]) == len(rest)


def test_sizes_that_the_data_decide(tmp_path: Path) -> None:
    nodes = [
        node("NonZero", ["x"], ["where"]),
        node("Shape", ["where"], ["shape"]),
        node("Gather", ["shape", "one"], ["count"]),
        node("Transpose", ["where"], ["rows"]),
        node("GatherND", ["x", "rows"], ["picked"]),
        node("ReduceSum", ["picked"], ["total"], keepdims=0),
    ]
    outputs = [tensor("count", INT, ()), tensor("total", FLOAT, ())]
    path = save(tmp_path, nodes, [tensor("x", FLOAT, (2, 3))], outputs, {"one": np.array(1)})
    module = from_onnx(path)
    for x in (torch.eye(3)[:2], torch.ones(2, 3), torch.zeros(2, 3)):
        agrees(path, module, x)
    with pytest.raises(irc.IrcError) as caught:
        irc.optimize(module, (torch.ones(2, 3),), budget="1MiB", costs="analytic")
    assert "the_where" in str(caught.value)
