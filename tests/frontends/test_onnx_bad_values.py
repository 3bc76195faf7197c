"""Settings that onnxruntime refuses are refused, and what both take gives the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from support.onnx_bad_values import CASES, Case, runtime_result, spoiled
from torch import Tensor

from irc.frontends.onnx import from_onnx
from irc.ir.errors import IrcError

_MORE = (("Pad", "reflect"), ("LRN", None))
"""Operators, with their modes, of which irc takes more than onnxruntime, as the standard does: pads that are
larger than the axis, and windows of an even number of channels."""

_QUICK = ("Unsqueeze",)
"""Operators of which `make test` tries all settings that are wrong."""


def imported_result(case: Case, folder: Path) -> list[Tensor] | IrcError:
    """The results of irc in eval mode, or its refusal."""
    path = folder / "m.onnx"
    onnx.save(case.model(), str(path))
    try:
        with torch.no_grad():
            found = from_onnx(path).eval()(*map(torch.from_numpy, case.feed().values()))
    except IrcError as error:
        return error
    return [found] if isinstance(found, Tensor) else list(found)


def check(case: Case, folder: Path) -> None:
    what = f"{case.op} {dict(case.attributes)} {dict(case.settings)}"
    expected, found = runtime_result(case), imported_result(case, folder)
    if isinstance(found, IrcError):
        assert "the_node" in str(found), what
        return
    if isinstance(expected, str):
        assert (case.op, case.attributes.get("mode")) in _MORE, f"{what} is taken; onnxruntime: {expected}"
        return
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5, err_msg=what)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.opset}")
def test_a_node_that_is_right(case: Case, tmp_path: Path) -> None:
    assert not isinstance(runtime_result(case), str)
    assert not isinstance(imported_result(case, tmp_path), IrcError)
    check(case, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.op in _QUICK else pytest.mark.slow, id=f"{case.op}-{case.opset}")
        for case in CASES
    ],
)
def test_settings_that_are_wrong(case: Case, tmp_path: Path) -> None:
    for wrong in spoiled(case):
        check(wrong, tmp_path)
