"""`irc export`: trained weights back into the ONNX file, checked by onnxruntime."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ...frontends.onnx.export_target import check_export_target
from ...ir import UsageError, first_line, printable, require
from ..artifact import read_folder
from ..model_source import load

__all__ = ["ExportReport", "export_folder", "export_onnx"]

_PURPOSE = "writing weights into an ONNX file"


@dataclass(frozen=True)
class ExportReport:
    """The written file, and how it was checked.

    Args:
        path: The file.
        written: How many weights were written.
        checked: Who computed the file's outputs, or why nobody could.
        difference: The largest difference from the module's, as a share of the largest element of the output;
            None if the outputs were not compared.
        read_again: What the file, imported again, has in common with the module.
    """

    path: Path
    written: int
    checked: str
    difference: float | None
    read_again: str

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return {
            "format": "irc-export-1",
            "path": str(self.path),
            "written": self.written,
            "checked": self.checked,
            "difference": self.difference,
            "read_again": self.read_again,
        }

    def text(self) -> str:
        """The report for a person."""
        outcome = (
            f"not checked by onnxruntime: {self.checked}"
            if self.difference is None
            else f"{self.checked} agrees with the module within {self.difference:.2g} of the largest element"
        )
        return f"written: {self.path} ({self.written} weights); {outcome}; read again: {self.read_again}"


def export_onnx(
    module: nn.Module, path: str | os.PathLike[str], inputs: Sequence[Any] | None = None
) -> ExportReport:
    """Writes the weights of a module that came from an ONNX file back into the graph of that file.

    The graph keeps its names, operator sets and metadata. Before the new file takes its name it is imported
    again, and its weights and outputs are compared with the module's; then onnxruntime's outputs are, in
    evaluation also where the file is in training mode. A file that draws at random is not compared with
    onnxruntime, and the report says so.

    Args:
        module: What `from_onnx` returned, or a fitted copy of it.
        path: The new file, `*.onnx`; of models over 1 GiB the weights lie beside it, as `<path>.data`.
        inputs: What the outputs are compared on, in the order of the module's inputs. Normal floats and whole
            numbers of 0 and 1 are drawn without it; if the module cannot run on these, floats of 0 and 1.

    Raises:
        UsageError: IRC320 when the file cannot be written, IRC321 when the module came from no file, or a
            weight has no place in it; IRC318 when the module cannot run on the inputs; IRC448 without the
            extra `onnx`.
        VerificationError: IRC322 when the new file has another weight or other outputs than the module.
    """
    require("onnx", _PURPOSE)
    from ...frontends.onnx import OnnxModule
    from ...frontends.onnx.export import write_back
    from .check import check_written

    if not isinstance(module, OnnxModule) or module.path is None:
        raise UsageError(
            "IRC321",
            f"the {type(module).__name__} came from no ONNX file",
            help="export what irc.from_onnx returned, or what irc.optimize made of it",
        )
    target = Path(path)
    check_export_target(target, module.path)
    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    weights = {name: state[key] for key, name in module.onnx_names.items()}
    with tempfile.TemporaryDirectory(prefix=f".{target.stem}-", dir=target.absolute().parent) as folder:
        draft = Path(folder) / target.name
        write_back(module.path, weights, draft)
        check = check_written(module, draft, inputs)
        for name in (f"{target.name}.data", target.name):  # the data before the model that names them
            if (Path(folder) / name).exists():
                os.replace(Path(folder) / name, target.absolute().parent / name)
    return ExportReport(target, len(weights), check.checked, check.difference, check.read_again)


def export_folder(folder: Path, weights: Path | None, path: Path) -> ExportReport:
    """Writes the weights of what `irc optimize` wrote, or others for it, back into the ONNX file.

    Args:
        folder: What `irc optimize FILE.onnx -o` wrote.
        weights: A state_dict as safetensors, or saved by `torch.save`; the folder's own weights without it.
        path: See `export_onnx`.

    Raises:
        UsageError: IRC431 when the folder is none of irc's, IRC310 to IRC321 as `export_onnx`, IRC323 when
            the weights cannot be read or do not fit; IRC448 without the extra `onnx`.
        VerificationError: IRC322.
    """
    require("onnx", _PURPOSE)
    from ...frontends.onnx import OnnxModule

    written = read_folder(folder)
    loaded = None if written.source.is_factory else load(written.source).module
    if not isinstance(loaded, OnnxModule):
        raise UsageError(
            "IRC321",
            f"{folder} was made from {printable(written.source.model)}, which is not an ONNX file",
            help="torch.onnx.export writes modules of torch",
        )
    state = written.state if weights is None else _read_state(weights)
    own = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    for name, tensor in state.items():
        if name not in own or own[name].shape != tensor.shape:
            raise UsageError(
                "IRC323",
                f"{weights or folder} has {name} of shape {list(tensor.shape)}, which the model has not",
                help=f"give a state_dict of the module that {folder} holds",
            )
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)
    return export_onnx(loaded, path)


def _read_state(path: Path) -> dict[str, Tensor]:
    if path.exists() and not path.is_file():
        raise _no_state(path, "is not a file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        line = first_line(error)
        raise _no_state(path, f"cannot be read: {line[:200]}") from error
    if not isinstance(state, dict):
        raise _no_state(path, "holds no state_dict")
    tensors = cast("dict[str, Any]", state)
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise _no_state(path, "holds no state_dict")
    if any(tensor.layout is not torch.strided or tensor.is_meta for tensor in tensors.values()):
        raise _no_state(path, "holds tensors without elements of their own, or sparse ones")
    return tensors


def _no_state(path: Path, why: str) -> UsageError:
    return UsageError(
        "IRC323",
        f"{path} {why}",
        help="write it with torch.save(module.state_dict(), FILE), or as safetensors",
    )
