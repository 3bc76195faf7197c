"""Small models that between them take the paths for a GPU; each returns its scalar loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["ATTENTION", "Example", "attention", "convolutions", "layers", "random_numbers"]

Example = tuple[nn.Module, tuple[Any, ...]]

ATTENTION = "_scaled_dot_product_flash_attention"
"""The beginning of the name of flash attention, on a GPU and on a CPU."""


def convolutions(device: torch.device) -> Example:
    """Convolutions with BatchNorm, whose kernels and workspaces the device's library chooses."""
    block = [layer for _ in range(6) for layer in _block(32)]
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *block, nn.Conv2d(32, 8, 3, stride=2, groups=2))
    return _Squared(net).to(device), (torch.randn(8, 3, 40, 40, device=device),)


def _block(channels: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(channels), nn.ReLU()]


def attention(device: torch.device) -> Example:
    """Blocks of flash attention: in half precision with dropout on a GPU, in single precision on a CPU."""
    on_gpu = device.type == "cuda"
    blocks = nn.Sequential(*(_Attention(128, 2, 0.1 if on_gpu else 0.0) for _ in range(3)))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return _Squared(blocks).to(device, dtype), (torch.randn(4, 128, 128, device=device, dtype=dtype),)


def random_numbers(device: torch.device) -> Example:
    """Dropout and noise of several kinds: what moves the generator of the device."""
    return _Noisy().to(device), (torch.randn(64, 256, device=device),)


def layers(device: torch.device) -> Example:
    """Linear layers and norms, whose sizes are no multiples of the allocator's blocks."""
    wide = [part for _ in range(6) for part in (nn.Linear(301, 301), nn.LayerNorm(301), nn.GELU())]
    return _Squared(nn.Sequential(*wide)).to(device), (torch.randn(1023, 301, device=device),)


class _Squared(nn.Module):
    """The mean of the squares of what a module returns."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float().square().mean()


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found = functional.scaled_dot_product_attention(*parts, dropout_p=self.dropout, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.odd = nn.Parameter(torch.zeros(63, 255))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(torch.tanh(layer(x)), 0.2)
            x = x + 0.1 * torch.randn_like(x) * torch.rand_like(x)
        kept = torch.bernoulli(torch.full_like(self.odd, 0.7))
        return (x[1:, 1:] * kept + self.odd).square().mean()
