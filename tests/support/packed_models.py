"""Models with adapters beside linear layers whose weights are frozen and packed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

logging.getLogger("torchao").setLevel(logging.ERROR)  # of libraries for accelerators that are not there
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("torchao")
    import bitsandbytes
    import torchao.quantization as torchao

__all__ = ["SCHEMES", "Adapted", "bitsandbytes", "packed_model", "torchao"]


def _four_bits(kind: str, *, nested: bool) -> Callable[[int, int, torch.dtype], nn.Module]:
    def layer(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
        return bitsandbytes.nn.Linear4bit(
            inputs, outputs, bias=False, quant_type=kind, compress_statistics=nested
        )

    return layer


def _eight_bits(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    return bitsandbytes.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)


def _by_torchao(config: Any) -> Callable[[int, int, torch.dtype], nn.Module]:
    def layer(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
        linear = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        linear.requires_grad_(False)
        torchao.quantize_(linear, config)
        return linear

    return layer


_INT4: torch.dtype = torch.int4  # pyright: ignore[reportAttributeAccessIssue]

SCHEMES: dict[str, Callable[[int, int, torch.dtype], nn.Module]] = {
    "nf4": _four_bits("nf4", nested=False),
    "nf4, nested": _four_bits("nf4", nested=True),
    "fp4": _four_bits("fp4", nested=False),
    "int8": _eight_bits,
    "torchao int8": _by_torchao(torchao.Int8WeightOnlyConfig()),
    "torchao float8": _by_torchao(torchao.Float8WeightOnlyConfig()),
    "torchao int4": _by_torchao(torchao.IntxWeightOnlyConfig(weight_dtype=_INT4)),
}
"""Ways to make a packed linear layer, by name."""


class Adapted(nn.Module):
    """A frozen layer, and an adapter beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(4, inputs, dtype=dtype) / 10)
        self.up = nn.Parameter(torch.randn(outputs, 4, dtype=dtype) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def packed_model(scheme: str, dtype: torch.dtype = torch.float32, blocks: int = 3) -> nn.Sequential:
    """Perceptrons of width 32 with 64 hidden units, whose weights a scheme packs."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [Adapted(SCHEMES[scheme](32, 64, dtype), 32, 64, dtype), nn.GELU()]
        layers += [Adapted(SCHEMES[scheme](64, 32, dtype), 64, 32, dtype)]
    return nn.Sequential(*layers).to("cpu")  # packs those of bitsandbytes
