"""Each refusal: its code, its line and the help that users will follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irc.frontends.onnx import example_inputs, from_onnx
from irc.ir.errors import IrcError, UnsupportedError, UsageError

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_squeezenet.onnx"


def save(
    path: Path,
    nodes: list[onnx.NodeProto] | None = None,
    inputs: Mapping[str, tuple[int | str | None, ...] | None] | None = None,
    *,
    opset: int = 17,
    elem_type: int = TensorProto.FLOAT,
) -> Path:
    inputs = inputs or {"x": (2, 4)}
    nodes = nodes or [helper.make_node("Relu", [next(iter(inputs))], ["y"], name="first")]
    values = [helper.make_tensor_value_info(n, elem_type, s) for n, s in inputs.items()]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.acme", 3)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", values, out, [weight]), opset_imports=opsets, ir_version=8
    )
    onnx.save(model, str(path / "m.onnx"))
    return path / "m.onnx"


def refused(kind: type[IrcError], code: str, call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert caught.value.code == code and caught.value.help and text.startswith(f"error[{code}]: ")
    assert "\n" not in caught.value.message
    return text


def test_uncovered_operators_are_all_counted_before_anything_runs(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Fancy", ["a"], ["b"], name="fancy_1", domain="com.acme"),
        helper.make_node("Fancy", ["b"], ["c"], domain="com.acme"),
        helper.make_node("Other", ["c"], ["y"], domain="com.acme"),
    ]
    text = refused(UnsupportedError, "IRC301", lambda: from_onnx(save(tmp_path, nodes)))
    assert (
        "the operator com.acme::Fancy (opset 3) is not supported; 2 more: com.acme::Fancy x1, "
        "com.acme::Other x1" in text
    )
    assert "--> ONNX node fancy_1" in text and "operators()" in text


def test_an_option_that_is_not_exact(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"], surprise=1, name="odd")]
    text = refused(UnsupportedError, "IRC302", lambda: from_onnx(save(tmp_path, nodes)))
    assert "ai.onnx::Relu (opset 17) with surprise=1 is not supported" in text and "ONNX node odd" in text


def test_an_operator_set_of_the_future(tmp_path: Path) -> None:
    text = refused(UnsupportedError, "IRC303", lambda: from_onnx(save(tmp_path, opset=99)))
    assert "opset 99" in text and "opset_version=" in text


def test_an_element_type_that_torch_has_not(tmp_path: Path) -> None:
    text = refused(UnsupportedError, "IRC304", lambda: from_onnx(save(tmp_path, elem_type=TensorProto.INT4)))
    assert "'x' has INT4" in text


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "no such file" in refused(UsageError, "IRC310", lambda: from_onnx(tmp_path / "no.onnx"))
    assert "a folder" in refused(UsageError, "IRC310", lambda: from_onnx(tmp_path))


@pytest.mark.parametrize(
    "data", [b"", b"hello, this is no model\n" * 9, bytes(range(256)) * 8, b"\x08\x07", b"\x00" * 64]
)
def test_bytes_that_are_no_model(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(data)
    text = refused(UsageError, "IRC311", lambda: from_onnx(path))
    assert str(path) in text and "onnx.checker" in text


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999])
def test_a_file_that_was_cut_off(tmp_path: Path, share: float) -> None:
    data = LIGHT.read_bytes()
    path = tmp_path / "cut.onnx"
    path.write_bytes(data[: int(len(data) * share)])
    refused(UsageError, "IRC311", lambda: from_onnx(path))


def test_a_node_that_reads_what_nothing_computes(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "ghost"], ["y"], name="sum")]
    text = refused(UsageError, "IRC311", lambda: from_onnx(save(tmp_path, nodes)))
    assert "Add reads 'ghost', which nothing computes" in text and "ONNX node sum" in text


def test_external_weights_that_are_missing_or_short(tmp_path: Path) -> None:
    path = save(tmp_path, [helper.make_node("MatMul", ["x", "w"], ["y"])])
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").write_bytes(b"\0" * 10)
    assert "has 10 B of the 64 B needed" in refused(UsageError, "IRC312", lambda: from_onnx(path))
    (tmp_path / "w.bin").unlink()
    assert "is missing" in refused(UsageError, "IRC312", lambda: from_onnx(path))


def test_an_input_that_the_model_has_not(tmp_path: Path) -> None:
    text = refused(UsageError, "IRC314", lambda: from_onnx(save(tmp_path), inputs={"image": (2, 4)}))
    assert "no input 'image'" in text and "its inputs are 'x'" in text


@pytest.mark.parametrize(
    ("shape", "why"),
    [((2, 4, 1), "3 axes for 2"), ((2, 5), "axis 1 is fixed at 4"), ((2, -1), "not negative")],
)
def test_a_shape_that_contradicts_the_graph(tmp_path: Path, shape: tuple[int, ...], why: str) -> None:
    path = save(tmp_path, inputs={"x": ("N", 4)})
    assert why in refused(UsageError, "IRC315", lambda: from_onnx(path, inputs={"x": shape}))


def test_one_symbol_with_two_sizes(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    path = save(tmp_path, nodes, {"a": ("N", 4), "b": ("N", 4)})
    text = refused(UsageError, "IRC315", lambda: from_onnx(path, inputs={"a": (2, 4), "b": (3, 4)}))
    assert "N is already 2" in text
    assert [s[1] for s in from_onnx(path, inputs={"a": (2, 4)}).input_specs] == [(2, 4), (2, 4)]


def test_a_batch_that_nothing_takes(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    path = save(tmp_path, nodes, {"a": (2, 4), "b": (1, 4)})
    text = refused(UsageError, "IRC316", lambda: from_onnx(path, batch=3))
    assert "no open batch axis to bind to 3: the inputs are 'a' [2, 4], 'b' [1, 4]" in text
    assert from_onnx(save(tmp_path), batch=2).input_specs[0][1] == (2, 4)
    assert "not possible" in refused(UsageError, "IRC316", lambda: from_onnx(save(tmp_path), batch=0))
    path = save(tmp_path, inputs={"x": ("N", 4)})
    text = refused(UsageError, "IRC316", lambda: from_onnx(path, batch=2, inputs={"x": (3, 4)}))
    assert "bound to 3" in text


def test_an_axis_without_a_size(tmp_path: Path) -> None:
    def inputs(*axes: str | int | None, batch: int | None = None) -> Callable[[], object]:
        return lambda: example_inputs(from_onnx(save(tmp_path, inputs={"x": axes}), batch))

    text = refused(UsageError, "IRC317", inputs("N", "T", 4))
    assert "axis 0 (N) of the input 'x' [N, T, 4] has no size" in text
    assert "add --batch N, or bind it with --input x=N,T,4" in text
    text = refused(UsageError, "IRC317", inputs(None, "T", 4, batch=2))
    assert "axis 1 (T)" in text and "help: bind it with --input x=2,T,4" in text
    assert "axis 0 (x_dim_0)" in refused(UsageError, "IRC317", inputs(-1, 4))
    assert "no shape" in refused(UsageError, "IRC317", lambda: from_onnx(save(tmp_path, inputs={"x": None})))


def test_shapes_that_the_nodes_cannot_take(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    path = save(tmp_path, nodes, {"x": ("N", "K")})
    text = refused(UsageError, "IRC318", lambda: from_onnx(path, inputs={"x": (2, 5)}))
    assert "ai.onnx::MatMul (opset 17) cannot take operands of shapes [2, 5], [4, 4]" in text
    assert "ONNX node product" in text
