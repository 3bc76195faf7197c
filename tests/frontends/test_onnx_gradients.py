"""Gradients of operators whose arithmetic is written here, against finite differences in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

from irc.frontends.onnx import from_onnx

# The body of a graph from `x`, whose shape comes first.
CASES = [
    ("3,6,1", "y = DFT<axis=1, onesided=1>(x)"),
    ("3,6,2", "n = Constant<value_int=8>() y = DFT<axis=1>(x, n)"),
    ("3,5,2", "y = DFT<axis=1, inverse=1>(x)"),
    ("3,5,2", "y = DFT<axis=1, inverse=1, onesided=1>(x)"),
    ("2,12,1", "n = Constant<value_int=4>() s = Constant<value_int=3>() y = STFT(x, s, , n)"),
    ("4,3", "n = Constant<value_ints=[2,4,1]>() y = ReverseSequence(x, n)"),
    ("3,4", "n = Constant<value_ints=[0,1,1]>() b = Cast<to=9>(n) y = Compress<axis=0>(x, b)"),
    ("3,4", "y = Unique(x)"),
    ("2,3,3", "y = Det(x)"),
]


@pytest.mark.parametrize(("shape", "body"), CASES, ids=[body.split("y = ")[1] for _, body in CASES])
def test_gradient_is_that_of_differences(shape: str, body: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (double[{shape}] x) => (double[?] y) {{ {body} }}'
    )
    onnx.save(model, str(tmp_path / "m.onnx"))
    module: Any = from_onnx(tmp_path / "m.onnx")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn([int(n) for n in shape.split(",")], dtype=torch.float64, generator=generator)

    def weighted(x: Tensor) -> Tensor:
        y = module(x)
        return y * torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)

    assert torch.autograd.gradcheck(weighted, x.requires_grad_())
