"""Models of one node, run by irc and by the reference evaluator of the ONNX standard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from irc.frontends.onnx import from_onnx


class Const:
    """An operand that stands in the file."""

    def __init__(self, value: Any, dtype: Any = None) -> None:
        self.array = np.asarray(value, dtype)


def model_of(
    op: str, opset: int, operands: Sequence[Any], outputs: int = 1, domain: str = "", **attributes: Any
) -> onnx.ModelProto:
    """One node; operands are arrays (inputs), `Const` (in the file) or `None` (absent)."""
    names, inputs, initializers = list[str](), list[onnx.ValueInfoProto](), list[onnx.TensorProto]()
    for i, operand in enumerate(operands):
        names.append("" if operand is None else f"x{i}")
        if isinstance(operand, Const):
            initializers.append(numpy_helper.from_array(operand.array, names[-1]))
        elif operand is not None:
            kind = helper.np_dtype_to_tensor_dtype(operand.dtype)
            inputs.append(helper.make_tensor_value_info(names[-1], kind, operand.shape))
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, name="the_node", domain=domain, **attributes)
    values = [helper.make_value_info(name, onnx.TypeProto()) for name in results]
    opsets = [helper.make_opsetid("", opset if not domain else 24)]
    opsets += [helper.make_opsetid(domain, opset)] if domain else []
    graph = helper.make_graph([node], "g", inputs, values, initializers)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def inputs_of(operands: Sequence[Any]) -> dict[str, np.ndarray]:
    """The operands that are inputs, by name."""
    return {f"x{i}": x for i, x in enumerate(operands) if x is not None and not isinstance(x, Const)}


def imported(model: onnx.ModelProto, folder: Path) -> torch.nn.Module:
    """The module for a model, in eval mode."""
    path = folder / "model.onnx"
    onnx.save(model, str(path))
    return from_onnx(path).eval()


def run(module: torch.nn.Module, operands: Sequence[Any]) -> list[torch.Tensor]:
    """The module's outputs for these operands."""
    results = module(*(torch.from_numpy(x) for x in inputs_of(operands).values()))
    return list(results) if isinstance(results, tuple) else [results]


def reference(model: onnx.ModelProto, operands: Sequence[Any]) -> list[np.ndarray]:
    """The reference evaluator's outputs for these operands."""
    return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, inputs_of(operands))]


def check(
    folder: Path,
    op: str,
    opset: int,
    operands: Sequence[Any],
    outputs: int = 1,
    **attributes: Any,
) -> None:
    """Compare all outputs of a node with the reference evaluator's: type, shape and values."""
    model = model_of(op, opset, operands, outputs, **attributes)
    expected = reference(model, operands)
    actual = run(imported(model, folder), operands)
    assert len(actual) == len(expected) == outputs
    for ours, theirs in zip(actual, expected, strict=True):
        values = ours.detach().numpy()
        assert (values.dtype, values.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(values, theirs, rtol=1e-4, atol=1e-5)
