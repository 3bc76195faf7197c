"""A report of an ONNX file: its inputs and outputs, and what becomes of each of its weights and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..frontends.onnx import OnnxModule, output_shapes
from ..frontends.onnx.binding import Shape, describe
from ..frontends.onnx.module import Stored
from ..ir import printable

__all__ = ["FileReport", "report_of"]


@dataclass(frozen=True, slots=True)
class FileReport:
    """An ONNX file as a module sees it.

    Args:
        inputs: The type of each, such as `float32[batch, 3, 224, 224]`.
        outputs: The shape of each over the symbols of the inputs; `None` where data decide, or for a list.
        open_axes: The symbols that nothing has bound.
        undrawn: The inputs for which no example is drawn: lists, strings, values that may be absent.
        stored: Weights and constants, those that train first.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, Shape | None]
    open_axes: Sequence[str]
    undrawn: Sequence[str]
    stored: Sequence[Stored]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return {
            "inputs": dict(self.inputs),
            "outputs": {name: None if shape is None else list(shape) for name, shape in self.outputs.items()},
            "weights": [row._asdict() | {"shape": list(row.shape)} for row in self.stored],
        }

    def table(self) -> str:
        """The report for a person."""
        lines = [f"{'input':>12}  {printable(name):<44} {kind}" for name, kind in self.inputs.items()]
        for name, shape in self.outputs.items():
            shown = "not known before a run" if shape is None else describe(shape)
            lines.append(f"{'output':>12}  {printable(name):<44} {shown}")
        if self.stored:
            lines.append("weights and constants of the file (change one with --role NAME=ROLE):")
        for row in self.stored:
            of_type = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
            lines.append(f"{row.role:>12}  {printable(row.name):<44} {of_type:<26} {row.why}")
        if self.open_axes:
            names = printable(", ".join(self.open_axes))
            lines.append(f"to see what a step needs, bind {names} with --batch or --input")
        if self.undrawn:
            names = printable(", ".join(self.undrawn))
            lines.append(f"no example is drawn for {names}, so that no step is measured")
        return "\n".join(lines)


def report_of(module: nn.Module) -> FileReport | None:
    """The report for a model; `None` unless it is an ONNX file's."""
    if not isinstance(module, OnnxModule):
        return None
    order = ("parameter", "buffer", "constant")
    return FileReport(
        {name: _type(shape, dtype) for name, shape, dtype in module.input_specs},
        output_shapes(module),
        list(
            dict.fromkeys(n for _, shape, _ in module.input_specs for n in shape or () if isinstance(n, str))
        ),
        [name for name, shape, _ in module.input_specs if shape is None],
        sorted(module.stored, key=lambda row: order.index(row.role)),
    )


def _type(shape: Shape | None, dtype: object) -> str:
    if dtype is None:
        return "strings"
    return f"{str(dtype).removeprefix('torch.')}{'' if shape is None else describe(shape)}"
