"""Open axes: a module takes any size there, a plan is made for given ones, and output shapes follow."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

import irc
from irc.frontends.onnx import OnnxModule, from_onnx, output_shapes
from irc.ir.errors import UnsupportedError, UsageError

node = helper.make_node


def save(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    weights: Mapping[str, Any] | None = None,
    *,
    outputs: Sequence[str] = ("y",),
    kinds: Mapping[str, int] | None = None,
) -> Path:
    kinds = kinds or {}
    values = [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), s) for n, s in inputs.items()]
    results = [helper.make_value_info(n, onnx.TypeProto()) for n in outputs]
    stored = [numpy_helper.from_array(np.asarray(w), n) for n, w in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", values, results, stored)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    inferred = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=9))
    path = folder / "m.onnx"
    onnx.save(inferred, str(path))
    return path


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def onnxruntime(path: Path, module: OnnxModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {name: x.numpy() for (name, _, _), x in zip(module.input_specs, inputs, strict=True)}
    return [torch.from_numpy(np.asarray(y)) for y in session.run(None, feed)]


def equal_to_onnxruntime(path: Path, module: OnnxModule, *inputs: Tensor) -> None:
    found = module(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    for mine, theirs in zip(outputs, onnxruntime(path, module, inputs), strict=True):
        assert mine.shape == theirs.shape and mine.dtype is theirs.dtype
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-5, atol=1e-5)


def mean_by_size(folder: Path) -> Path:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Size", ["h"], ["n"]),
        node("Cast", ["n"], ["f"], to=1),
        node("ReduceSum", ["h"], ["s"], keepdims=0),
        node("Div", ["s", "f"], ["y"]),
    ]
    return save(folder, nodes, {"x": ("N", 3)}, {"w": np.ones((3, 2), np.float32)})


def heads(folder: Path) -> Path:
    """A reshape by the shape, with a table read by position."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["b"]),
        node("Gather", ["s", "one"], ["t"]),
        node("Range", ["zero0", "t0", "one0"], ["positions"]),
        node("Squeeze", ["t"], ["t0"]),
        node("Gather", ["table", "positions"], ["p"]),
        node("Add", ["x", "p"], ["h"]),
        node("Concat", ["b", "t", "two", "two"], ["target"], axis=0),
        node("Reshape", ["h", "target"], ["split"]),
        node("Transpose", ["split"], ["y"], perm=[0, 2, 1, 3]),
    ]
    order = [0, 1, 2, 4, 3, *range(5, 10)]
    whole = {"zero": [0], "one": [1], "two": [2], "zero0": 0, "one0": 1}
    weights = {n: np.array(v, np.int64) for n, v in whole.items()}
    weights["table"] = drawn(9, 4).numpy()
    return save(folder, [nodes[i] for i in order], {"x": ("batch", "time", 4)}, weights)


def branch_by_size(folder: Path) -> Path:
    """One row takes a weight of its own."""
    one, more = (
        helper.make_graph(
            [node("Mul", ["x", w], [f"{w}_y"])],
            w,
            [],
            [helper.make_tensor_value_info(f"{w}_y", TensorProto.FLOAT, ["N", 3])],
        )
        for w in ("u", "v")
    )
    nodes = [
        node("Shape", ["x"], ["s"], end=1),
        node("Equal", ["s", "single"], ["c1"]),
        node("Squeeze", ["c1"], ["c"]),
        node("If", ["c"], ["y"], then_branch=one, else_branch=more),
    ]
    weights = {"single": np.array([1]), "u": drawn(3).numpy(), "v": drawn(1, 3).numpy()}
    return save(folder, nodes, {"x": ("N", 3)}, weights)


def loop_by_size(folder: Path) -> Path:
    """As many products as there are rows."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Mul", ["h", "w"], ["out"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, ["N", 3]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("out", TensorProto.FLOAT, ["N", 3]),
        ],
    )
    nodes = [
        node("Shape", ["x"], ["s"], end=1),
        node("Squeeze", ["s"], ["n"]),
        node("Loop", ["n", "", "x"], ["y"], body=body),
    ]
    return save(folder, nodes, {"x": ("N", 3)}, {"w": drawn(3).numpy()})


def scan_by_size(folder: Path) -> Path:
    """A running sum over the rows from the end, of what is scaled by a weight; its steps go along axis 1."""
    body = helper.make_graph(
        [
            node("Mul", ["row", "w"], ["scaled"]),
            node("Add", ["sum", "scaled"], ["next"]),
            node("Identity", ["next"], ["step"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("row", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("step", TensorProto.FLOAT, [3]),
        ],
    )
    options: dict[str, Any] = {
        "scan_input_directions": [1],
        "scan_output_axes": [1],
        "scan_output_directions": [1],
    }
    nodes = [
        node("Scan", ["zero", "x"], ["last", "steps"], body=body, num_scan_inputs=1, **options),
        node("MatMul", ["last", "steps"], ["y"]),
    ]
    weights = {"zero": np.zeros(3, np.float32), "w": drawn(3).numpy()}
    return save(folder, nodes, {"x": ("N", 3)}, weights)


def columns(folder: Path) -> Path:
    """Differences of columns, over the number of rows: constants of one shape and other elements."""
    nodes = [
        node("Gather", ["x", "i"], ["a"], axis=1),
        node("Gather", ["x", "j"], ["b"], axis=1),
        node("Sub", ["a", "b"], ["d"]),
        node("Shape", ["x"], ["s"], end=1),
        node("CastLike", ["s", "x"], ["n"]),
        node("Div", ["d", "n"], ["y"]),
    ]
    return save(folder, nodes, {"x": ("N", 3)}, {"i": np.array([0, 2]), "j": np.array([2, 1])})


FILES = {
    "mean": mean_by_size,
    "branch": branch_by_size,
    "loop": loop_by_size,
    "scan": scan_by_size,
    "columns": columns,
}
SHAPES = [(2, 3), (5, 3), (1, 3)]


@pytest.mark.parametrize("name", FILES)
def test_any_size_runs_as_in_onnxruntime(name: str, tmp_path: Path) -> None:
    path = FILES[name](tmp_path)
    module = from_onnx(path)
    assert module.input_specs == [("x", ("N", 3), torch.float32)]
    for shape in SHAPES:
        equal_to_onnxruntime(path, module, drawn(*shape))


@pytest.mark.parametrize("name", ["mean", "loop", "scan"])
def test_a_module_for_one_size_takes_others(name: str, tmp_path: Path) -> None:
    path = FILES[name](tmp_path)
    for first, other in itertools.permutations(SHAPES, 2):
        module = from_onnx(path, inputs={"x": first})
        equal_to_onnxruntime(path, module, drawn(*other))
        equal_to_onnxruntime(path, module, drawn(*first))
        twin = copy.deepcopy(module)
        equal_to_onnxruntime(path, twin, drawn(*other))


def test_several_symbols(tmp_path: Path) -> None:
    path = heads(tmp_path)
    module = from_onnx(path)
    for shape in ((2, 9, 4), (1, 1, 4), (3, 5, 4)):
        equal_to_onnxruntime(path, module, drawn(*shape))
    assert output_shapes(module) == {"y": ("batch", 2, "time", 2)}
    partly = from_onnx(path, batch=3)
    assert partly.input_specs[0][1] == (3, "time", 4)
    equal_to_onnxruntime(path, partly, drawn(3, 4, 4))
    assert output_shapes(partly) == {"y": (3, 2, "time", 2)}


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_shape_arithmetic_in_any_order_of_sizes(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Random chains that read shapes, for random sizes one after the other, from one module."""
    steps = data.draw(st.lists(st.sampled_from(["double", "rows", "flat", "scale", "ones"]), max_size=5))
    nodes, now = [node("Mul", ["x", "w"], ["h0"])], "h0"
    for k, step in enumerate(steps):
        new = f"h{k + 1}"
        if step == "double":
            nodes.append(node("Concat", [now, now], [new], axis=0))
        elif step == "rows":
            nodes += [
                node("Shape", [now], [f"s{k}"], end=1),
                node("Cast", [f"s{k}"], [f"f{k}"], to=1),
                node("Div", [now, f"f{k}"], [new]),
            ]
        elif step == "flat":
            nodes += [
                node("Size", [now], [f"n{k}"]),
                node("Unsqueeze", [f"n{k}", "first"], [f"u{k}"]),
                node("Concat", [f"u{k}", "single"], [f"t{k}"], axis=0),
                node("Reshape", [now, f"t{k}"], [new]),
            ]
        elif step == "scale":
            nodes += [
                node("ReduceMean", [now], [f"m{k}"], axes=[0], keepdims=1),
                node("Sub", [now, f"m{k}"], [new]),
            ]
        else:
            nodes += [
                node("Shape", [now], [f"s{k}"]),
                node("ConstantOfShape", [f"s{k}"], [f"o{k}"], value=numpy_helper.from_array(np.ones(1, "f"))),
                node("Add", [now, f"o{k}"], [new]),
            ]
        now = new
    nodes.append(node("Identity", [now], ["y"]))
    weights = {"w": drawn(1).numpy(), "first": np.array([0]), "single": np.array([1])}
    path = save(tmp_path_factory.mktemp("chain"), nodes, {"x": ("A", "B")}, weights)
    first = data.draw(st.sampled_from([None, {"x": (2, 3)}]))
    module = from_onnx(path, inputs=first)
    for shape in data.draw(st.lists(st.tuples(*[st.integers(1, 5)] * 2), min_size=1, max_size=4)):
        equal_to_onnxruntime(path, module, drawn(*shape))
        expected = module.shapes_for(dict(zip("AB", shape, strict=True))) if first is None else None
        assert expected is None or expected == (tuple(module(drawn(*shape)).shape),)


def test_constants_of_other_sizes_follow_the_module(tmp_path: Path) -> None:
    module = from_onnx(heads(tmp_path), inputs={"x": (2, 3, 4)}).double()
    module.load_state_dict(module.state_dict())
    assert module(drawn(3, 5, 4).double()).dtype is torch.float64
    mean = from_onnx(mean_by_size(tmp_path), inputs={"x": (2, 3)}).double()
    assert mean(drawn(5, 3).double()).dtype is torch.float64


@pytest.mark.parametrize("name", ["mean", "loop", "scan", "columns"])
@pytest.mark.parametrize("first", [(2, 3), None])
def test_what_a_pickled_module_takes(name: str, first: tuple[int, int] | None, tmp_path: Path) -> None:
    path = FILES[name](tmp_path)
    module = from_onnx(path, inputs=None if first is None else {"x": first})
    again: OnnxModule = pickle.loads(pickle.dumps(module))
    path.rename(tmp_path / "moved.onnx")
    for twin in (again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        for shape in SHAPES:
            equal_to_onnxruntime(tmp_path / "moved.onnx", twin, drawn(*shape))
        wide = twin.double()(drawn(4, 3).double())
        assert wide.dtype is torch.float64
        torch.testing.assert_close(wide.float(), module(drawn(4, 3)), rtol=1e-5, atol=1e-5)


def test_what_a_pickled_module_cannot_take(tmp_path: Path) -> None:
    module = from_onnx(branch_by_size(tmp_path), inputs={"x": (2, 3)})
    again: OnnxModule = pickle.loads(pickle.dumps(module))
    for twin in (again, pickle.loads(pickle.dumps(again))):
        assert torch.equal(twin(drawn(2, 3)), module(drawn(2, 3)))
        with pytest.raises(UnsupportedError, match=r"\[2, 3\].*\[4, 3\].*pickling.*the weight 'u'") as caught:
            twin(drawn(4, 3))
        assert caught.value.code == "IRC324"


@pytest.mark.parametrize("name", ["mean", "loop", "scan"])
def test_a_pickled_module_is_planned_for_other_sizes(name: str, tmp_path: Path) -> None:
    path = FILES[name](tmp_path)
    module = from_onnx(path, inputs={"x": (2, 3)})
    again: OnnxModule = pickle.loads(pickle.dumps(module))
    fitted = irc.optimize(module, (drawn(2, 3),), budget="1MiB", costs="analytic")
    x = drawn(5, 3)
    bound = from_onnx(path, inputs={"x": (5, 3)})
    bound(x).sum().backward()
    for planned in (
        irc.optimize(again, (x,), budget="1MiB", costs="analytic"),
        pickle.loads(pickle.dumps(fitted)),
    ):
        planned(x).sum().backward()
        assert torch.equal(planned(x), bound(x))
        for mine, its in zip(planned.parameters(), bound.parameters(), strict=True):
            assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)


def test_a_plan_of_a_pickled_module_that_needs_the_graph(tmp_path: Path) -> None:
    module: OnnxModule = pickle.loads(pickle.dumps(from_onnx(heads(tmp_path), inputs={"x": (2, 3, 4)})))
    equal_to_onnxruntime(tmp_path / "m.onnx", module, drawn(3, 5, 4))
    with pytest.raises(UnsupportedError, match=r"IRC302.*Range.*is not supported in a plan"):
        irc.optimize(module, (drawn(3, 5, 4),), budget="1MiB", costs="analytic")


def test_a_size_that_needs_another_weight(tmp_path: Path) -> None:
    module = from_onnx(branch_by_size(tmp_path), inputs={"x": (2, 3)})
    assert list(dict(module.named_parameters())) == ["v"]
    module(drawn(4, 3))
    with pytest.raises(UnsupportedError, match="the weight 'u'") as caught:
        module(drawn(1, 3))
    assert caught.value.code == "IRC324"


def test_work_that_only_other_sizes_have(tmp_path: Path) -> None:
    """Padding that this size does not need, and that size does."""
    pool = node("AveragePool", ["x"], ["y"], kernel_shape=[3], strides=[2], auto_pad="SAME_UPPER")
    path = save(tmp_path, [pool], {"x": (1, 2, "L")})
    for first, other in itertools.permutations((5, 6, 9), 2):
        module = from_onnx(path, inputs={"x": (1, 2, first)})
        equal_to_onnxruntime(path, module, drawn(1, 2, other))


def test_a_constant_made_in_a_run_is_of_the_module_s_type(tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("ConstantOfShape", ["s"], ["ones"], value=numpy_helper.from_array(np.ones(1, np.float32))),
        node("Mul", ["x", "w"], ["h"]),
        node("Add", ["h", "ones"], ["y"]),
    ]
    path = save(tmp_path, nodes, {"x": ("N", 3)}, {"w": drawn(3).numpy()})
    for inputs in (None, {"x": (5, 3)}, {"x": (2, 3)}):
        module = from_onnx(path, inputs=inputs)
        assert module.half()(drawn(5, 3).half()).dtype is torch.float16
        assert module.double()(drawn(5, 3).double()).dtype is torch.float64


def test_an_attribute_that_nothing_reads_is_refused_in_a_run(tmp_path: Path) -> None:
    path = save(tmp_path, [node("Softmax", ["x"], ["y"], beta=3.0)], {"x": ("N", 3)})
    with pytest.raises(UnsupportedError, match=r"with beta=3\.0"):
        from_onnx(path, inputs={"x": (2, 3)})
    with pytest.raises(UnsupportedError, match=r"with beta=3\.0"):
        from_onnx(path)(drawn(2, 3))


def test_an_input_of_any_rank_is_bound(tmp_path: Path) -> None:
    path = save(tmp_path, [node("Relu", ["x"], ["y"])], {"x": ("N", 3)})
    model = onnx.load(str(path))
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, str(path))
    equal_to_onnxruntime(path, from_onnx(path, inputs={"x": (2, 3)}), drawn(2, 3))


def test_symbols_that_say_nothing_are_not_one(tmp_path: Path) -> None:
    path = save(tmp_path, [node("Relu", ["x"], ["y"])], {"x": ("None", "None", 3)})
    equal_to_onnxruntime(path, from_onnx(path), drawn(2, 5, 3))


def test_the_file_is_not_read_after_the_import(tmp_path: Path) -> None:
    """A large constant of the branch that the import did not take."""
    then, otherwise = (
        helper.make_graph(
            [node("Gather", [table, "n"], [f"{table}_y"])],
            table,
            [],
            [helper.make_tensor_value_info(f"{table}_y", TensorProto.INT64, None)],
        )
        for table in ("small", "large")
    )
    nodes = [
        node("Shape", ["x"], ["s"], end=1),
        node("Equal", ["s", "single"], ["c1"]),
        node("Squeeze", ["c1"], ["c"]),
        node("Squeeze", ["s"], ["n"]),
        node("If", ["c"], ["i"], then_branch=then, else_branch=otherwise),
        node("Cast", ["i"], ["f"], to=1),
        node("Mul", ["x", "f"], ["y"]),
    ]
    weights = {"single": np.array([1]), "small": np.arange(5), "large": np.arange(1 << 14)}
    path = save(tmp_path, nodes, {"x": ("N",)}, weights)
    module = from_onnx(path, inputs={"x": (1,)})
    expected = drawn(3) * 3
    path.write_bytes(b"another file")
    assert torch.equal(module(drawn(3)), expected)


@pytest.mark.parametrize("strict", [False])
def test_export_with_dynamic_shapes(strict: bool, tmp_path: Path) -> None:
    path = save(tmp_path, [node("MatMul", ["x", "w"], ["y"])], {"x": ("N", 3)}, {"w": drawn(3, 2).numpy()})
    for module in (from_onnx(path), from_onnx(path, batch=5)):
        dims = ({0: torch.export.Dim.DYNAMIC},)
        exported = torch.export.export(module, (drawn(5, 3),), dynamic_shapes=(dims,), strict=strict)
        assert torch.equal(exported.module()(drawn(4, 3)), module(drawn(4, 3)))


def test_many_threads_and_many_sizes(tmp_path: Path) -> None:
    module = from_onnx(mean_by_size(tmp_path), inputs={"x": (2, 3)})
    expected = [module.shapes_for({}) and module(drawn(n, 3)) for n in range(1, 25)]
    fresh = from_onnx(tmp_path / "m.onnx", inputs={"x": (2, 3)})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: fresh(drawn(n, 3)), range(1, 25)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # pyright: ignore


def test_sizes_that_the_file_does_not_take(tmp_path: Path) -> None:
    nodes = [node("Add", ["a", "b"], ["y"])]
    module = from_onnx(save(tmp_path, nodes, {"a": ("N", 4), "b": ("N", 4)}))
    for shapes, why in (
        (((2, 4), (3, 4)), "N is already 2"),
        (((2, 5), (2, 5)), "axis 1 is fixed at 4"),
        (((2, 4, 1), (2, 4)), "3 axes for 2"),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            module(*(drawn(*shape) for shape in shapes))
        assert caught.value.code == "IRC315"


@pytest.mark.parametrize("name", ["mean", "loop", "scan"])
def test_a_plan_for_each_size(name: str, tmp_path: Path) -> None:
    module = from_onnx(FILES[name](tmp_path))
    for shape in ((4, 3), (6, 3)):
        x = drawn(*shape)
        fitted = irc.optimize(module, (x,), budget="100%", costs="analytic")
        for twin in (module, fitted):
            twin.zero_grad()
        fitted(x).sum().backward()
        mine = {n: p.grad for n, p in fitted.named_parameters()}
        module.zero_grad()
        bound = from_onnx(tmp_path / "m.onnx", inputs={"x": shape})
        expected = bound(x)
        expected.sum().backward()
        assert torch.equal(fitted(x), expected) and torch.equal(module(x), expected)
        assert all(torch.equal(mine[n], p.grad) for n, p in bound.named_parameters() if p.grad is not None)  # pyright: ignore


def test_expressions_of_output_shapes(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["half"], strides=[2], pads=[1, 1]),
        node("Shape", ["x"], ["s"]),
        node("ReduceProd", ["s"], ["count"], keepdims=1),
        node("Reshape", ["x", "count"], ["flat"]),
        node("Concat", ["x", "x", "c"], ["joined"], axis=2),
        node("NonZero", ["x"], ["found"]),
        node("Transpose", ["x"], ["turned"], perm=[2, 0, 1]),
    ]
    path = save(
        tmp_path,
        nodes,
        {"x": ("N", 2, "width"), "c": ("N", 2, 3)},
        {"w": drawn(5, 2, 3).numpy()},
        outputs=("half", "flat", "joined", "found", "turned"),
    )
    shapes = output_shapes(from_onnx(path))
    assert shapes == {
        "half": ("N", 5, "floor(width/2 - 1/2) + 1"),
        "flat": ("2*N*width",),
        "joined": ("N", 2, "2*width + 3"),
        "found": None,
        "turned": ("width", "N", 2),
    }
    bound = from_onnx(path, inputs={"x": (3, 2, 7)})
    assert output_shapes(bound)["half"] == (3, 5, 4) and output_shapes(bound)["flat"] == (42,)


def test_an_operator_that_onnxruntime_does_not_infer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is inferred before it counts, and nothing is written into the folder that the user is in."""
    nodes = [
        node("Conv", ["x", "w"], ["half"], strides=[2], pads=[1, 1]),
        node("FusedGemm", ["a", "b"], ["z"], domain="com.microsoft"),
    ]
    weights = {"w": drawn(5, 2, 3).numpy(), "b": drawn(3, 4).numpy()}
    inputs = {"x": ("N", 2, "width"), "a": ("N", 3)}
    path = save(tmp_path, nodes, inputs, weights, outputs=("half", "z"))
    (folder := tmp_path / "current").mkdir()
    monkeypatch.chdir(folder)
    shapes = output_shapes(from_onnx(path))
    assert list(folder.iterdir()) == []
    assert shapes == {"half": ("N", 5, "floor(width/2 - 1/2) + 1"), "z": ("N", 4)}


def test_an_expression_is_no_code(tmp_path: Path) -> None:
    """A file names its symbols as it likes."""
    symbol = "__import__('os').abort()"
    path = save(tmp_path, [node("Concat", ["x", "x"], ["y"], axis=0)], {"x": (symbol, 3)})
    assert output_shapes(from_onnx(path)) == {"y": (f"2*({symbol})", 3)}


def test_bounds_show_at_large_and_at_small_sizes(tmp_path: Path) -> None:
    """A cut at 512, the last 20, and at least 300: what fits one size and its neighbours does not do."""
    nodes = [
        node("Slice", ["x", "zero", "many", "zero"], ["cut"]),
        node("Slice", ["x", "last", "most", "zero"], ["end"]),
        node("Shape", ["x"], ["s"], end=1),
        node("Max", ["s", "least"], ["m"]),
        node("Expand", ["single", "m"], ["grown"]),
    ]
    whole = {"zero": [0], "many": [512], "last": [-20], "most": [2**40], "least": [300]}
    weights: dict[str, Any] = {name: np.array(value) for name, value in whole.items()}
    weights["single"] = np.ones(1, np.float32)
    path = save(tmp_path, nodes, {"x": ("L",)}, weights, outputs=("cut", "end", "grown"))
    shapes = output_shapes(from_onnx(path))
    assert shapes["cut"] in (("?",), ("Min(512, L)",)) and shapes["end"] in (("?",), ("Min(20, L)",))
    assert shapes["grown"] in (("?",), ("Max(300, L)",))


def test_a_list_that_both_branches_and_the_graph_read(tmp_path: Path) -> None:
    then, otherwise = (
        helper.make_graph(
            [node("SequenceAt", ["l", "i"], ["a"]), node(op, ["a"], [op])],
            op,
            [],
            [helper.make_tensor_value_info(op, TensorProto.FLOAT, None)],
        )
        for op in ("Identity", "Neg")
    )
    nodes = [
        node("SequenceConstruct", ["x", "x2"], ["l"]),
        node("If", ["c"], ["z"], then_branch=then, else_branch=otherwise),
        node("SequenceAt", ["l", "i"], ["w"]),
        node("Add", ["z", "w"], ["y"]),
    ]
    inputs = {"x": (2,), "x2": (2,), "i": (), "c": ()}
    path = save(tmp_path, nodes, inputs, kinds={"i": TensorProto.INT64, "c": TensorProto.BOOL})
    module = from_onnx(path)
    for taken in (True, False):
        equal_to_onnxruntime(path, module, drawn(2), drawn(2) + 1, torch.tensor(1), torch.tensor(taken))
