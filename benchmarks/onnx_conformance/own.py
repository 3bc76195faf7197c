"""irc as an importer under test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnx import ModelProto

from irc.frontends.onnx import from_model
from irc.ir import IrcError, UnsupportedError

from .cases import fed_inputs
from .importers import Importer, Run, Unsupported, to_numpy, to_torch

__all__ = ["IRC"]

_REFUSALS = ("IRC301", "IRC302", "IRC303", "IRC304")


def _load(model: ModelProto) -> Run:
    """The shapes of inputs come with the data, so the model is imported with each data set."""
    is_training = any(
        attribute.name == "training_mode" and attribute.i == 1
        for node in model.graph.node
        for attribute in node.attribute
    )

    def run(*values: Any) -> Sequence[Any]:
        try:
            return _run(model, values, is_training)
        except IrcError as error:
            if isinstance(error, UnsupportedError) or error.code in _REFUSALS:
                raise Unsupported(f"{error.code}: {error.message}") from error
            raise

    return run


def _run(model: ModelProto, values: Sequence[Any], is_training: bool) -> Sequence[Any]:
    given = dict(zip(fed_inputs(model, len(values)), values, strict=True))
    shapes = {name: value.shape for name, value in given.items() if isinstance(value, np.ndarray)}
    module = from_model(onnx_ir.serde.deserialize_model(model), inputs=shapes).train(is_training)
    with torch.no_grad():
        result = module(*(_given(given[name]) for name, *_ in module.input_specs))
    return [to_numpy(value) for value in ([result] if len(module.output_names) == 1 else result)]


def _given(value: Any) -> Any:
    """A value of a data set as a module takes it: strings stay numpy's."""
    is_text = isinstance(value, np.ndarray) and value.dtype.kind in "OSU"
    return value if is_text else to_torch(value)


IRC = Importer("irc", _load, is_strict=True)
