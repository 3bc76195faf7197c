"""Trained weights go back into the file that they came from, and nothing else in it changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file
from torch import Tensor

import irc
from irc.__main__ import main
from irc.compiler.onnx_export import check as export_check
from irc.compiler.onnx_export.differences import apart
from irc.frontends.onnx import example_inputs, export
from irc.frontends.onnx.export import write_back
from irc.ir.errors import UsageError

FLOAT = TensorProto.FLOAT


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model_file(path: Path) -> Path:
    """Weights in an initializer, in a Constant, in a ConstantOfShape, in a branch; and metadata."""

    def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, outputs, name=f"n_{outputs[0]}", **attributes)

    inner = helper.make_graph(
        [node("Mul", ["t3", "inner"], ["t4"])],
        "inner",
        [],
        [helper.make_tensor_value_info("t4", FLOAT, (2, 3))],
        [numpy_helper.from_array(array(3, seed=3), "inner")],
    )
    nodes = [
        node("Constant", [], ["b"], value=numpy_helper.from_array(array(3, seed=1))),
        node("ConstantOfShape", ["size"], ["w2"], value=numpy_helper.from_array(np.full(1, 0.5, np.float32))),
        node("MatMul", ["x", "w"], ["t1"]),
        node("Add", ["t1", "b"], ["t2"]),
        node("MatMul", ["t2", "w2"], ["t3"]),
        node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, (2, 4))],
        [helper.make_tensor_value_info("y", FLOAT, (2, 3))],
        [
            numpy_helper.from_array(array(4, 3), "w"),
            numpy_helper.from_array(np.array([3, 3]), "size"),
            numpy_helper.from_array(np.array(True), "yes"),
        ],
        doc_string="a graph",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model.producer_name = "somebody"
    helper.set_model_props(model, {"author": "me"})
    onnx.save(model, str(path / "m.onnx"))
    return path / "m.onnx"


def trained(module: torch.nn.Module, *inputs: Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    result = module(*inputs)
    (result[0] if isinstance(result, tuple) else result).square().mean().backward()
    optimizer.step()


def test_all_kinds_of_weights_go_back_and_nothing_else_changes(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    module = irc.from_onnx(path)
    (x,) = example_inputs(module)
    fitted: Any = irc.optimize(module, (x,), budget="1MiB", costs="analytic")
    trained(fitted, x)
    report = irc.export_onnx(fitted, tmp_path / "tuned.onnx")
    assert report.written == 4 and report.difference is not None and report.difference < 1e-6
    assert "onnxruntime" in report.text()
    session = ort.InferenceSession(str(tmp_path / "tuned.onnx"), providers=["CPUExecutionProvider"])
    y: Any = session.run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(y, fitted.eval()(x).detach().numpy(), rtol=1e-6)

    before, after = onnx.load(str(path)), onnx.load(str(tmp_path / "tuned.onnx"))
    onnx.checker.check_model(after)
    assert after.producer_name == "somebody" and after.metadata_props == before.metadata_props
    assert after.opset_import == before.opset_import and after.ir_version == before.ir_version
    assert after.graph.doc_string == "a graph" and after.graph.input == before.graph.input
    assert [n.name for n in after.graph.node] == [n.name for n in before.graph.node if n.name != "n_w2"]
    assert {i.name for i in after.graph.initializer} == {"w", "yes", "w2"}
    weights = {i.name: numpy_helper.to_array(i) for i in after.graph.initializer}
    assert np.array_equal(weights["w"], fitted.w.detach().numpy()) and not np.array_equal(
        weights["w"], array(4, 3)
    )
    again = irc.from_onnx(tmp_path / "tuned.onnx")
    assert dict(again.onnx_names) == dict(module.onnx_names)
    for name, tensor in fitted.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_dequantised_weight_goes_back_as_floats(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], name="unpack"),
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
    ]
    stored = {"codes": np.ones((4, 3), np.int8), "scale": np.array(0.5, np.float32)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, (2, 4))],
        [helper.make_tensor_value_info("y", FLOAT, (2, 3))],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "m.onnx",
    )
    module = irc.from_onnx(tmp_path / "m.onnx")
    trained(module, *example_inputs(module))
    irc.export_onnx(module, tmp_path / "tuned.onnx")
    after = onnx.load(tmp_path / "tuned.onnx").graph
    assert [n.name for n in after.node] == ["product"] and [i.name for i in after.initializer] == ["w"]
    assert np.array_equal(
        numpy_helper.to_array(after.initializer[0]), module.get_parameter("w").detach().numpy()
    )


def test_large_models_keep_their_weights_beside_them(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    module = irc.from_onnx(path)
    trained(module, *example_inputs(module))
    (tmp_path / "out").mkdir()
    irc.export_onnx(module, tmp_path / "out" / "tuned.onnx")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["tuned.onnx", "tuned.onnx.data"]
    again = irc.from_onnx(tmp_path / "out" / "tuned.onnx")
    assert torch.equal(again.get_parameter("w"), module.get_parameter("w"))


def test_the_command_line_trains_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder, tuned = model_file(tmp_path), tmp_path / "fitted", tmp_path / "tuned.safetensors"
    assert (
        main(["optimize", str(path), "--budget", "1MiB", "--costs", "analytic", "-o", str(folder), "-q"]) == 0
    )
    assert main(["run", str(folder), "--steps", "2", "--save-weights", str(tuned), "-q"]) == 0
    out = tmp_path / "tuned.onnx"
    assert main(["export", str(folder), "--weights", str(tuned), "-o", str(out)]) == 0
    assert f"written: {out} (4 weights); onnxruntime" in capsys.readouterr().out
    exported = irc.from_onnx(out)
    irc.from_onnx(path).load_state_dict(load_file(tuned))
    for name, tensor in load_file(tuned).items():
        assert torch.equal(exported.state_dict()[name], tensor)
    assert not torch.equal(exported.get_parameter("w"), irc.from_onnx(path).get_parameter("w"))
    torch.save({"w": torch.zeros(5, 5)}, tmp_path / "other.pt")
    assert main(["export", str(folder), "--weights", str(tmp_path / "other.pt"), "-o", str(out)]) == 2
    assert "error[IRC323]" in capsys.readouterr().err
    (tmp_path / "no.pt").write_bytes(b"nothing")
    assert main(["export", str(folder), "--weights", str(tmp_path / "no.pt"), "-o", str(out)]) == 2
    assert "error[IRC323]" in capsys.readouterr().err


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    module = irc.from_onnx(path)
    for target, why in (
        (path, "the original itself"),
        (tmp_path, "is not the name"),
        (tmp_path / "no" / "a.onnx", "no folder"),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            irc.export_onnx(module, target)
        assert caught.value.code == "IRC320" and caught.value.help
    with pytest.raises(UsageError, match="came from no ONNX file") as caught:
        irc.export_onnx(torch.nn.Linear(2, 2), tmp_path / "a.onnx")
    assert caught.value.code == "IRC321"
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "other",
        [helper.make_tensor_value_info("x", FLOAT, (2, 4))],
        [helper.make_tensor_value_info("y", FLOAT, (2, 4))],
    )
    onnx.save(helper.make_model(graph), str(path))
    with pytest.raises(UsageError, match="is not stored in a graph") as caught:
        irc.export_onnx(module, tmp_path / "a.onnx")
    assert caught.value.code == "IRC321" and not (tmp_path / "a.onnx").exists()


def test_a_file_that_computes_something_else_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = irc.from_onnx(model_file(tmp_path))
    real = export_check.run_onnxruntime

    def spoilt(path: Path, feed: Any) -> tuple[str, list[Any]]:
        return ("onnxruntime", [np.zeros((2, 3))]) if path.name == "tuned.onnx" else real(path, feed)

    monkeypatch.setattr(export_check, "run_onnxruntime", spoilt)
    with pytest.raises(irc.VerificationError, match="computes other outputs") as caught:
        irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert caught.value.code == "IRC322" and [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_numbers_that_are_loose_in_the_original_may_be_as_loose(tmp_path: Path) -> None:
    """A variance as a difference of squares: onnxruntime is far from the module with the old weights too."""

    def node(op: str, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
        return helper.make_node(op, inputs, outputs, name=f"n_{outputs[0]}")

    nodes = [
        node("MatMul", ["x", "w"], ["far"]),
        node("Mul", ["far", "far"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["m2"], axes=[1]),
        helper.make_node("ReduceMean", ["far"], ["m"], axes=[1]),
        node("Mul", ["m", "m"], ["mm"]),
        node("Sub", ["m2", "mm"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, (4, 64))],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(1e4 + array(64, 256), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    report = irc.export_onnx(irc.from_onnx(tmp_path / "m.onnx"), tmp_path / "tuned.onnx")
    assert report.difference is not None and report.difference > 1e-3


# ------------------------------------------------- files in training mode, at random, with settled inputs


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Operands are given as words; `-` is one that is left out."""
    names = ["" if word == "-" else word for word in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=f"n_{outputs.split()[0]}", **attributes)


def value(name: str, kind: int = FLOAT, shape: Sequence[int | str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


_KINDS = {"mask": TensorProto.BOOL, "wide": TensorProto.DOUBLE}
"""Outputs that are no float32."""


def saved(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] = (),
    outputs: str = "y",
    **weights: Any,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        inputs or [value("x", shape=(4, 3))],
        [value(name, _KINDS.get(name, FLOAT)) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(weight), name) for name, weight in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def training_file(folder: Path) -> Path:
    """Dropout and BatchNormalization in training mode, one of each in a branch; all outputs are read."""
    branch = helper.make_graph(
        [
            node("BatchNormalization", "h scale bias mean var", "b1 m1 v1", training_mode=1),
            node("Dropout", "b1 ratio live", "b2"),
            node("Add", "b2 m1", "b3"),
        ],
        "branch",
        [],
        [value("b3")],
    )
    nodes = [
        node("MatMul", "x w", "t"),
        node("Dropout", "t ratio live", "d mask"),
        node("BatchNormalization", "d scale bias mean var", "h running new", training_mode=1),
        node("If", "yes", "z", then_branch=branch, else_branch=branch),
        node("Add", "z new", "y"),
    ]
    inputs = [value("x", shape=(4, 3)), value("yes", TensorProto.BOOL, ())]
    weights = {"scale": array(5, seed=1), "bias": array(5, seed=2), "mean": array(5, seed=3)}
    settings = {"ratio": np.float32(0.5), "live": np.array(True)}
    return saved(
        folder, nodes, inputs, "y running mask", w=array(3, 5), var=1 + array(5) ** 2, **weights, **settings
    )


def random_file(folder: Path) -> Path:
    """A weight, and noise that a branch draws."""
    noise = helper.make_graph([node("RandomNormalLike", "t", "noise")], "noisy", [], [value("noise")])
    nodes = [
        node("MatMul", "x w", "t"),
        node("If", "yes", "n", then_branch=noise, else_branch=noise),
        node("Add", "t n", "y"),
    ]
    return saved(folder, nodes, w=array(3, 5), yes=np.array(True))


def settled_file(folder: Path) -> Path:
    """What is settled decides a shape and a factor."""
    nodes = [node("MatMul", "x w", "t"), node("Mul", "t f", "u"), node("Reshape", "u s", "y")]
    inputs = [
        value("x", shape=("N", 3)),
        value("s", TensorProto.INT64, (2,)),
        value("f", TensorProto.FLOAT, ()),
    ]
    return saved(folder, nodes, inputs, w=array(3, 5))


def foreign_file(folder: Path) -> Path:
    """onnxruntime has no Selu of 64 bits."""
    nodes = [node("MatMul", "x w", "t"), node("Selu", "t", "wide")]
    inputs = [value("x", TensorProto.DOUBLE, (4, 3))]
    return saved(folder, nodes, inputs, "wide", w=array(3, 5).astype(np.float64))


FILES = {
    "plain": (lambda folder: model_file(folder), {}),
    "training": (training_file, {}),
    "random": (random_file, {}),
    "foreign": (foreign_file, {}),
    "settled": (settled_file, {"inputs": {"x": (4, 3)}, "constants": {"s": [10, 2], "f": 2.5}}),
}
CHECKED = {
    "plain": "; onnxruntime ",
    "training": ", with Dropout n_d and 5 more evaluating, agrees with the module within ",
    "random": "; not checked by onnxruntime: RandomNormalLike n_noise draws at random; read again: ",
    "foreign": "; not checked by onnxruntime: onnxruntime cannot run the file (",
    "settled": " agrees with the module within ",
}


def imported(kind: str, folder: Path) -> Any:
    make, options = FILES[kind]
    return irc.from_onnx(make(folder), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", FILES)
def test_weights_and_outputs_are_checked_in_files_of_every_kind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported(kind, tmp_path)
    trained(module, *(torch.ones_like(x) for x in example_inputs(module)))
    report = irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert CHECKED[kind] in report.text()
    assert report.text().endswith("read again: the weights and the outputs are the module's")
    assert (report.difference is None) == (kind in ("random", "foreign"))
    assert report.difference is None or report.difference < 1e-5

    def wrong(source: Any, weights: Any, target: Any) -> None:
        other = {name: t + (1e-7 if name == "w" else 0) for name, t in weights.items()}
        write_back(source, other, target)

    monkeypatch.setattr(export, "write_back", wrong)
    with pytest.raises(
        irc.VerificationError, match=r"has another weight 'w' .* of its elements differ"
    ) as caught:
        irc.export_onnx(module, tmp_path / "other.onnx")
    assert caught.value.code == "IRC322" and caught.value.help
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "tuned.onnx"]


@pytest.mark.parametrize("kind", FILES)
def test_a_graph_that_is_written_wrongly_is_not_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(source: Any, weights: Any, target: Any) -> None:
        write_back(source, weights, target)
        model = onnx.load(target)
        (product,) = (n for n in model.graph.node if n.name in ("n_t", "n_t1"))
        extra = helper.make_node("Abs", [product.output[0]], ["positive"])
        for after in model.graph.node:
            after.input[:] = ["positive" if name == product.output[0] else name for name in after.input]
        extra.input[0] = product.output[0]
        model.graph.node.insert(list(model.graph.node).index(product) + 1, extra)
        onnx.save(model, target)

    module = imported(kind, tmp_path)
    monkeypatch.setattr(export, "write_back", wrong)
    with pytest.raises(irc.VerificationError, match="imported again, computes another output ") as caught:
        irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert caught.value.code == "IRC322"


@pytest.mark.parametrize("kind", ["training", "settled"])
def test_onnxruntime_is_compared_where_it_was_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, real = imported(kind, tmp_path), export_check.run_onnxruntime

    def spoilt(path: Path, feed: Any) -> tuple[str, list[Any]]:
        by, outputs = real(path, feed)
        return by, [
            y * np.asarray(1.01, y.dtype) if "original" not in path.name and y.ndim else y for y in outputs
        ]

    if kind == "settled":
        fed: Any = {}
        monkeypatch.setattr(
            export_check, "run_onnxruntime", lambda path, feed: (fed.update(feed), real(path, feed))[1]
        )
        irc.export_onnx(module, tmp_path / "right.onnx")
        assert fed["s"].tolist() == [10, 2] and fed["f"] == np.float32(2.5)
    monkeypatch.setattr(export_check, "run_onnxruntime", spoilt)
    with pytest.raises(irc.VerificationError, match=r"computes other outputs .* 0\.01 of the largest"):
        irc.export_onnx(module, tmp_path / "tuned.onnx")


def test_training_mode_beside_external_weights_and_in_functions(tmp_path: Path) -> None:
    path = training_file(tmp_path)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "out").mkdir()
    report = irc.export_onnx(irc.from_onnx(path), tmp_path / "out" / "tuned.onnx")
    assert report.difference is not None and report.difference < 1e-5 and "evaluating" in report.text()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["tuned.onnx", "tuned.onnx.data"]

    body = [node("Dropout", "a r live", "d"), node("RandomUniformLike", "d", "noise")]
    opset = [helper.make_opsetid("", 17)]
    nodes = [node("MatMul", "x w", "t"), node("Noisy", "t r live", "y", domain="own")]
    path = saved(tmp_path, nodes, w=array(3, 5), r=np.float32(0.5), live=np.array(True))
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("own", 1))
    for outputs, found in (("d", "Dropout n_d evaluating"), ("noise", "RandomUniformLike n_noise draws")):
        del model.functions[:]
        model.functions.append(
            helper.make_function(
                "own", "Noisy", ["a", "r", "live"], [outputs], body[: 1 + (outputs == "noise")], opset
            )
        )
        onnx.save(model, path)
        assert found in irc.export_onnx(irc.from_onnx(path), tmp_path / "tuned.onnx").text()


def test_old_batch_normalization_names_outputs_that_nothing_reads(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "t"), node("BatchNormalization", "t scale bias mean var", "y m v sm sv")]
    weights: dict[str, Any] = {
        name: array(5, seed=i) ** 2 for i, name in enumerate(("scale", "bias", "mean", "var"))
    }
    path = saved(tmp_path, nodes, w=array(3, 5), **weights)
    model = onnx.load(path)
    model.opset_import[0].version = 9
    onnx.save(model, path)
    report = irc.export_onnx(irc.from_onnx(path), tmp_path / "tuned.onnx")
    assert "with BatchNormalization n_y evaluating" in report.checked
    assert report.difference is not None and report.difference < 1e-5


def test_a_changed_batch_is_compared_at_the_batch_of_the_file(tmp_path: Path) -> None:
    module = irc.from_onnx(saved(tmp_path, [node("MatMul", "x w", "y")], w=array(3, 5)), batch=7)
    trained(module, *example_inputs(module))
    report = irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert report.difference is not None and report.difference < 1e-5
    assert "the outputs are the module's" in report.read_again
    assert ", at the batch of the file, agrees with the module within " in report.text()


def test_the_file_is_read_again_with_the_roles_that_the_module_has(tmp_path: Path) -> None:
    """Roles of the user's; a role by a rule that looks at the values; a role for codes that are unpacked."""
    nodes = [
        node("RNN", "x in rec - - first", "h", hidden_size=2),
        node("ReduceSum", "h", "s", keepdims=0),
        node("DequantizeLinear", "codes step", "w"),
        node("Mul", "w s", "m"),
        node("Add", "m table", "y"),
    ]
    weights: dict[str, Any] = {
        "in": array(1, 2, 3),
        "rec": array(1, 2, 2),
        "first": array(1, 4, 2),
        "table": array(1, 3),
    }
    weights |= {"codes": np.ones((2, 3), np.int8), "step": np.array(0.5, np.float32)}
    path = saved(tmp_path, nodes, [value("x", shape=(2, 4, 3))], **weights)
    roles = {"tab*": "constant", "rec": "buffer", "codes": "constant"}
    module = irc.from_onnx(path, roles=roles)
    assert set(module.onnx_names.values()) == {"in", "rec", "first", "w"}
    with torch.no_grad():
        module.get_parameter("first").zero_()  # zeros are an initial state, and no parameter
    report = irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert report.difference is not None and report.difference < 1e-5


def test_a_module_of_other_types_is_compared_up_to_those_of_the_file(tmp_path: Path) -> None:
    module = irc.from_onnx(saved(tmp_path, [node("MatMul", "x w", "y")], w=array(3, 5))).double()
    with torch.no_grad():
        module.get_parameter("w").add_(1e-12)
    report = irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert report.read_again == "the weights and the outputs are the module's, up to the file's float32"
    assert report.difference is not None and report.difference < 1e-5
    cast = [node("MatMul", "x w", "t"), node("Cast", "t", "u", to=FLOAT), node("MatMul", "u v", "y")]
    module = irc.from_onnx(saved(tmp_path, cast, w=array(3, 5), v=array(5, 2))).double()
    report = irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert report.read_again == "the weights are the module's, up to the file's float32"
    assert report.difference is not None and report.difference < 1e-5


def test_inputs_that_cannot_be_drawn_are_given(tmp_path: Path) -> None:
    look_up = [node("Cast", "x", "i", to=TensorProto.INT64), node("Gather", "w i", "y")]
    few = irc.from_onnx(saved(tmp_path, look_up, w=array(2, 5)))
    report = irc.export_onnx(few, tmp_path / "tuned.onnx")  # floats that stand for rows 0 and 1
    assert report.difference == 0.0
    none = irc.from_onnx(
        saved(
            tmp_path,
            [look_up[0], node("Add", "i far", "j"), node("Gather", "w j", "y")],
            w=array(2, 5),
            far=np.array(-7),
        )
    )
    report = irc.export_onnx(none, tmp_path / "tuned.onnx")
    assert "not checked by onnxruntime: the module does not run on inputs that are drawn: " in report.text()
    assert report.read_again == "the weights are the module's"
    report = irc.export_onnx(none, tmp_path / "tuned.onnx", [torch.full((4, 3), 8.0)])
    assert report.difference == 0.0 and "the outputs are the module's" in report.read_again
    with pytest.raises(UsageError) as caught:
        irc.export_onnx(none, tmp_path / "tuned.onnx", [torch.full((4, 3), 80.0)])
    assert caught.value.code == "IRC318"


def test_lists_go_in_and_come_out(tmp_path: Path) -> None:
    kind = helper.make_tensor_sequence_value_info("l", FLOAT, None)
    nodes = [
        node("SequenceAt", "l at", "x"),
        node("MatMul", "x w", "t"),
        node("SequenceInsert", "l t", "y"),
    ]
    path = saved(tmp_path, nodes, [kind], w=array(3, 5), at=np.array(0))
    model = onnx.load(path)
    model.graph.output[0].CopyFrom(helper.make_tensor_sequence_value_info("y", FLOAT, None))
    onnx.save(model, path)
    module = irc.from_onnx(path)
    report = irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert report.difference is None and "no example is drawn for it" in report.checked
    report = irc.export_onnx(module, tmp_path / "tuned.onnx", [[torch.ones(2, 3), torch.ones(4)]])
    assert report.difference is not None and report.difference < 1e-5


def test_a_file_that_cannot_be_imported_again_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(source: Any, weights: Any, target: Any) -> None:
        model = onnx.load(source)
        model.graph.node[0].op_type = "Unheard"
        onnx.save(model, target)

    module = imported("plain", tmp_path)
    monkeypatch.setattr(export, "write_back", wrong)
    with pytest.raises(irc.VerificationError, match="cannot be imported again: IRC301") as caught:
        irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert caught.value.code == "IRC322"


def test_how_far_outputs_are_apart() -> None:
    inf, nan = float("inf"), float("nan")
    assert apart(torch.tensor([1.0, -4.0]), np.array([1.0, -3.0])) == 0.25
    assert apart(torch.tensor([0.0]), np.array([1e-3])) == 1.0
    assert apart(torch.tensor([inf, nan, 2.0]), np.array([inf, nan, 1.0])) == 0.5
    for mine, other in (([inf], [1.0]), ([1.0], [nan]), ([nan], [1.0]), ([inf], [-inf]), ([1.0], [1.0, 1.0])):
        assert apart(torch.tensor(mine), np.array(other)) == inf
    words = np.array(["a", "b"], object)
    assert apart(words, np.array(["a", "b"])) == 0.0 and apart(words, np.array(["a", "c"])) == inf
    assert apart(words, np.zeros(2)) == inf and apart(None, None) == 0.0 and apart(None, words) == inf
    assert apart(torch.zeros(0), np.zeros(0)) == 0.0
