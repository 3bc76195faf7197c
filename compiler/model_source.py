"""Loads what the command line calls MODEL: an ONNX file, or a factory in a module or a file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..ir import IrcError, Location, UsageError
from .source import MODEL_HELP, Source

__all__ = [
    "Loaded",
    "load",
    "load_for_micro_batches",
    "training_loss",
]


@dataclass(frozen=True)
class Loaded:
    """A model with the arguments of one step."""

    module: nn.Module
    args: tuple[Any, ...]


_LIBRARIES = tuple(str(Path(place).parent) for place in (torch.__file__, __file__))


def load(source: Source) -> Loaded:
    """The module and example arguments that a source stands for.

    Raises:
        UsageError: IRC310 to IRC318 for an ONNX file; IRC420 when there is no such file, module or factory;
            IRC422 when the code raises, or returns something else.
    """
    file = load_file(source)
    if file is not None:
        return with_example(file)
    loaded = _from_factory(source)
    if source.seed is not None:
        _draw_parameters(loaded.module, source.seed)
    return loaded


def load_for_micro_batches(source: Source, count: int) -> Loaded:
    """The same with the arguments of a whole batch, and a module that takes a part of it.

    An ONNX model takes batches of the size that it is given; others take any.

    Args:
        source: With the batch size of a whole batch, for an ONNX model; None for that of its first input.
        count: Into how many micro-batches a batch is divided.

    Raises:
        UsageError: As `load`.
    """
    from .pipeline.micro_batches import batch_of

    loaded = load(source)
    batch = source.batch
    if batch is None and not source.is_factory and not source.inputs:
        batch = batch_of(loaded.args)
    if not batch or batch % count or count == 1:
        return loaded
    return Loaded(load(replace(source, batch=batch // count)).module, loaded.args)


def load_file(source: Source) -> nn.Module | None:
    """The module of an ONNX file, whose axes may be open; `None` where the source names a factory.

    Raises:
        UsageError: As `load`.
    """
    source.check()
    if source.is_factory:
        return None
    from ..frontends.onnx import from_onnx

    module = from_onnx(source.model, source.batch, source.inputs, source.constants, source.roles)
    if source.seed is not None:
        _draw_parameters(module, source.seed)
    return module


def with_example(file: nn.Module) -> Loaded:
    """The module of an ONNX file with inputs drawn for it.

    Raises:
        UsageError: IRC317 when an axis of an input has no size.
    """
    from ..frontends.onnx import example_inputs

    return Loaded(file, example_inputs(file))


def _from_factory(source: Source) -> Loaded:
    place, _, name = source.model.rpartition(":")
    if source.batch is not None or source.inputs or source.constants or source.roles:
        raise UsageError(
            "IRC420",
            "--batch, --input, --constant and --role are for ONNX files",
            help="the factory decides on its example inputs",
        )
    path = Path(place)
    with _importable(path.resolve().parent if path.suffix == ".py" else Path.cwd()):
        module = _import_file(path) if path.suffix == ".py" else _import_module(place)
        factory = getattr(module, name, None)
        if not callable(factory):
            raise UsageError("IRC420", f"{place} has no function {name!r}", help=MODEL_HELP)
        with _explained(f"{source.model} raised"):
            made = factory()
    return _checked(source.model, made)


def _checked(model: str, made: object) -> Loaded:
    """Returns what a factory returned, if it is a module and its arguments."""
    help = "a factory returns (module, example_args), the arguments as a tuple of tensors"
    if not isinstance(made, tuple):
        raise UsageError("IRC422", f"{model} returned {type(made).__name__}, not a pair", help=help)
    items = cast("tuple[Any, ...]", made)
    if len(items) != 2 or not isinstance(items[0], nn.Module):
        kinds = ", ".join(type(item).__name__ for item in items)
        raise UsageError("IRC422", f"{model} returned a tuple of ({kinds})", help=help)
    module, args = items
    if isinstance(args, Tensor):
        return Loaded(module, (args,))
    if not isinstance(args, tuple | list):
        raise UsageError("IRC422", f"the example arguments of {model} are a {type(args).__name__}", help=help)
    return Loaded(module, tuple(cast("Sequence[Any]", args)))


@contextmanager
def _importable(folder: Path) -> Generator[None]:
    """Modules of `folder` can be imported meanwhile, as if python ran there."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _explained(what: str) -> Generator[None]:
    """Turns an error of the user's code into one line that names the place."""
    try:
        yield
    except IrcError:
        raise
    except (Exception, SystemExit) as error:
        if os.environ.get("IRC_TRACEBACK"):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen"))]
        last = (own or frames)[-1]
        text = next(iter(str(error).strip().splitlines()), "")
        raise UsageError(
            "IRC422",
            f"{what} {type(error).__name__}: {text}".rstrip(": "),
            at=Location(source=f"{last.filename}:{last.lineno} in {last.name}"),
            help="set IRC_TRACEBACK=1 to see the whole traceback",
        ) from error


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError("IRC420", f"{name!r} is not a name of a module", help=MODEL_HELP)
    importlib.invalidate_caches()
    with _explained(f"importing {name} raised"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                raise UsageError(
                    "IRC420", f"there is no module {name!r} ({error})", help=MODEL_HELP
                ) from error
            raise


def _import_file(path: Path) -> ModuleType:
    name = f"irc_model_{path.stem}"  # a file called json.py must not become the module json
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _explained(f"{path} cannot be run:"):
        spec.loader.exec_module(module)
    return module


def _draw_parameters(module: nn.Module, seed: int) -> None:
    """Draws matrices anew (He et al. 2015), for files whose weights are placeholders; vectors stay."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                fan_in = parameter[0].numel()
                drawn = torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5
                parameter.copy_(drawn)


def training_loss(result: Any) -> Tensor:
    """Returns the command line's loss: a result that is a scalar, else the mean squares of its floats."""
    from ..torch_support.pytree import flatten

    leaves = (leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad)
    floats = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    if len(floats) == 1 and floats[0].dim() == 0:
        return floats[0]
    return torch.stack([leaf.float().square().mean() for leaf in floats]).sum()
