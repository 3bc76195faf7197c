"""Which constants are trained, and under which names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.onnx_nodes import Const, imported, model_of

from irc.frontends.onnx import OnnxModule, example_inputs, from_onnx
from irc.ir.errors import UsageError


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, Any],
    shape: tuple[int | str, ...] = (2, 4),
    *,
    opset: int = 17,
    ir_version: int = 8,
    weights_as_inputs: bool = False,
) -> Path:
    arrays = {
        k: np.asarray(v, np.float32) if not isinstance(v, np.ndarray) else v for k, v in weights.items()
    }
    tensors = [numpy_helper.from_array(v, k) for k, v in arrays.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    if weights_as_inputs:
        inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    onnx.save(model, str(path / "m.onnx"))
    return path / "m.onnx"


def names(module: OnnxModule) -> tuple[set[str], set[str]]:
    parameters = {name for name, _ in module.named_parameters()}
    return parameters, set(module.state_dict()) - parameters


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, **attributes)


def constant(name: str, value: Any, dtype: Any = np.float32) -> onnx.NodeProto:
    return node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value, dtype)))


def chain(*steps: tuple[str, str]) -> list[onnx.NodeProto]:
    """A chain of binary operators from `x` to `y`, each with one named operand."""
    nodes, value = list[onnx.NodeProto](), "x"
    for i, (op, operand) in enumerate(steps):
        out = "y" if i == len(steps) - 1 else f"t{i}"
        nodes.append(node(op, [value, operand], [out]))
        value = out
    return nodes


def test_weights_in_constant_nodes_are_trained(tmp_path: Path) -> None:
    nodes = [
        constant("w", np.ones((4, 3))),
        constant("b", [1, 2, 3]),
        constant("half", 0.5),
        constant("one", [2.0]),
    ]
    nodes += chain(("MatMul", "w"), ("Add", "b"), ("Mul", "half"), ("Div", "one"))
    module = from_onnx(save(tmp_path, nodes, {}))
    assert names(module) == ({"w", "b"}, set())
    y = module(torch.ones(2, 4))
    torch.testing.assert_close(y, torch.tensor([[5.0, 6.0, 7.0]] * 2) / 4)


def test_scalars_bounds_and_masks_are_not_trained(tmp_path: Path) -> None:
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    weights = {
        "scale": 2.0,
        "low": -1.0,
        "mask": mask,
        "finite_mask": np.triu(np.full((4, 4), -1e4, np.float32), 1),
        "smallest": np.where(mask == 0, 0, np.finfo(np.float32).min).astype(np.float32),
        "bias": [1, 2, 3, 4],
    }
    nodes = chain(
        ("Mul", "scale"), ("Add", "mask"), ("Add", "finite_mask"), ("Add", "smallest"), ("Add", "bias")
    )
    nodes[-1].output[0] = "t9"
    nodes += [node("Clip", ["t9", "low"], ["y"])]
    module = from_onnx(save(tmp_path, nodes, weights, (4, 4)))
    assert names(module) == ({"bias"}, set())


def test_one_element_is_a_weight_where_only_weights_stand_or_the_user_named_it(tmp_path: Path) -> None:
    nodes = [
        *chain(("MatMul", "fc.weight"), ("Add", "fc.bias"), ("Mul", "val_3"), ("PRelu", "onnx::PRelu_4"))
    ]
    weights = {
        "fc.weight": np.ones((4, 1), np.float32),
        "fc.bias": [0.5],
        "val_3": [2.0],
        "onnx::PRelu_4": [0.25],
    }
    module = from_onnx(save(tmp_path, nodes, weights))
    assert names(module)[0] == {"fc.weight", "fc.bias", "onnx::PRelu_4"}


def test_batchnorm_statistics_are_buffers_and_constants_of_shape_are_weights(tmp_path: Path) -> None:
    nodes = [
        node("ConstantOfShape", ["shape"], [name], value=numpy_helper.from_array(np.array([v], np.float32)))
        for name, v in (("scale", 2.0), ("bias", 1.0), ("mean", 0.5), ("var", 1.0))
    ]
    nodes.append(node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["y"], momentum=0.75))
    path = save(
        tmp_path, nodes, {"shape": np.array([4], np.int64)}, opset=9, ir_version=3, weights_as_inputs=True
    )
    module = from_onnx(path)
    assert names(module) == ({"scale", "bias"}, {"mean", "var"})
    assert [spec[0] for spec in module.input_specs] == ["x"]
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 9]])
    reference = torch.nn.BatchNorm1d(4, momentum=0.25)
    assert reference.running_mean is not None and reference.running_var is not None
    reference.weight.data.fill_(2.0)
    reference.bias.data.fill_(1.0)
    reference.running_mean.fill_(0.5)
    torch.testing.assert_close(module(x), reference(x))
    torch.testing.assert_close(module.get_buffer("mean"), reference.running_mean)
    torch.testing.assert_close(module.get_buffer("var"), reference.running_var)
    torch.testing.assert_close(module.eval()(x), reference.eval()(x))


def test_shared_initializers_stay_tied(tmp_path: Path) -> None:
    nodes = [*chain(("MatMul", "w"), ("MatMul", "w"))]
    module = from_onnx(save(tmp_path, nodes, {"w": np.eye(4, dtype=np.float32)}))
    assert names(module)[0] == {"w"}
    module(torch.ones(2, 4)).sum().backward()
    grad = module.get_parameter("w").grad
    assert grad is not None
    torch.testing.assert_close(grad, torch.full((4, 4), 4.0))


@pytest.mark.parametrize("order", [("a", "a.b"), ("a.b", "a")])
def test_names_that_torch_cannot_hold_are_mangled_and_listed(tmp_path: Path, order: tuple[str, str]) -> None:
    odd = [*order, "training", "forward", "x.type", "gpu_0/w", "k..v", "5"]
    module = from_onnx(
        save(tmp_path, chain(*(("Add", name) for name in odd)), {n: [1, 2, 3, 4] for n in odd})
    )
    keys = set(module.state_dict())
    assert set(module.onnx_names) == keys and set(module.onnx_names.values()) == set(odd)
    assert {"training_", "forward_", "x.type_", "gpu_0/w", "k._.v", "5"} <= keys
    assert keys & {"a", "a.b"} and keys & {"a_.b", "a_"}
    assert module.training is True
    torch.testing.assert_close(module(torch.zeros(2, 4))[0], torch.tensor([1.0, 2, 3, 4]) * len(odd))


def test_dotted_names_are_nested_modules(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        chain(("MatMul", "layer.0.weight"), ("Add", "layer.0.bias")),
        {
            "layer.0.weight": np.eye(4, dtype=np.float32),
            "layer.0.bias": [1, 2, 3, 4],
        },
    )
    module = from_onnx(path)
    assert set(module.state_dict()) == {"layer.0.weight", "layer.0.bias"}
    state = {k: torch.zeros_like(v) for k, v in module.state_dict().items()}
    module.load_state_dict(state)
    assert torch.equal(module(torch.ones(2, 4)), torch.zeros(2, 4))


def test_external_weights_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, chain(("MatMul", "w")), {"w": np.arange(16, dtype=np.float32).reshape(4, 4)})
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    torch.testing.assert_close(from_onnx(path).get_parameter("w").detach(), torch.arange(16.0).reshape(4, 4))


def test_shapes_fold_and_a_branch_is_taken_at_import(tmp_path: Path) -> None:
    then = helper.make_graph(
        [node("Relu", ["x"], ["a"])], "then", [], [helper.make_value_info("a", onnx.TypeProto())]
    )
    unknown = node("Other", ["x"], ["b"], domain="com.acme")
    other = helper.make_graph([unknown], "else", [], [helper.make_value_info("b", onnx.TypeProto())])
    nodes = [
        node("Shape", ["x"], ["s"]),
        constant("first", 0, np.int64),
        node("Gather", ["s", "first"], ["batch"]),
        constant("two", 2, np.int64),
        node("Equal", ["batch", "two"], ["is_two"]),
        node("If", ["is_two"], ["z"], then_branch=then, else_branch=other),
        constant("axes", [0], np.int64),
        node("Unsqueeze", ["batch", "axes"], ["batch1"]),
        constant("rest", [2, -1], np.int64),
        node("Concat", ["batch1", "rest"], ["shape"], axis=0),
        node("Reshape", ["z", "shape"], ["y"]),
    ]
    module = from_onnx(save(tmp_path, nodes, {}, ("N", 4)), batch=2)
    assert module(torch.tensor([[-1.0, 2, 3, 4]] * 2)).shape == (2, 2, 2)
    assert repr(module).count("2 nodes") == 1


def test_example_inputs_are_the_same_for_a_seed(tmp_path: Path) -> None:
    module = from_onnx(
        save(tmp_path, chain(("Mul", "w")), {"w": [1, 2, 3, 4]}, ("N", 4)), inputs={"x": (3, 4)}
    )
    [a], [b], [c] = example_inputs(module), example_inputs(module), example_inputs(module, seed=1)
    assert a.shape == (3, 4) and torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(TypeError, match="expected 1 inputs"):
        module()


def test_roles_that_the_user_gives(tmp_path: Path) -> None:
    nodes = [*chain(("MatMul", "block.w"), ("Add", "block.table"), ("Mul", "factor"))]
    weights = {
        "block.w": np.ones((4, 3), np.float32),
        "block.table": np.ones((2, 3), np.float32),
        "factor": 0.5,
    }
    path = save(tmp_path, nodes, weights)
    assert names(from_onnx(path)) == ({"block.w", "block.table"}, set())
    module = from_onnx(path, roles={"*.table": "buffer", "factor": "parameter", "block.*": "parameter"})
    assert names(module) == ({"block.w", "factor"}, {"block.table"})
    frozen = from_onnx(path, roles={"*": "constant"})
    assert names(frozen) == (set(), set())
    assert torch.equal(frozen(torch.ones(2, 4)), module(torch.ones(2, 4)))
    stored = {row.name: (row.role, row.why) for row in module.stored}
    assert stored["block.table"] == ("buffer", "given as *.table=buffer")
    by_rule = {row.name: (row.role, row.why) for row in from_onnx(path).stored}
    assert by_rule == {
        "block.w": ("parameter", "a weight's place in MatMul"),
        "block.table": ("parameter", "in Add"),
        "factor": ("constant", "a scalar"),
    }


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ({"w": "trainable"}, "'trainable' is not a role for 'w'"),
        ({"no*": "buffer"}, "no weight or constant that the model reads is named 'no*'"),
        ({"shape": "parameter"}, "'shape' is of type int64, which cannot be trained"),
    ],
)
def test_roles_that_do_not_fit(tmp_path: Path, roles: dict[str, str], why: str) -> None:
    nodes = [node("MatMul", ["x", "w"], ["t"]), node("Reshape", ["t", "shape"], ["y"])]
    path = save(tmp_path, nodes, {"w": np.ones((4, 3), np.float32), "shape": np.array([3, 2])})
    with pytest.raises(UsageError) as caught:
        from_onnx(path, roles=roles)
    assert caught.value.code == "IRC319" and caught.value.message == why and caught.value.help


def test_a_constant_of_two_names_is_read_under_both(tmp_path: Path) -> None:
    rows = np.array([[1, 0], [0, 1]])
    nodes = [
        node("Identity", ["rows"], ["again"]),
        node("Gather", ["x", "rows"], ["a"]),
        node("Gather", ["x", "again"], ["b"]),
        node("Add", ["a", "b"], ["y"]),
    ]
    module = from_onnx(save(tmp_path, nodes, {"rows": rows}))
    x = torch.randn(2, 4)
    assert torch.equal(module(x), 2 * x[torch.from_numpy(rows)])


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_dequantised_weights_are_trained_as_floats(domain: str, tmp_path: Path) -> None:
    """Their place in the file is the result of DequantizeLinear; its codes and scales are constants."""
    codes = np.array([[-3, 2], [5, 0], [1, 1], [7, -8]], np.int8)
    nodes = [
        node("DequantizeLinear", ["codes", "scale", "zero"], ["w"], axis=1, domain=domain),
        node("Transpose", ["w"], ["wt"]),
        node("Transpose", ["wt"], ["wtt"]),
        node("MatMul", ["x", "wtt"], ["t"]),
        node("DequantizeLinear", ["bound", "one"], ["most"]),
        node("Clip", ["t", "", "most"], ["y"]),
    ]
    weights = {
        "codes": codes,
        "scale": np.array([0.5, 0.25], np.float32),
        "zero": np.array([1, -1], np.int8),
        "bound": np.array(90, np.int8),
        "one": np.array(1, np.float32),
    }
    module = from_onnx(save(tmp_path, nodes, weights, opset=17))
    assert names(module) == ({"w"}, set())
    expected = (codes.astype(np.float32) - weights["zero"]) * weights["scale"]
    torch.testing.assert_close(module.get_parameter("w").detach(), torch.from_numpy(expected))
    x = torch.randn(2, 4)
    module(x).sum().backward()
    assert module.get_parameter("w").grad is not None
    assert names(from_onnx(tmp_path / "m.onnx", roles={"w": "buffer"})) == (set(), {"w"})
    assert names(from_onnx(tmp_path / "m.onnx", roles={"w": "constant"})) == (set(), set())


_WEIGHTS_OF: list[tuple[str, int, list[Any], set[str]]] = [
    (
        "RotaryEmbedding",
        23,
        [np.ones((1, 2, 3, 4)), Const(np.ones((1, 3, 2))), Const(np.ones((1, 3, 2)))],
        set(),
    ),
    ("SoftmaxCrossEntropyLoss", 13, [np.ones((2, 3)), Const([0, 1]), Const([1.0, 2.0, 3.0])], set()),
    ("RoiAlign", 16, [np.ones((1, 1, 4, 4)), Const([[0.0, 0.0, 3.0, 3.0]]), Const([0])], set()),
    (
        "CausalConvWithState",
        27,
        [np.ones((1, 2, 3)), Const(np.ones((2, 1, 2))), Const([0.5, 1.0])],
        {"x1", "x2"},
    ),
    (
        "LinearAttention",
        27,
        [np.ones((1, 2, 3)), np.ones((1, 2, 3)), np.ones((1, 2, 3)), Const(np.zeros((1, 1, 3, 3)))],
        set(),
    ),
    ("DeformConv", 19, [np.ones((1, 1, 3, 3)), Const(np.ones((1, 1, 2, 2))), np.ones((1, 8, 2, 2))], {"x1"}),
]


@pytest.mark.parametrize("case", _WEIGHTS_OF, ids=lambda case: case[0])
def test_operands_that_are_weights(case: tuple[str, int, list[Any], set[str]], tmp_path: Path) -> None:
    op, opset, operands, expected = case
    heads: dict[str, Any] = (
        {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "linear"} if op == "LinearAttention" else {}
    )
    results = 2 if op in ("CausalConvWithState", "LinearAttention") else 1
    module = imported(model_of(op, opset, operands, results, **heads), tmp_path)
    assert {name for name, _ in module.named_parameters()} == expected
