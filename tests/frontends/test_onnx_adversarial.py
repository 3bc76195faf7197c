"""Files that are wrong on purpose: one clear error each, in little memory, and nothing else said."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node as n

from irc.__main__ import main
from irc.frontends.onnx import example_inputs, from_onnx
from irc.frontends.onnx.bounds import Account, Bounded
from irc.ir.errors import IrcError, UnsupportedError, UsageError

_MOST_TRACED = 64 << 20
"""Bytes of Python and numpy memory that refusing a small file may take."""


def value(
    name: str, shape: Sequence[int] | None = (2, 3), kind: int = TensorProto.FLOAT
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def stored(name: str, numbers: object, dtype: type = np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(numbers, dtype), name)


def model(
    nodes: list[NodeProto],
    weights: Sequence[TensorProto] = (),
    *,
    x: Sequence[int] = (2, 3),
    inputs: Sequence[onnx.ValueInfoProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    opset: int = 18,
) -> ModelProto:
    graph = helper.make_graph(nodes, "g", [value("x", x), *inputs], [value("y", None)], list(weights))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=9)


def refused(path: Path, proto: ModelProto | bytes, capfd: pytest.CaptureFixture[str]) -> IrcError:
    """The one error, with nothing printed and no memory of the size that the file names."""
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    tracemalloc.start()
    try:
        with pytest.raises(IrcError) as caught:
            from_onnx(path)
        assert tracemalloc.get_traced_memory()[1] < _MOST_TRACED
    finally:
        tracemalloc.stop()
    printed = capfd.readouterr()
    assert not printed.out and not printed.err
    assert caught.value.help and "\n" not in caught.value.message
    return caught.value


def function(name: str, nodes: list[NodeProto]) -> onnx.FunctionProto:
    return helper.make_function(
        "my", name, ["a"], ["b"], nodes, [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    )


def call(name: str, source: str = "a", result: str = "b") -> NodeProto:
    return n(name, [source], [result], domain="my")


_HUGE = 10**9
_TO_FLOAT = [
    n("ReduceSum", ["c"], ["d"], keepdims=0),
    n("Cast", ["d"], ["f"], to=1),
    n("Add", ["x", "f"], ["y"]),
]
_RANGE = [n("Range", ["a", "b", "s"], ["c"]), *_TO_FLOAT]
_SUM = n("ReduceSum", ["c"], ["d"], keepdims=0)
_ADD = n("Add", ["x", "d"], ["y"])
_IMAGE = (1, 3, 8, 8)
_FILTER = stored("w", np.ones((4, 3, 3, 3)), np.float32)

SIZES: dict[str, tuple[ModelProto, str, str]] = {
    "a constant of 10^18 elements": (
        model([n("ConstantOfShape", ["s"], ["c"]), _SUM, _ADD], [stored("s", [_HUGE, _HUGE])]),
        "IRC307",
        "of shape [1000000000, 1000000000]: 4,000,000,000,000,000,000 B, and at most 1,073,741,824 B may",
    ),
    "a constant of 6 GB": (
        model([n("ConstantOfShape", ["s"], ["c"]), _SUM, _ADD], [stored("s", [40000, 40000])]),
        "IRC307",
        "6,400,000,000 B",
    ),
    "a made weight of 16 GB": (
        model(
            [n("ConstantOfShape", ["s"], ["c"]), n("MatMul", ["x", "c"], ["y"])], [stored("s", [3, 2**31])]
        ),
        "IRC307",
        "the weight 'c' makes a constant of shape [3, 2147483648]",
    ),
    "a constant of negative size": (
        model([n("ConstantOfShape", ["s"], ["c"]), _SUM, _ADD], [stored("s", [-3])]),
        "IRC318",
        "negative size",
    ),
    "a product of constants": (
        model(
            [n("ConstantOfShape", [a], [b], value=stored("v", [1])) for a, b in (("s", "p"), ("t", "q"))]
            + [n("MatMul", ["p", "q"], ["c"]), *_TO_FLOAT],
            [stored("s", [10**6, 1]), stored("t", [1, 10**6])],
        ),
        "IRC307",
        "MatMul (opset 18) makes a constant of shape [1000000, 1000000]",
    ),
    "an expanded constant": (
        model(
            [n("Expand", ["k", "s"], ["c"]), _SUM, _ADD],
            [stored("k", 1.0, np.float32), stored("s", [10**12])],
        ),
        "IRC307",
        "Expand (opset 18) makes a constant",
    ),
    "a range of 10^15": (
        model(_RANGE, [stored("a", 0), stored("b", 10**15), stored("s", 1)]),
        "IRC307",
        "Range (opset 18) makes a constant of shape [1000000000000000]",
    ),
    "a range by no step": (
        model(_RANGE, [stored("a", 0), stored("b", 9), stored("s", 0)]),
        "IRC318",
        "division",
    ),
    "a depth of 10^13": (
        model(
            [n("OneHot", ["i", "depth", "v"], ["y"])],
            [stored("i", [1]), stored("depth", 10**13), stored("v", [0, 1], np.float32)],
        ),
        "IRC307",
        "OneHot",
    ),
    "pads of 10^12": (
        model([n("Pad", ["x", "p"], ["y"])], [stored("p", [0, 0, 10**12, 10**3])]),
        "IRC307",
        "a value of shape [1000000000002, 1003]: 4,012,000,000,008,024 B, and at most 1,099,511,627,776 B",
    ),
    "reflected pads of 10^12": (
        model([n("Pad", ["x", "p"], ["y"], mode="reflect")], [stored("p", [0, 0, 10**12, 0])]),
        "IRC307",
        "an axis of 1,000,000,000,002 elements",
    ),
    "resizing to 10^9": (
        model(
            [n("Resize", ["x", "", "", "p"], ["y"], mode="nearest")],
            [stored("p", [1, 1, _HUGE, 3])],
            x=_IMAGE,
        ),
        "IRC307",
        "an axis of 1,000,000,000 elements",
    ),
    **{
        f"a {op} of 3 * 10^8": (
            model([n(op, ["n"], ["c"]), _SUM, _ADD], [stored("n", 3 * 10**8)]),
            "IRC307",
            "an axis of 300,000,000 elements, and at most 33,554,432 can be placed one by one",
        )
        for op in ("HannWindow", "HammingWindow", "BlackmanWindow")
    },
    "a matrix of 100 filters over 10^8": (
        model(
            [n("MelWeightMatrix", ["n", "l", "r", "low", "high"], ["c"]), _SUM, _ADD],
            [
                *(stored(name, number) for name, number in (("n", 100), ("l", 10**8), ("r", 8000))),
                *(stored(name, number, np.float32) for name, number in (("low", 0.0), ("high", 4000.0))),
            ],
        ),
        "IRC307",
        "a table of 50,000,001 x 100 elements",
    ),
    "patches of 10^9": (
        model(
            [n("Col2Im", ["x", "i", "b"], ["y"])],
            [stored("i", [10**5, 10**5]), stored("b", [1, 1])],
            x=(1, 1, 10**10),
        ),
        "IRC307",
        "a table of 2 x 1 x 1 x 100,000 x 100,000 elements",
    ),
    "means of 2 * 10^4 elements each, 10^4 times": (
        model(
            [
                n(
                    "Resize",
                    ["x", "", "", "p"],
                    ["y"],
                    mode="linear",
                    antialias=1,
                    coordinate_transformation_mode="asymmetric",
                )
            ],
            [stored("p", [1, 1, 10**4, 1])],
            x=(1, 1, 10**8, 1),
        ),
        "IRC307",
        "a table of 10,000 x",
    ),
    "an input of 10^27": (
        model([n("Relu", ["x"], ["y"])], x=(_HUGE, _HUGE, _HUGE)),
        "IRC307",
        "the input 'x' of shape [1000000000, 1000000000, 1000000000]",
    ),
    "a list of 10^8": (
        model(
            [n("SplitToSequence", ["x"], ["l"]), n("ConcatFromSequence", ["l"], ["y"], axis=0)], x=(10**8, 3)
        ),
        "IRC307",
        "makes 100,000,000 tensors, and at most 100,000 can be told apart",
    ),
    "10^9 parts": (
        model([n("Split", ["x"], ["y", "z"], num_outputs=_HUGE)]),
        "IRC318",
        "num_outputs=1000000000",
    ),
    "2000 axes": (
        model([n("Reshape", ["x", "s"], ["y"])], [stored("s", [2, 3] + [1] * 2000)]),
        "IRC307",
        "2,002 axes",
    ),
    "2000 axes of an input": (model([n("Relu", ["x"], ["y"])], x=[1] * 2000), "IRC306", "2,000 axes"),
    "axis 10^18": (
        model([n("Softmax", ["x"], ["y"], axis=10**18)]),
        "IRC305",
        "names axis 1000000000000000000",
    ),
    "axis 2 of two": (
        model([n("Concat", ["x", "x"], ["y"], axis=2)]),
        "IRC305",
        "axis 2 of an operand of 2 axes",
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_no_memory_holds(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    proto, code, text = SIZES[name]
    error = refused(tmp_path / "m.onnx", proto, capfd)
    assert error.code == code and text in error.message, str(error)


def test_an_endless_loop_without_nodes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = helper.make_graph(
        [],
        "body",
        [value("i", (), TensorProto.INT64), value("go", (), TensorProto.BOOL), value("a")],
        [value("go", (), TensorProto.BOOL), value("a")],
    )
    loop = n("Loop", ["count", "", "x"], ["y"], body=body)
    error = refused(tmp_path / "m.onnx", model([loop], [stored("count", 2**62)]), capfd)
    assert "unrolls to more than 100,000 nodes" in error.message


def test_operations_of_a_node_are_counted() -> None:
    with (
        Bounded("it", "it", 1 << 30, None),
        pytest.raises(UnsupportedError, match="more than 100,000 operations"),
    ):
        torch.ones(100_001).unbind()


def test_an_example_that_no_machine_holds(tmp_path: Path) -> None:
    proto = model([n("Relu", ["x"], ["y"])], x=(10**11, 2))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(UnsupportedError, match="takes 800,000,000,000 B") as caught:
        example_inputs(from_onnx(tmp_path / "m.onnx"))
    assert caught.value.code == "IRC307"


def test_constants_are_counted_together() -> None:
    account = Account(stored=100 << 20)
    assert account.limit == 1600 << 20
    for _ in range(4):
        account.add("c", [1], 1600 << 20)
    with pytest.raises(
        UnsupportedError, match="the constants that follow from this file come to 6,710,886,401 B"
    ):
        account.add("c", [1], 1)


GRAPHS: dict[str, tuple[ModelProto, str, str]] = {
    "a cycle": (
        model([n("Add", ["x", "b"], ["a"]), n("Relu", ["a"], ["b"]), n("Relu", ["b"], ["y"])]),
        "IRC308",
        "cycle",
    ),
    "a node that reads itself": (model([n("Add", ["x", "y"], ["y"])]), "IRC308", "cycle"),
    "a value made twice": (
        model([n("Relu", ["x"], ["y"], name="one"), n("Tanh", ["x"], ["y"], name="two")]),
        "IRC308",
        "the nodes 'one' and 'two' both compute a value named 'y'",
    ),
    "two weights of one name": (
        model([n("Add", ["x", "w"], ["y"])], [stored("w", [1.0] * 3, np.float32)] * 2),
        "IRC308",
        "two weights named 'w'",
    ),
    "two inputs of one name": (model([n("Relu", ["x"], ["y"])], inputs=[value("x")]), "IRC308", "two inputs"),
    "a weight that is computed": (
        model([n("Relu", ["x"], ["w"]), n("Add", ["w", "x"], ["y"])], [stored("w", [1.0] * 3, np.float32)]),
        "IRC308",
        "computes a value that is a weight too, named 'w'",
    ),
    "a function of itself": (
        model([call("f", "x", "y")], functions=[function("f", [call("f")])]),
        "IRC308",
        "functions call themselves: f -> f",
    ),
    "functions of each other": (
        model([call("f", "x", "y")], functions=[function("f", [call("g")]), function("g", [call("f")])]),
        "IRC308",
        "functions call themselves: f -> g -> f",
    ),
    "functions that double 40 times": (
        model(
            [call("f39", "x", "y")],
            functions=[function("f0", [n("Relu", ["a"], ["b"])])]
            + [
                function(f"f{i}", [call(f"f{i - 1}", "a", "c"), call(f"f{i - 1}", "c")]) for i in range(1, 40)
            ],
        ),
        "IRC307",
        "expands to 262,144 nodes, and irc imports at most 200,000",
    ),
    "a chain of 150 functions": (
        model(
            [call("f0", "x", "y")],
            functions=[function("f150", [n("Relu", ["a"], ["b"])])]
            + [function(f"f{i}", [call(f"f{i + 1}")]) for i in range(150)],
        ),
        "IRC307",
        "more than 100 deep",
    ),
    "two functions of one name": (
        model([call("f", "x", "y")], functions=[function("f", [n("Relu", ["a"], ["b"])])] * 2),
        "IRC308",
        "two functions named 'f'",
    ),
    "a function of another operator set": (
        model([call("f", "x", "y")], functions=[function("f", [n("Relu", ["a"], ["b"])])], opset=11),
        "IRC308",
        "functions cannot be inlined: Opset mismatch",
    ),
    "operator set 0": (model([n("Relu", ["x"], ["y"])], opset=0), "IRC303", "opset 0"),
    "operator set -5": (model([n("Relu", ["x"], ["y"])], opset=-5), "IRC303", "opset -5"),
    "operator set 2^40": (model([n("Relu", ["x"], ["y"])], opset=2**40), "IRC303", "opset 1099511627776"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_contradict_themselves(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    proto, code, text = GRAPHS[name]
    error = refused(tmp_path / "m.onnx", proto, capfd)
    assert error.code == code and text in error.message, str(error)


_EMPTY = helper.make_graph([], "empty", [], [])
_PASS = helper.make_graph([n("Relu", ["a"], ["b"])], "pass", [value("a", (3,))], [value("b", (3,))])

NODES: dict[str, tuple[ModelProto, str, str]] = {
    "text for strides": (
        model([n("Conv", ["x", "w"], ["y"], strides="hello")], [_FILTER], x=_IMAGE),
        "IRC305",
        "has the attribute 'strides' of type STRING; it takes INTS",
    ),
    "a number for text": (
        model([n("Gelu", ["x"], ["y"], approximate=1)], opset=20),
        "IRC305",
        "takes STRING",
    ),
    "an attribute that must be there": (
        model([n("Cast", ["x"], ["y"])]),
        "IRC305",
        "lacks its attribute 'to'",
    ),
    "no operand": (model([n("Relu", [], ["y"])]), "IRC305", "has 0 operands; it takes 1"),
    "three operands": (model([n("Relu", ["x", "x", "x"], ["y"])]), "IRC305", "has 3 operands"),
    "an empty operand": (model([n("Add", ["x", ""], ["y"])]), "IRC305", "lacks its operand 1 (B)"),
    "no result": (model([n("Relu", ["x"], []), n("Relu", ["x"], ["y"])]), "IRC305", "has 0 results"),
    "fractions as indices": (
        model([n("Gather", ["x", "w"], ["y"])], [stored("w", [0.5], np.float32)]),
        "IRC305",
        "has an operand 1 of torch.float32; it takes integers",
    ),
    "numbers as conditions": (
        model([n("Where", ["x", "x", "x"], ["y"])]),
        "IRC305",
        "it takes booleans",
    ),
    "a branch without results": (
        model(
            [n("If", ["w"], ["y"], then_branch=_EMPTY, else_branch=_EMPTY)],
            [stored("w", True, np.bool_)],
        ),
        "IRC305",
        "has 1 results and a branch of 0",
    ),
    "a loop that carries two values": (
        model([n("Loop", ["w", "", "x", "x"], ["y", "z"], body=_EMPTY)], [stored("w", 3)]),
        "IRC305",
        "carries 2 values to 2 results, and its body takes 0 and gives 0: 4 and 3 are needed",
    ),
    "a scan of more than it has": (
        model([n("Scan", ["x"], ["y"], body=_PASS, num_scan_inputs=4)]),
        "IRC305",
        "scans 4 of its 1 operands",
    ),
    "a scan of no body": (
        model([n("Scan", ["x"], ["y"], body=_EMPTY, num_scan_inputs=1)]),
        "IRC305",
        "has 1 operands and 1 results, and its body 0 and 0",
    ),
    "no groups": (model([n("Conv", ["x", "w"], ["y"], group=0)], [_FILTER], x=_IMAGE), "IRC318", "groups"),
    "pads of 10^15": (
        model([n("Conv", ["x", "w"], ["y"], pads=[10**15] * 4)], [_FILTER], x=_IMAGE),
        "IRC318",
        "",
    ),
    "no parts": (model([n("Split", ["x"], ["y", "z"], num_outputs=0)]), "IRC318", "num_outputs=0"),
    "a broken equation": (model([n("Einsum", ["x"], ["y"], equation="((")]), "IRC318", "einsum"),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_that_are_not_as_specified(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    proto, code, text = NODES[name]
    error = refused(tmp_path / "m.onnx", proto, capfd)
    assert error.code == code and text in error.message, str(error)
    assert error.at is not None and error.at.onnx_node


def test_attributes_of_operators_beyond_the_specification(tmp_path: Path) -> None:
    from irc.frontends.onnx.lowerings import Call, NodeInfo

    info = NodeInfo("z", "Odd", "com.acme", 1, {"n": "three", "l": (1.5,)}, (True,))
    odd = Call(info, [], [], [], True, lambda make: make())
    with pytest.raises(UsageError, match="has the attribute n=three; it takes an integer"):
        odd.int_("n", 0)
    with pytest.raises(UsageError, match="it takes a list of integers"):
        odd.ints_("l")
    with pytest.raises(UsageError, match="it takes a number"):
        odd.float_("n", 0.0)
    with pytest.raises(UsageError, match="it takes a string"):
        odd.str_("l", "")
    with pytest.raises(UsageError, match="it takes a list of strings"):
        odd.strs_("l")


# Tensors


def weight(**changes: object) -> TensorProto:
    tensor = stored("w", np.ones((3, 4)), np.float32)
    for name, change in changes.items():
        if name == "dims":
            tensor.dims[:] = change  # pyright: ignore
        else:
            setattr(tensor, name, change)
    return tensor


_TYPED = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3, 4], float_data=[1.0] * 11)
_MATMUL = [n("MatMul", ["x", "w"], ["y"])]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (weight(raw_data=b"\0" * 20), "of shape [3, 4] needs 48 B, and the file has 20"),
        (weight(dims=[_HUGE, _HUGE]), "needs 4,000,000,000,000,000,000 B"),
        (weight(dims=[2**62] * 60), "B, and the file has 48"),
        (weight(dims=[-3, -4]), "sizes are not negative"),
        (weight(dims=[1] * 3000), "3,000 axes"),
        (weight(data_type=99), "of element type 99, which ONNX has not"),
        (weight(data_type=0), "no element type"),
        (weight(data_type=TensorProto.STRING), "needs 12 strings, and the file has 0"),
        (_TYPED, "needs 12 numbers, and the file has 11"),
    ],
)
def test_weights_that_are_not_what_they_declare(
    tensor: TensorProto, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(tmp_path / "m.onnx", model(_MATMUL, [tensor]), capfd)
    assert error.code == "IRC306" and "'w'" in error.message and text in error.message, str(error)
    held = n("Constant", [], ["w"], name="held", value=tensor)
    error = refused(tmp_path / "m.onnx", model([held, *_MATMUL]), capfd)
    assert error.code == "IRC306" and text in error.message, str(error)
    assert error.at is not None and error.at.onnx_node == "held"


def external(location: str, offset: str = "0", length: str = "48") -> TensorProto:
    tensor = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[3, 4], data_location=TensorProto.EXTERNAL
    )
    for key, entry in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=entry)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (external("../outside.bin"), "not in the model's folder"),
        (external("/etc/passwd"), "not in the model's folder"),
        (external("link.bin"), "not in the model's folder"),
        (external("w.bin", "-5"), "at offset -5"),
        (external("w.bin", str(2**63)), "has 100 B of the 9,223,372,036,854,775,856 B needed"),
        (external("w.bin", "0", "8"), "as 8 B; the shape [3, 4] needs 48 B"),
        (external("w.bin", "0", "-48"), "with -48 B: neither can be negative"),
        (external("w.bin", "first"), "not a number"),
        (external("folder"), "which is not a file"),
        (external(""), "not the name of a file"),
        (external("a\0b"), "not the name of a file"),
        (external("none.bin"), "which is missing"),
    ],
)
def test_external_data_that_lie_elsewhere(
    tensor: TensorProto, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "outside.bin").write_bytes(b"\0" * 100)
    (folder / "w.bin").write_bytes(b"\0" * 100)
    os.symlink(tmp_path / "outside.bin", folder / "link.bin")
    error = refused(folder / "m.onnx", model(_MATMUL, [tensor]), capfd)
    assert error.code == "IRC312" and text in error.message, str(error)


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.ones(12, np.float32).tobytes())
    os.symlink(tmp_path / "w.bin", tmp_path / "link.bin")
    (tmp_path / "m.onnx").write_bytes(model(_MATMUL, [external("link.bin")]).SerializeToString())
    assert from_onnx(tmp_path / "m.onnx").get_parameter("w").sum() == 12


def linked(folder: Path, data: str) -> Path:
    """The layout of a cache: the model and its data are links to files that are named by their hashes."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "rev" / "onnx"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_bytes(model(_MATMUL, [external("m.onnx_data")]).SerializeToString())
    for name in ("blobs/5678", "other.bin"):
        (folder / name).write_bytes(np.ones(12, np.float32).tobytes())
    os.symlink("../../../blobs/1234", snapshot / "m.onnx")
    os.symlink(f"../../../{data}", snapshot / "m.onnx_data")
    return snapshot / "m.onnx"


def test_data_are_linked_to_where_the_model_is_linked(tmp_path: Path) -> None:
    assert from_onnx(linked(tmp_path, "blobs/5678")).get_parameter("w").sum() == 12


def test_data_that_are_linked_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"IRC312.*not in the model's folder"):
        from_onnx(linked(tmp_path, "other.bin"))


def test_an_lstm_that_is_quantised_as_it_runs(tmp_path: Path) -> None:
    node = n("DynamicQuantizeLSTM", ["x"], ["y"], name="the_lstm", domain="com.microsoft")
    (tmp_path / "m.onnx").write_bytes(model([node]).SerializeToString())
    with pytest.raises(UnsupportedError, match=r"IRC301.*DynamicQuantizeLSTM") as caught:
        from_onnx(tmp_path / "m.onnx")
    assert "before dynamic quantisation" in str(caught.value.help) and "the_lstm" in str(caught.value)


def test_branches_that_lie_too_deep_to_parse(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def field(number: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    graph = helper.make_graph([n("Relu", ["x"], ["o"])], "g", [], [value("o", None)]).SerializeToString()
    for _ in range(2000):
        branch = field(1, b"then_branch") + field(6, graph) + b"\xa0\x01\x05"
        graph = field(1, field(1, b"c") + field(2, b"o") + field(4, b"If") + field(5, branch))
    GraphProto.FromString(field(2, b"g"))
    data = model([n("Relu", ["x"], ["y"])]).SerializeToString() + field(7, graph)
    assert refused(tmp_path / "m.onnx", data, capfd).code == "IRC311"


# At a run


def test_values_that_a_node_cannot_take(tmp_path: Path) -> None:
    nodes = [n("Gather", ["w", "i"], ["g"], name="look"), n("Add", ["x", "g"], ["y"])]
    table = stored("w", np.ones((4, 3)), np.float32)
    proto = model(nodes, [table], inputs=[value("i", (2,), TensorProto.INT64)])
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    module = from_onnx(tmp_path / "m.onnx")
    module(torch.ones(2, 3), torch.tensor([0, 3]))
    with pytest.raises(RuntimeError, match=r"ai.onnx::Gather .* cannot run on these values") as caught:
        module(torch.ones(2, 3), torch.tensor([0, 4]))
    assert isinstance(caught.value, UsageError) and caught.value.code == "IRC318"
    assert caught.value.at is not None and caught.value.at.onnx_node == "look"


# The command line


@pytest.mark.parametrize("command", [["inspect"], ["optimize", "--budget", "50%"]])
@pytest.mark.parametrize(
    ("name", "status"),
    [("a constant of 10^18 elements", 4), ("a cycle", 2), ("text for strides", 2), ("cut", 2)],
)
def test_the_command_line_says_one_error(
    command: list[str], name: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = {**SIZES, **GRAPHS, **NODES}
    data = cases["a cycle" if name == "cut" else name][0].SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data[:40] if name == "cut" else data)
    assert main([command[0], str(tmp_path / "m.onnx"), *command[1:]]) == status
    printed = capfd.readouterr()
    assert printed.err.count("error[IRC3") == 1 and "Traceback" not in printed.err and not printed.out
