"""Frozen linear layers in 4 bits, as bitsandbytes computes them, with weights or without."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from ...ir import UsageError
from ...torch_support.without_data import lacks_data

__all__ = ["FourBitLinear"]

_BLOCK, _SCALES = 64, 256
"""The numbers that share a scale, and the scales that share one, as in bitsandbytes and the paper."""


class FourBitLinear(nn.Module):
    """A frozen linear layer in NF4 with scales of 8 bits.

    Args:
        weight: Of shape [outputs, inputs], with data or without. Its element type is that of the products.
        bias: Of shape [outputs], or None.

    Raises:
        UsageError: IRC587 if bitsandbytes cannot be imported.

    Source:
        Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs (2023), sections 3 and 4.
    """

    data: Tensor
    absmax: Tensor
    code: Tensor
    offset: Tensor
    nested_absmax: Tensor
    nested_code: Tensor

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        _bitsandbytes()
        self.shape, self.dtype, self.bias = torch.Size(weight.shape), weight.dtype, bias
        for name, tensor in (_types if lacks_data(weight) else _packed)(weight).items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        """An empty tensor of the type of the products, at which some models look."""
        return self.code.new_empty(0, dtype=self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The rows of `x` times the weight, of shape [..., outputs]."""
        library = _bitsandbytes()
        state = library.functional.QuantState
        scales = state(self.nested_absmax, blocksize=_SCALES, code=self.nested_code, dtype=torch.float32)
        quantised = state(
            self.absmax,
            shape=self.shape,
            code=self.code,
            blocksize=_BLOCK,
            quant_type="nf4",
            dtype=self.dtype,
            offset=self.offset,
            state2=scales,
        )
        return library.matmul_4bit(x, self.data, bias=self.bias, quant_state=quantised)


def _bitsandbytes() -> Any:
    try:
        return importlib.import_module("bitsandbytes")
    except Exception as error:  # of its libraries too
        raise UsageError(
            "IRC587",
            f"weights in 4 bits are those of bitsandbytes, which cannot be imported: {error}",
            help="pip install bitsandbytes, or give --train lora:r=...",
        ) from error


def _types(weight: Tensor) -> dict[str, Tensor]:
    """The parts of a packed weight without data."""
    blocks = -(-weight.numel() // _BLOCK)
    return {
        "data": weight.new_empty((-(-weight.numel() // 2), 1), dtype=torch.uint8),
        "absmax": weight.new_empty(blocks, dtype=torch.uint8),
        "code": weight.new_empty(16, dtype=torch.float32),
        "offset": weight.new_empty((), dtype=torch.float32),
        "nested_absmax": weight.new_empty(-(-blocks // _SCALES), dtype=torch.float32),
        "nested_code": weight.new_empty(256, dtype=torch.float32),
    }


def _packed(weight: Tensor) -> dict[str, Tensor]:
    data, state = _bitsandbytes().functional.quantize_4bit(
        weight.detach(), blocksize=_BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return {
        "data": data,
        "absmax": state.absmax,
        "code": state.code,
        "offset": state.offset,
        "nested_absmax": state.state2.absmax,
        "nested_code": state.state2.code,
    }
