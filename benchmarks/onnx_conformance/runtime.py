"""onnxruntime as an importer, with the element types that numpy lacks handed over as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, numpy_helper

__all__ = ["Session"]


class Session:
    """A model in onnxruntime, on the CPU and one thread.

    Args:
        model: The model.
    """

    def __init__(self, model: ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        values = (*model.graph.input, *model.graph.output)
        self._has_narrow = any(_is_narrow(value.type.tensor_type.elem_type) for value in values)
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The outputs for these inputs, by name."""
        if not self._has_narrow:
            return list(self._session.run(None, dict(feeds)))
        given = {name: _given(np.asarray(value)) for name, value in feeds.items()}
        return [_taken(value) for value in self._session.run_with_ort_values(None, given)]


def _is_narrow(element: int) -> bool:
    """Whether arrays of this element type are none of numpy's own, so that `run` does not take them."""
    return element >= TensorProto.BFLOAT16


def _given(array: Any) -> Any:
    """An array as onnxruntime holds it: elements of less than a byte are packed."""
    if array.dtype.isbuiltin == 1:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    tensor = numpy_helper.from_array(array)
    room = np.zeros(array.shape, np.dtype(f"u{array.dtype.itemsize}"))
    room.reshape(-1).view(np.uint8)[: len(tensor.raw_data)] = np.frombuffer(tensor.raw_data, np.uint8)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(room, tensor.data_type)


def _taken(value: Any) -> Any:
    if not _is_narrow(value.element_type()):
        return value.numpy()
    content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    tensor = TensorProto(dims=value.shape(), data_type=value.element_type(), raw_data=content)
    return numpy_helper.to_array(tensor)
