"""A sparse mixture of experts, as Mixtral, with shapes that do not depend on where tokens go."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .registry import Example, benchmark
from .sequences import heads_of, without_heads

__all__ = ["mixtral"]


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions (Su et al. 2021) and few heads of keys and values.

    Args:
        width: Of the states.
        heads: Heads of queries; they divide the width.
        shared: Heads of keys and values; they divide the heads, and each serves several of them.
        sequence: Number of positions.
        base: Of the wavelengths.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, width: int, heads: int, shared: int, sequence: int, base: float = 1e6) -> None:
        super().__init__()
        size = width // heads
        self.heads = heads
        self.shared = shared
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, shared * size, bias=False)
        self.values = nn.Linear(width, shared * size, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        frequencies = base ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(sequence), frequencies).repeat(1, 2)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, sequence, width] to the same shape."""
        q = self.turned(heads_of(self.queries(x), self.heads))
        k = self.turned(heads_of(self.keys(x), self.shared))
        v = heads_of(self.values(x), self.shared)
        served = self.heads // self.shared
        k, v = k.repeat_interleave(served, 1), v.repeat_interleave(served, 1)
        return self.mix(without_heads(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def turned(self, x: Tensor) -> Tensor:
        """[batch, heads, sequence, size], each pair of halves turned by the angle of its position."""
        left, right = x.chunk(2, -1)
        return x * self.cosines + torch.cat([-right, left], -1) * self.sines


class Expert(nn.Module):
    """A perceptron with a gate: SwiGLU (Shazeer 2020).

    Args:
        width: Of the states.
        hidden: Between them.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.expand = nn.Linear(width, hidden, bias=False)
        self.contract = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., width] to the same shape."""
        return self.contract(functional.silu(self.gate(x)) * self.expand(x))


class Mixture(nn.Module):
    """Each token's `chosen` best experts, weighted by a router.

    Every expert computes every token, and weighs nothing where it is not chosen: shapes stay the same.

    Args:
        width: Of the states.
        hidden: Of each expert.
        experts: Number of experts.
        chosen: Experts for a token.
    """

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, sequence, width] to the same shape."""
        weights = self.weights(x)
        results = [expert(x) * weights[..., index, None] for index, expert in enumerate(self.experts)]
        total = results[0]
        for result in results[1:]:
            total = total + result
        return total

    def weights(self, x: Tensor) -> Tensor:
        """[batch, sequence, experts]: sums to 1 over the chosen experts, 0 for the others."""
        scores = self.router(x)
        best, chosen = scores.topk(self.chosen, -1)
        return torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))


class MixtureBlock(nn.Module):
    """A Mixtral block: RMSNorm before attention and before the experts.

    Args:
        attention: Maps [batch, sequence, width] to the same shape.
        mixture: The same.
        width: Of the residual stream.
    """

    def __init__(self, attention: nn.Module, mixture: nn.Module, width: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.attention = attention
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, sequence, width] to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


class LanguageModel(nn.Module):
    """Embedding, blocks, a final norm, and the cross entropy of the next token.

    Args:
        vocabulary: Number of tokens.
        width: Of the residual stream.
        blocks: Map [batch, sequence, width] to the same shape.
    """

    def __init__(self, vocabulary: int, width: int, blocks: list[MixtureBlock]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the scores after each of `tokens`; both are [batch, sequence]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@benchmark
def mixtral(
    *,
    batch: int = 4,
    sequence: int = 128,
    depth: int = 4,
    width: int = 512,
    heads: int = 8,
    shared: int = 2,
    hidden: int = 1792,
    experts: int = 8,
    vocabulary: int = 32000,
) -> Example:
    """Mixtral (Jiang et al. 2024) in small: two of eight experts, rotary positions, grouped queries."""
    blocks = [
        MixtureBlock(
            RotaryAttention(width, heads, shared, sequence), Mixture(width, hidden, experts, 2), width
        )
        for _ in range(depth)
    ]
    tokens = torch.randint(vocabulary, (batch, sequence + 1))
    return LanguageModel(vocabulary, width, blocks), (tokens[:, :-1].clone(), tokens[:, 1:].clone())
