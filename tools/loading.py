"""Loads what the command line calls MODEL: an ONNX file, or a factory in a module or a file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..ir import UsageError

__all__ = ["Loaded", "Source", "load", "parse_input", "training_loss"]


@dataclass(frozen=True)
class Source:
    """Where a model comes from; kept in a written folder, so that it can be compared with the original.

    Args:
        model: `file.onnx`, `package.module:factory` or `file.py:factory`.
        batch: Batch size of an ONNX model.
        inputs: Shapes of an ONNX model's inputs.
        seed: Draws the parameters anew; None leaves them as the model has them.
    """

    model: str
    batch: int | None = None
    inputs: Mapping[str, Sequence[int]] | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Loaded:
    """A model with the arguments of one step."""

    module: nn.Module
    args: tuple[Any, ...]


_HELP = "give file.onnx, package.module:factory or file.py:factory"


def load(source: Source) -> Loaded:
    """The module and example arguments that a source stands for.

    Raises:
        UsageError: IRC420 when there is no such file, module or factory, or it returns something else.
    """
    loaded = _from_onnx(source) if _is_file(source.model) else _from_factory(source)
    if source.seed is not None:
        _draw_parameters(loaded.module, source.seed)
    return loaded


def _is_file(model: str) -> bool:
    return ":" not in os.path.basename(model)


def _from_onnx(source: Source) -> Loaded:
    from ..frontends.onnx import example_inputs, from_onnx

    module = from_onnx(source.model, batch=source.batch, inputs=source.inputs)
    return Loaded(module, example_inputs(module))


def _from_factory(source: Source) -> Loaded:
    place, _, name = source.model.rpartition(":")
    if source.batch is not None or source.inputs:
        raise UsageError(
            "IRC420", "--batch and --input are for ONNX files", help="the factory decides on its example inputs"
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UsageError("IRC420", f"{place} has no function {name!r}", help=_HELP)
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(
            "IRC420",
            f"{source.model} returned {type(made).__name__}",
            help="a factory returns (module, example_args), the arguments as a tuple of tensors",
        )
    args = made[1]
    return Loaded(made[0], (args,) if isinstance(args, Tensor) else tuple(args))


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError("IRC420", f"there is no module {name!r} ({error})", help=_HELP) from error
    finally:
        sys.path.remove(os.getcwd())


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError("IRC420", f"there is no file {path}", help=_HELP)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            "IRC420", f"{path} cannot be run: {type(error).__name__}: {error}", help="run it with python to see where"
        ) from error
    return module


def _draw_parameters(module: nn.Module, seed: int) -> None:
    """Draws weights anew (He et al. 2015): for files whose weights are placeholders. Vectors stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                fan_in = parameter[0].numel()
                drawn = torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5
                parameter.copy_(drawn)


def parse_input(text: str) -> tuple[str, tuple[int, ...]]:
    """The name and shape of `--input name=8x3x224x224`.

    Raises:
        UsageError: IRC421 when it is written in another way.
    """
    name, equals, shape = text.rpartition("=")
    sizes = shape.replace(",", "x").split("x")
    if not equals or not name or not all(size.strip().isdigit() for size in sizes):
        raise UsageError("IRC421", f"--input {text!r} is no name=shape", help="write --input name=8x3x224x224")
    return name, tuple(int(size) for size in sizes)


def training_loss(result: Any) -> Tensor:
    """What the command line trains with: the result itself if it is a scalar, else the mean of squares of its floats."""
    from torch.utils import _pytree as pytree

    floats = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if len(floats) == 1 and floats[0].dim() == 0:
        return floats[0]
    return torch.stack([leaf.float().square().mean() for leaf in floats]).sum()
