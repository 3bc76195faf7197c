"""`irc export`: trained weights back into the ONNX file, checked by onnxruntime."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..frontends.onnx import OnnxModule, example_inputs, from_onnx
from ..frontends.onnx.export import check_export_target, write_back
from ..ir import UsageError, VerificationError
from .folder import read_folder
from .loading import load

__all__ = ["ExportReport", "apart", "export_folder", "export_onnx"]

_TOLERANCE = 1e-3
"""Of the largest element of an output: how far onnxruntime may be from the module."""
_SLACK = 4
"""How much farther than the original file from the original module, where that is farther (a variance that
is a difference of large numbers, say)."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it was checked.

    Args:
        path: The file.
        written: How many weights were written.
        checked: Who computed the file's outputs, or why nobody could.
        difference: The largest difference from the module's, as a share of the largest element of the output;
            None where the outputs were not compared.
    """

    path: Path
    written: int
    checked: str
    difference: float | None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return {
            "path": str(self.path),
            "written": self.written,
            "checked": self.checked,
            "difference": self.difference,
        }

    def text(self) -> str:
        """The report for a person."""
        outcome = (
            f"not checked: {self.checked}"
            if self.difference is None
            else f"{self.checked} agrees with the module within {self.difference:.2g} of the largest element"
        )
        return f"written: {self.path} ({self.written} weights); {outcome}"


def export_onnx(module: nn.Module, path: str | os.PathLike[str]) -> ExportReport:
    """Writes the weights of a module that came from an ONNX file back into the graph of that file.

    The graph keeps its names, operator sets and metadata. The new file's outputs are compared with the
    module's in eval mode, on example inputs, before it takes its name.

    Args:
        module: What `from_onnx` returned, or a fitted copy of it.
        path: The new file, `*.onnx`; of models over 1 GiB the weights lie beside it, as `<path>.data`.

    Raises:
        UsageError: IRC320 when the file cannot be written, IRC321 when the module came from no file, or a
            weight has no place in it.
        VerificationError: IRC322 when onnxruntime computes other outputs from the new file.
    """
    if not isinstance(module, OnnxModule) or module.path is None:
        raise UsageError(
            "IRC321",
            f"the {type(module).__name__} came from no ONNX file",
            help="export what irc.from_onnx returned, or what irc.optimize made of it",
        )
    target = Path(path)
    check_export_target(module.path, target)
    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    weights = {name: state[key] for key, name in module.onnx_names.items()}
    with tempfile.TemporaryDirectory(prefix=f".{target.stem}-", dir=target.absolute().parent) as folder:
        draft = Path(folder) / target.name
        write_back(module.path, weights, draft)
        checked, difference = _compare(module, draft)
        if difference is not None and not _is_close(module, difference):
            raise VerificationError(
                "IRC322",
                f"{checked} computes other outputs from the written file: {difference:.3g} of the largest "
                f"element apart, where {_TOLERANCE:g} is allowed",
                help="nothing was written; this is a defect of irc, or of the model's numbers",
            )
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the data before the model that names them
            os.replace(file, target.absolute().parent / file.name)
    return ExportReport(target, len(weights), checked, difference)


def export_folder(folder: Path, weights: Path | None, path: Path) -> ExportReport:
    """Writes the weights of what `irc optimize` wrote, or others for it, back into the ONNX file.

    Args:
        folder: What `irc optimize FILE.onnx -o` wrote.
        weights: A state_dict as safetensors, or saved by `torch.save`; the folder's own weights without it.
        path: See `export_onnx`.

    Raises:
        UsageError: IRC431 when the folder is none of irc's, IRC310 to IRC321 as `export_onnx`, IRC323 when
            the weights cannot be read or do not fit.
        VerificationError: IRC322.
    """
    written = read_folder(folder)
    loaded = load(written.source).module
    if not isinstance(loaded, OnnxModule):
        raise UsageError(
            "IRC321",
            f"{folder} was made from {written.source.model}, which is no ONNX file",
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
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _no_state(path, f"cannot be read: {line[:200]}") from error
    if not isinstance(state, dict):
        raise _no_state(path, "holds no state_dict")
    tensors = cast("dict[str, Any]", state)
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise _no_state(path, "holds no state_dict")
    return tensors


def _no_state(path: Path, why: str) -> UsageError:
    return UsageError(
        "IRC323",
        f"{path} {why}",
        help="write it with torch.save(module.state_dict(), FILE), or as safetensors",
    )


def _compare(module: OnnxModule, path: Path) -> tuple[str, float | None]:
    """Who computed the outputs of the file, and how far they are from the module's."""
    live = _live_node(path)
    if live is not None:
        return f"{live} is in training mode in the file, so that its outputs are random or of the batch", None
    if module.settled or any(shape is None for _, shape, _ in module.input_specs):
        return "its inputs are settled at import, or are lists", None
    inputs = example_inputs(module)
    expected = _evaluated(module, inputs)
    feed = {name: _numpy(x) for (name, _, _), x in zip(module.input_specs, inputs, strict=True)}
    try:
        checked, found = _run(path, feed)
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"onnxruntime cannot run the file ({line[:160]})", None
    return checked, max(apart(a, b) for a, b in zip(expected, found, strict=True))


def _is_close(module: OnnxModule, difference: float) -> bool:
    if difference <= _TOLERANCE:
        return True
    assert module.path is not None
    shapes = {name: shape for name, shape, _ in module.input_specs if shape is not None}
    _, own = _compare(from_onnx(module.path, inputs=shapes), Path(module.path))
    return own is not None and difference <= _SLACK * own


def _live_node(path: Path) -> str | None:
    for node in onnx.load(str(path), load_external_data=False).graph.node:
        if any(a.name == "training_mode" and a.i for a in node.attribute):
            return f"{node.op_type} {node.name}"
    return None


def _evaluated(module: OnnxModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The module's outputs in eval mode; its own mode stays."""
    twin = copy.copy(module)
    twin.__class__ = OnnxModule
    twin.training = False
    with torch.no_grad():
        result = OnnxModule.forward(twin, *inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    return [output for output in outputs if isinstance(output, Tensor)]


def _run(path: Path, feed: Mapping[str, Any]) -> tuple[str, list[Any]]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return f"onnxruntime {ort.__version__}", list(session.run(None, dict(feed)))


def _numpy(tensor: Tensor) -> Any:
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def apart(module_output: Tensor, other_output: Any) -> float:
    """How far two outputs are apart, as a share of the largest element, which counts as 0.001 at least."""
    a, b = module_output.detach().cpu().double().numpy(), np.asarray(other_output).astype(np.float64)
    if a.shape != b.shape:
        return float("inf")
    if not a.size:
        return 0.0
    return float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-3))
