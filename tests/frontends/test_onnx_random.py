"""Random operators draw anew in each run, from torch's generator."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from irc.frontends.onnx import OnnxModule, from_onnx
from irc.ir.errors import UnsupportedError


def imported(body: str, folder: Path) -> OnnxModule:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 22]> {body}')
    onnx.save(model, str(folder / "m.onnx"))
    return from_onnx(folder / "m.onnx")


def drawn_twice(module: OnnxModule, *inputs: Tensor) -> Tensor:
    """What a run draws; another draws something else, and the same seed the same."""
    torch.manual_seed(0)
    first, second = module(*inputs), module(*inputs)
    torch.manual_seed(0)
    assert torch.equal(module(*inputs), first) and not torch.equal(first, second)
    return first


# operator with attributes, mean, deviation
CASES = [
    ("RandomUniform<shape=[100,100], low=2.0, high=4.0>()", 3.0, 2 / 12**0.5),
    ("RandomNormal<shape=[100,100], mean=2.0, scale=3.0>()", 2.0, 3.0),
    ("RandomUniformLike<low=-1.0>(x)", 0.0, 2 / 12**0.5),
    ("RandomNormalLike<dtype=1>(x)", 0.0, 1.0),
    ("Bernoulli<dtype=1>(x)", 0.25, 0.1875**0.5),
]


@pytest.mark.parametrize(("operator", "mean", "deviation"), CASES)
def test_moments_are_those_asked_for(operator: str, mean: float, deviation: float, tmp_path: Path) -> None:
    body = f"g (float[100,100] x) => (float[100,100] y) {{ n = {operator} y = Add(n, x) }}"
    x = torch.full((100, 100), 0.25)
    drawn = drawn_twice(imported(body, tmp_path), x) - x
    assert drawn.shape == (100, 100) and drawn.dtype is torch.float32
    assert abs(float(drawn.mean()) - mean) < 0.1 and abs(float(drawn.std()) - deviation) < 0.1


def test_multinomial_draws_by_the_logarithms_of_weights(tmp_path: Path) -> None:
    module = imported(
        "g (float[1,3] x) => (int32[1,4000] y) { y = Multinomial<sample_size=4000>(x) }", tmp_path
    )
    y = drawn_twice(module, torch.tensor([[1.0, 2.0, 5.0]]).log())
    counts = torch.bincount(y.reshape(-1).long()) / 4000
    assert y.dtype is torch.int32 and y.shape == (1, 4000)
    torch.testing.assert_close(counts, torch.tensor([0.125, 0.25, 0.625]), atol=0.03, rtol=0)


def test_whole_random_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="int64"):
        imported("g () => (int64[4] y) { y = RandomUniform<shape=[4], dtype=7>() }", tmp_path)
