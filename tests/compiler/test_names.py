"""Tensors train whatever they are called: no part of a name means anything."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.examples import examples
from torch import Tensor, nn

import irc

ODD = (
    *(
        "onnx::MatMul_12",
        "a:b",
        "weight:scale",
        "parameter:w",
        "weight data",
        "a/b",
        "/a",
        "a, b",
        " ",
        "",
        "\n",
    ),
    *(
        "self",
        "class",
        "input",
        "module",
        "0",
        "-1",
        "None",
        "ü",
        "日本",
        "\u202e",
        "'",
        '"',
        "\\",
        "%x",
        "@s",
        "#",
    ),
    *("<b>", "{x}", "$(x)", "*", "~", "\x1b[31m", "ONNX node x", "_orig_mod", "x" * 300),
)
"""Names that torch, the text form, a path, a shell or a terminal may read as something else."""

DOTTED = (
    ".",
    ".a",
    "a.",
    "a..b",
    "a.b",
    "forward",
    "training",
    "_parameters.w",
    "_constants.c0",
    "__dict__",
    "w.weight.w",
)
"""Names that no attribute has, or that mean something else there."""

NAMES = st.lists(st.text(max_size=8) | st.sampled_from(ODD), min_size=1, max_size=4, unique=True)


class Named(nn.Module):
    """Adds up what tensors of these names make of its input."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.scales = [f"{name}s" for name in names]
        for name in names:
            self.register_parameter(name.replace(".", "") or "_", nn.Parameter(torch.randn(4, 4)))
        for name in self.scales:
            self.register_buffer(name.replace(".", ""), torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight, scale in zip(self.parameters(), self.buffers(), strict=True):
            x = torch.tanh(x @ weight) * scale
        return x.square().mean()


def hold_equal(model: nn.Module, x: Tensor, folder: Path) -> None:
    """Checks that a model trains as planned and as read from a folder, with eager's bits."""
    fitted = irc.optimize(copy.deepcopy(model), (x,), "105%", costs="analytic")
    trained = [model, fitted]
    for each in trained:
        each(x).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert expected
    for name, parameter in fitted.named_parameters():
        gradient = expected.pop(name)
        assert (
            gradient is not None and parameter.grad is not None and torch.equal(gradient, parameter.grad)
        ), name
    assert not expected
    assert len(fitted.irc_plans) == 1
    for by in ("module", "line", "storage"):
        assert fitted.plan.explain(by=by)
    irc.report(fitted, folder / "page.html")
    assert (folder / "page.html").stat().st_size > 1000


@pytest.mark.slow
@given(NAMES)
@example(sorted({name.replace(".", "") or "_" for name in ODD}))
@examples(12)
def test_parameters_and_buffers_of_any_name_train(names: list[str]) -> None:
    torch.manual_seed(0)
    plain = dict.fromkeys(name.replace(".", "") or "_" for name in names)
    free = [name for name in plain if not hasattr(nn.Module(), name) and not hasattr(nn.Module(), f"{name}s")]
    if free and len({*free, *(f"{name}s" for name in free), "scales"}) == 2 * len(free) + 1:
        with tempfile.TemporaryDirectory() as folder:
            hold_equal(Named(free), torch.randn(3, 4), Path(folder))


def test_weights_and_nodes_of_an_onnx_file_of_any_name_train(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [name for name in (*ODD, *DOTTED) if name]
    weights = [numpy_helper.from_array(rng.normal(size=(4, 4)).astype("f"), name) for name in names]
    nodes, value = list[onnx.NodeProto](), "the input"
    for name in names:
        nodes += [
            helper.make_node("MatMul", [value, name], [f"{name}:mm"], name=name),
            helper.make_node("Tanh", [f"{name}:mm"], [f"{name}:tanh"], name=f"{name}/tanh"),
        ]
        value = f"{name}:tanh"
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("the input", TensorProto.FLOAT, [3, 4])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, [3, 4])],
        weights,
    )
    file = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(file))
    model = irc.from_onnx(file)
    assert set(model.onnx_names.values()) == set(names)
    hold_equal(model, torch.randn(3, 4), tmp_path)
