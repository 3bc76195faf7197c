"""Large weights stay in their file until they are asked for, and come out as the parser would give them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from benchmarks.onnx_scale import make_file, measure
from irc.frontends.onnx import from_onnx
from irc.frontends.onnx.lazy_protobuf import parse
from irc.frontends.onnx.reader import read
from irc.ir.errors import IrcError, UsageError

LARGE = 1 << 16


def model(*weights: onnx.TensorProto) -> onnx.ModelProto:
    names = [w.name for w in weights]
    graph = helper.make_graph(
        [helper.make_node("Identity", [names[0]], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N"])],
        [helper.make_value_info("y", onnx.TypeProto())],
        weights,
        doc_string="a graph",
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="p")
    helper.set_model_props(made, {"key": "value"})
    return made


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_read_is_what_the_parser_reads(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("wire") / "m.onnx"
    weights: list[onnx.TensorProto] = []
    for i in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from([np.float32, np.int64, np.float16, np.bool_]))
        count = data.draw(st.sampled_from([0, 3, LARGE // 8, LARGE, LARGE + 7]))
        array = (np.arange(count) % 1000).astype(kind)
        array = array.reshape(-1, 1) if count % 2 else array
        made = numpy_helper.from_array(array, f"w{i}")
        if data.draw(st.booleans()) and kind is np.float32:
            made = helper.make_tensor(f"w{i}", TensorProto.FLOAT, array.shape, array.reshape(-1))
        weights.append(made)
    onnx.save(model(*weights), str(path))
    whole, read_ = ir.from_proto(onnx.load(str(path))), read(path)
    assert list(whole.graph.initializers) == list(read_.graph.initializers)
    in_place = 0
    for name, value in read_.graph.initializers.items():
        expected = whole.graph.initializers[name].const_value
        found = value.const_value
        assert expected is not None and found is not None
        assert found.dtype is expected.dtype and found.shape == expected.shape and found.name == name
        assert np.array_equal(found.numpy(), expected.numpy())
        in_place += isinstance(found, ir.ExternalTensor)
    assert in_place == sum(len(w.raw_data) >= LARGE for w in weights)
    for field in ("producer_name", "ir_version", "doc_string"):
        assert getattr(whole, field) == getattr(read_, field)
    assert whole.metadata_props == read_.metadata_props and whole.graph.doc_string == read_.graph.doc_string


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_spoilt_file_is_read_as_the_parser_reads_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weight = numpy_helper.from_array(np.zeros(LARGE // 4 + 8, np.float32), "w")
    content = bytearray(model(weight).SerializeToString())
    edges = st.one_of(st.integers(0, 120), st.integers(len(content) - 160, len(content) - 1))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(edges)] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("spoilt") / "m.onnx"
    path.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), 200, len(content) - 3]))]))

    def outcome(in_place: bool) -> object:
        try:
            found = read(path, in_place=in_place)
        except IrcError as error:
            return error.code, error.message
        stored = {n: v.const_value for n, v in found.graph.initializers.items()}
        return {n: None if t is None else (t.dtype, t.shape, t.numpy().tobytes()) for n, t in stored.items()}

    assert outcome(True) == outcome(False)


def test_a_constant_without_a_tensor(tmp_path: Path) -> None:
    made = model(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    made.graph.node.insert(0, helper.make_node("Constant", [], ["c"]))
    made.graph.node[0].attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    made.graph.node.append(helper.make_node("Add", ["y", "c"], ["z"]))
    made.graph.output[0].name = "z"
    onnx.save(made, str(tmp_path / "m.onnx"))
    with pytest.raises(IrcError):
        from_onnx(tmp_path / "m.onnx")


def test_a_link_to_a_file(tmp_path: Path) -> None:
    """Stores of downloaded models hold links to files of other names."""
    weight = numpy_helper.from_array(np.arange(LARGE, dtype=np.float32), "w")
    (tmp_path / "store").mkdir()
    onnx.save(model(weight), str(tmp_path / "store" / "0123"))
    os.symlink(tmp_path / "store" / "0123", tmp_path / "m.onnx")
    (parameter,) = from_onnx(tmp_path / "m.onnx").parameters()
    assert np.array_equal(parameter.detach().numpy(), np.arange(LARGE, dtype=np.float32))


def test_no_file_can_name_itself(tmp_path: Path) -> None:
    """What says that a weight is in the file itself is drawn anew each time."""
    weight = numpy_helper.from_array(np.arange(LARGE, dtype=np.float32), "w")
    onnx.save(model(weight), str(tmp_path / "m.onnx"))
    marks = [parse(str(tmp_path / "m.onnx"))[1].mark for _ in range(2)]
    assert marks[0] != marks[1] and all(len(mark) > 40 for mark in marks)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak")
@pytest.mark.slow
@pytest.mark.parametrize("inline", [False, True])
def test_weights_are_in_memory_once(inline: bool, tmp_path: Path) -> None:
    nbytes = 1 << (28 if inline else 27)  # what an import of any size takes beside them is a small share
    usage = measure(make_file(tmp_path, nbytes, inline=inline))
    assert usage.weight_bytes == nbytes
    assert usage.peak_bytes < 1.25 * usage.weight_bytes and usage.held_bytes < 1.1 * usage.weight_bytes


def test_a_process_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.onnx_scale._PROGRAM", "import sys; open(sys.argv[1])")
    with pytest.raises(UsageError, match=r"failed: FileNotFoundError.*none\.onnx") as caught:
        measure(tmp_path / "none.onnx")
    assert caught.value.code == "IRC451"
