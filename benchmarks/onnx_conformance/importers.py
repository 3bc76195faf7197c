"""The importers other than irc, each as one function from a model to what runs it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from .cases import fed_inputs

__all__ = ["PEERS", "Importer", "Load", "Run", "Unsupported", "find", "to_numpy", "to_torch"]

Run = Callable[..., Sequence[Any]]
"""From the values of a data set, in order, to the outputs: arrays, lists of them, or None."""
Load = Callable[[ModelProto], Run]


class Unsupported(Exception):
    """The importer does not do this, and says so."""


@dataclass(frozen=True)
class Importer:
    """What is run against the suite.

    Args:
        name: As it is called in tables.
        load: Imports a model.
        is_strict: Whether it refuses by `Unsupported` alone; of others also an error whose text says that
            something is not supported or not implemented counts as a refusal.
    """

    name: str
    load: Load
    is_strict: bool = False


def find(name: str) -> Importer:
    """The importer of this name: one of `PEERS`, or `package.module:function`.

    Raises:
        ImportError: It is not installed.
        AttributeError: The module has no such function.
        KeyError: There is no such name.
    """
    if ":" in name:
        module, _, function = name.partition(":")
        return Importer(name, getattr(importlib.import_module(module), function))
    return Importer(name, PEERS[name]())


# torch and numpy


def to_torch(value: Any) -> Any:
    """A value of a data set in torch's own memory; torch is imported by then.

    Raises:
        Unsupported: torch has no such elements.
    """
    import torch

    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [to_torch(item) for item in value]
    array = np.array(value, order="C")
    if array.dtype.name == "bfloat16" or array.dtype.name.startswith("float8"):
        dtype = getattr(torch, array.dtype.name)
        bits = np.int16 if array.dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(array.view(bits)).view(dtype)
    if array.dtype.kind not in "biufc":
        raise Unsupported(f"torch has no elements of {array.dtype}")
    return torch.from_numpy(array)


def to_numpy(value: Any) -> Any:
    """An output of a torch module as an array, with the element type that it has in torch."""
    import ml_dtypes
    import torch

    if isinstance(value, list | tuple):
        return [to_numpy(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return None if value is None else np.asarray(value)
    tensor = value.detach().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        bits = torch.int16 if tensor.itemsize == 2 else torch.uint8
        return tensor.view(bits).numpy().view(getattr(ml_dtypes, name))
    return tensor.numpy()


def _module_run(module: Any, outputs: int) -> Run:
    """Runs a torch module in eval mode."""
    import torch

    module.eval()

    def run(*values: Any) -> Sequence[Any]:
        with torch.no_grad():
            result = module(*(to_torch(value) for value in values))
        return [to_numpy(v) for v in ([result] if outputs == 1 and not _is_alone(result) else result)]

    return run


def _is_alone(result: Any) -> bool:
    """Whether a module returned its single output in a tuple; a list is a sequence."""
    return isinstance(result, tuple)


# The peers


def _onnxruntime() -> Load:
    from .runtime import Session

    def load(model: ModelProto) -> Run:
        session = Session(model)
        return lambda *values: session.run(_feeds(model, values))

    return load


def _reference() -> Load:
    from onnx.reference import ReferenceEvaluator

    def load(model: ModelProto) -> Run:
        evaluator = ReferenceEvaluator(model)
        return lambda *values: list(evaluator.run(None, _feeds(model, values)))

    return load


def _feeds(model: ModelProto, values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(fed_inputs(model, len(values)), values, strict=True))


_KEPT: list[Any] = []
"""What torch forgets when it is collected."""


def _find_torchvision() -> None:
    """Makes torchvision importable where its wheel is for another build of torch.

    It cannot load its operators then, and fails because two of them are not known by name. What does not need
    them works once they are.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        from torch.library import Library

        library = Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


def _onnx2torch() -> Load:
    _find_torchvision()
    converter: Any = importlib.import_module("onnx2torch")
    return lambda model: _module_run(converter.convert(model), len(model.graph.output))


def _onnx2pytorch() -> Load:
    _find_torchvision()
    converter: Any = importlib.import_module("onnx2pytorch")
    return lambda model: _module_run(converter.ConvertModel(model), len(model.graph.output))


def _onnx2fx() -> Load:
    _find_torchvision()  # it asks for it where it runs such operators
    converter: Any = importlib.import_module("onnx2fx")
    return lambda model: _module_run(converter.convert(model), len(model.graph.output))


PEERS: dict[str, Callable[[], Load]] = {
    "onnxruntime": _onnxruntime,
    "onnx.reference": _reference,
    "onnx2torch": _onnx2torch,
    "onnx2pytorch": _onnx2pytorch,
    "onnx2fx": _onnx2fx,
}
