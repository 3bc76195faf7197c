"""The ways to export: torch's two exporters, their settings and opsets."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .subjects import Subject

__all__ = ["OPSETS", "WAYS", "ExportFailed", "Way", "export"]

OPSETS = (18, 19, 20, 21, 22, 23)


class ExportFailed(Exception):
    """torch cannot write the file; the text is its reason."""


@dataclass(frozen=True)
class Way:
    """How a file is written.

    Args:
        exporter: `kept` is `dynamo=True, optimize=False`, `dynamo` is `dynamo=True`, and `legacy` is
            `dynamo=False`.
        opset: Its operator set; `None` is the exporter's default.
    """

    exporter: str
    opset: int | None

    @property
    def name(self) -> str:
        """As the tables show it."""
        return self.exporter if self.opset is None else f"{self.exporter} {self.opset}"


WAYS = (
    *(Way("kept", opset) for opset in OPSETS),
    Way("dynamo", OPSETS[0]),
    Way("dynamo", OPSETS[-1]),
    Way("legacy", None),
)


def export(subject: Subject, way: Way, path: Path) -> None:
    """Writes a model as an ONNX file, in eval mode.

    Args:
        subject: The model.
        way: How.
        path: Where the file goes; large weights go beside it.

    Raises:
        ExportFailed: torch's exporter does.
    """
    settings: dict[str, Any] = {"opset_version": way.opset, "verbose": False}
    if way.exporter == "legacy":
        settings |= {"dynamo": False, "args": tuple(subject.inputs.values())}
    else:
        settings |= {"dynamo": True, "args": (), "kwargs": dict(subject.inputs)}
        settings["optimize"] = way.exporter != "kept"
    with _quiet(), _only_given(subject) if way.exporter == "legacy" else contextlib.nullcontext():
        try:
            torch.onnx.export(subject.module, f=str(path), input_names=list(subject.inputs), **settings)
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise ExportFailed(f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]) from error


@contextlib.contextmanager
def _only_given(subject: Subject) -> Generator[None]:
    """The forward without other arguments: of each default, the older exporter makes an input."""
    forward = subject.module.forward

    def given(*tensors: Tensor) -> Any:
        return forward(**dict(zip(subject.inputs, tensors, strict=True)))

    subject.module.forward = given
    try:
        yield
    finally:
        del subject.module.forward


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Neither warnings nor the exporters' prints, for a while."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
