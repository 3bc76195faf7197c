"""What becomes of each weight and constant of an ONNX file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..frontends.onnx import OnnxModule
from ..frontends.onnx.module import Stored

__all__ = ["StoredReport", "stored_of"]


@dataclass(frozen=True, slots=True)
class StoredReport:
    """The weights and constants of a file, those that train first.

    Args:
        rows: One for each; none where the model is no ONNX file.
    """

    rows: tuple[Stored, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as JSON-ready data."""
        return [row._asdict() | {"shape": list(row.shape)} for row in self.rows]

    def table(self) -> str:
        """The rows for a person; empty where there is none."""
        if not self.rows:
            return ""
        lines = ["weights and constants of the file (change one with --role NAME=ROLE):"]
        for row in self.rows:
            of_type = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
            lines.append(f"{row.role:>12}  {row.name:<44} {of_type:<26} {row.why}")
        return "\n".join(lines) + "\n"


def stored_of(module: nn.Module) -> StoredReport:
    """The report for a model; empty unless it is an ONNX file's."""
    rows = module.stored if isinstance(module, OnnxModule) else []
    order = ("parameter", "buffer", "constant")
    return StoredReport(tuple(sorted(rows, key=lambda row: order.index(row.role))))
