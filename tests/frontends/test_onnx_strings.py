"""Strings are values of each run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from irc.frontends.onnx import example_inputs, from_onnx
from irc.ir.errors import UnsupportedError

STRING = TensorProto.STRING


def save(path: Path, nodes: list[onnx.NodeProto], *names: str) -> Path:
    inputs = [helper.make_tensor_value_info(name, STRING, ["C"]) for name in names]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", STRING, None)])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path / "m.onnx"
    )
    return path / "m.onnx"


# The reference looks at the case of stop words where it changes no case, whatever `is_case_sensitive` says.
@pytest.mark.parametrize(
    ("action", "sensitive"), [("NONE", 1), ("LOWER", 0), ("LOWER", 1), ("UPPER", 0), ("UPPER", 1)]
)
def test_words_are_normalised_as_in_the_reference(action: str, sensitive: int, tmp_path: Path) -> None:
    node = helper.make_node(
        "StringNormalizer",
        ["a"],
        ["y"],
        case_change_action=action,
        is_case_sensitive=sensitive,
        stopwords=["monday", "Sunday"],
    )
    path = save(tmp_path, [node], "a")
    for words in (["Monday", "monday", "tuesday", "sunday"], ["Sunday", "monday"]):
        given = np.array(words, dtype=object)
        (expected,) = ReferenceEvaluator(str(path)).run(None, {"a": given})  # pyright: ignore
        assert from_onnx(path)(given).tolist() == np.asarray(expected).tolist()


def test_strings_are_joined_and_have_no_examples(tmp_path: Path) -> None:
    path = save(tmp_path, [helper.make_node("StringConcat", ["a", "b"], ["y"])], "a", "b")
    module = from_onnx(path)
    joined = module(np.array(["x", "y"], dtype=object), np.array(["1"], dtype=object))
    assert joined.tolist() == ["x1", "y1"]
    with pytest.raises(UnsupportedError, match="no example is drawn") as caught:
        example_inputs(module)
    assert caught.value.code == "IRC304"
    with pytest.raises(UnsupportedError, match="which cannot be bound at import"):
        from_onnx(path, constants={"a": [1]})


def test_numbers_are_not_made_of_strings(tmp_path: Path) -> None:
    module = from_onnx(save(tmp_path, [helper.make_node("Relu", ["a"], ["y"], name="relu")], "a"))
    with pytest.raises(UnsupportedError, match="of strings as operand 0") as caught:
        module(np.array(["x"], dtype=object))
    assert caught.value.code == "IRC302" and "relu" in str(caught.value)
