"""Sequence models: GPT-2 blocks, an LSTM classifier, and encoder-decoders as T5 and BART."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .images import Classifier
from .registry import Example, benchmark

__all__ = ["bart", "gpt2", "gpt2_no_dropout", "gpt2x24", "gpt2x24_no_dropout", "lstm", "t5"]


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[batch, sequence, heads * size] as [batch, heads, sequence, size]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def without_heads(x: Tensor) -> Tensor:
    """[batch, heads, sequence, size] as [batch, sequence, heads * size]."""
    return x.transpose(1, 2).flatten(2)


# ---------------------------------------------------------------------- GPT-2


class TransformerBlock(nn.Module):
    """A GPT-2 block: LayerNorm before causal attention and before the perceptron (Radford et al. 2019).

    Args:
        width: Of the residual stream.
        heads: Attention heads; they divide the width.
        dropout: Rate on what is added to the stream.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, sequence, width] to the same shape."""
        x = x + self.dropout(self.mix(self.attend(self.norm1(x))))
        y = functional.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.contract(y))

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention of [batch, sequence, width], the heads side by side in the result."""
        q, k, v = (heads_of(part, self.heads) for part in self.queries_keys_values(x).chunk(3, 2))
        return without_heads(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class TransformerStack(nn.Module):
    """Blocks, a final LayerNorm, and the mean square of what comes out.

    The final weights are drawn about 1: were they all 1, the mean square would be too, without a gradient.

    Args:
        depth: Number of blocks.
        width: Of the residual stream.
        heads: Attention heads of each block.
        dropout: Rate in the blocks.
    """

    def __init__(self, depth: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.norm.weight, 1.0, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the final states, for embedded inputs [batch, sequence, width]."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x).pow(2).mean()


@benchmark
def gpt2(
    *,
    batch: int = 4,
    sequence: int = 256,
    depth: int = 6,
    width: int = 768,
    heads: int = 12,
    dropout: float = 0.1,
) -> Example:
    """Six GPT-2 blocks over embedded inputs [batch, sequence, width]; no vocabulary."""
    return TransformerStack(depth, width, heads, dropout), (torch.randn(batch, sequence, width),)


@benchmark
def gpt2_no_dropout(
    *, batch: int = 4, sequence: int = 256, depth: int = 6, width: int = 768, heads: int = 12
) -> Example:
    """Six GPT-2 blocks without dropout."""
    return gpt2(batch=batch, sequence=sequence, depth=depth, width=width, heads=heads, dropout=0.0)


@benchmark
def gpt2x24(
    *, batch: int = 4, sequence: int = 256, depth: int = 24, width: int = 768, heads: int = 12
) -> Example:
    """Twenty-four GPT-2 blocks with dropout 0.1."""
    return gpt2(batch=batch, sequence=sequence, depth=depth, width=width, heads=heads)


@benchmark
def gpt2x24_no_dropout(
    *, batch: int = 4, sequence: int = 256, depth: int = 24, width: int = 768, heads: int = 12
) -> Example:
    """Twenty-four GPT-2 blocks without dropout."""
    return gpt2(batch=batch, sequence=sequence, depth=depth, width=width, heads=heads, dropout=0.0)


# ---------------------------------------------------------------------- LSTM


class TextClassifier(nn.Module):
    """Embedding, a two-layer bidirectional LSTM, the mean over time, and a linear head.

    Args:
        vocabulary: Number of tokens.
        embedding: Width of the embedding.
        hidden: Width of each direction.
        classes: Number of classes.
        dropout: Rate between the two layers.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(
            embedding, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=dropout
        )
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [batch, sequence] to scores [batch, classes]."""
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states.mean(1))


@benchmark
def lstm(
    *,
    batch: int = 32,
    sequence: int = 32,
    vocabulary: int = 5000,
    embedding: int = 128,
    hidden: int = 256,
    classes: int = 4,
    dropout: float = 0.3,
) -> Example:
    """An LSTM text classifier for tokens [batch, sequence] and labels [batch]."""
    model = TextClassifier(vocabulary, embedding, hidden, classes, dropout)
    tokens = torch.randint(vocabulary, (batch, sequence))
    return Classifier(model), (tokens, torch.randint(classes, (batch,)))


# ---------------------------------------------------------------------- encoder and decoder


class SequenceToSequence(nn.Module):
    """An encoder and a decoder with one embedding for the inputs of both and for the scores.

    Args:
        vocabulary: Number of tokens.
        width: Of the embedding.
        encoder: Maps embedded tokens [batch, sequence, width] to states of the same shape.
        decoder: The same, given the encoder's states too.
        deviation: Standard deviation of the embedding at the start.
        scale: Of the decoder's states before they become scores, if there is one.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        encoder: nn.Module,
        decoder: nn.Module,
        *,
        deviation: float = 1.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, 0.0, deviation)
        self.encoder = encoder
        self.decoder = decoder
        self.scale = scale

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the scores after each of `target`; all are tokens [batch, sequence]."""
        memory = self.encoder(self.embedding(source))
        states = self.decoder(self.embedding(target), memory)
        if self.scale is not None:
            states = states * self.scale
        scores = functional.linear(states, self.embedding.weight)
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _translated(model: SequenceToSequence, batch: int, sequence: int) -> Example:
    """The model with tokens of a source, of a target, and of the target one token on."""
    tokens = torch.randint(model.embedding.num_embeddings, (2, batch, sequence + 1))
    return model, (tokens[0, :, 1:].clone(), tokens[1, :, :-1].clone(), tokens[1, :, 1:].clone())


# ---------------------------------------------------------------------- T5


class RelativeBias(nn.Module):
    """What is added to the scores of attention, by the distance between two positions.

    Args:
        sequence: Number of positions.
        heads: Attention heads.
        causal: Only earlier positions are seen.
        buckets: Number of distances that are told apart; far ones share logarithmic buckets.
        furthest: The distance from which on all are in one bucket.
    """

    buckets: Tensor
    mask: Tensor

    def __init__(
        self, sequence: int, heads: int, *, causal: bool, buckets: int = 32, furthest: int = 128
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        positions = torch.arange(sequence)
        distance = positions - positions[:, None]
        if causal:
            found = _bucket((-distance).clamp(min=0), buckets, furthest)
            mask = torch.zeros(sequence, sequence).masked_fill(distance > 0, -math.inf)
        else:
            found = _bucket(distance.abs(), buckets // 2, furthest) + buckets // 2 * (distance > 0)
            mask = torch.zeros(sequence, sequence)
        self.register_buffer("buckets", found, persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self) -> Tensor:
        """[heads, sequence, sequence]: what each position (rows) adds for each other one."""
        return self.table(self.buckets).permute(2, 0, 1) + self.mask


def _bucket(distance: Tensor, buckets: int, furthest: int) -> Tensor:
    """The bucket of each distance: half of the buckets hold one each, the others grow to `furthest`."""
    exact = buckets // 2
    share = torch.log(distance.clamp(min=1) / exact) / math.log(furthest / exact)
    far = exact + (share * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class RelativeAttention(nn.Module):
    """Attention without scale and without biases in its projections.

    Args:
        width: Of the states.
        heads: They divide the width.
        dropout: Rate on the weights of attention.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.queries.weight, 0.0, (width * width / heads) ** -0.5)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attention from `x` to `memory`, both [batch, sequence, width], with `bias` added to the scores."""
        q, k, v = (
            heads_of(part, self.heads) for part in (self.queries(x), self.keys(memory), self.values(memory))
        )
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        return self.mix(without_heads(self.dropout(scores.softmax(-1)) @ v))


class T5Block(nn.Module):
    """A T5 block: RMSNorm before attention, before attention to the encoder, before the perceptron.

    Args:
        width: Of the residual stream.
        heads: Attention heads.
        dropout: Rate on weights, inside the perceptron, and on what is added to the stream.
        crosses: Whether it attends to an encoder.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, crosses: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6)
        self.attention = RelativeAttention(width, heads, dropout)
        self.norm2 = nn.RMSNorm(width, eps=1e-6) if crosses else None
        self.cross = RelativeAttention(width, heads, dropout) if crosses else None
        self.norm3 = nn.RMSNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        """Maps [batch, sequence, width] to the same shape; `memory` are the encoder's states."""
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, bias))
        if self.norm2 is not None and self.cross is not None and memory is not None:
            x = x + self.dropout(self.cross(self.norm2(x), memory))
        y = self.dropout(functional.relu(self.expand(self.norm3(x))))
        return x + self.dropout(self.contract(y))


class T5Stack(nn.Module):
    """The encoder or the decoder of T5 (Raffel et al. 2020): all blocks share one relative bias.

    Args:
        depth: Number of blocks.
        width: Of the residual stream.
        heads: Attention heads.
        sequence: Number of positions.
        dropout: Rate everywhere.
        decodes: Whether it is causal and attends to an encoder.
    """

    def __init__(
        self, depth: int, width: int, heads: int, sequence: int, dropout: float, *, decodes: bool
    ) -> None:
        super().__init__()
        self.bias = RelativeBias(sequence, heads, causal=decodes)
        self.blocks = nn.ModuleList(T5Block(width, heads, dropout, crosses=decodes) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Maps embedded tokens [batch, sequence, width] to states of the same shape."""
        x, bias = self.dropout(x), self.bias()
        for block in self.blocks:
            x = block(x, bias, memory)
        return self.dropout(self.norm(x))


@benchmark
def t5(
    *,
    batch: int = 4,
    sequence: int = 128,
    depth: int = 6,
    width: int = 512,
    heads: int = 8,
    vocabulary: int = 32128,
    dropout: float = 0.1,
) -> Example:
    """T5, small: relative position bias, RMSNorm, no biases, one embedding for inputs and scores."""
    encoder = T5Stack(depth, width, heads, sequence, dropout, decodes=False)
    decoder = T5Stack(depth, width, heads, sequence, dropout, decodes=True)
    model = SequenceToSequence(vocabulary, width, encoder, decoder, scale=width**-0.5)
    return _translated(model, batch, sequence)


# ---------------------------------------------------------------------- BART


class Attention(nn.Module):
    """Scaled attention with biases in its projections.

    Args:
        width: Of the states.
        heads: They divide the width.
        causal: Only earlier positions are seen.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.queries = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Attention from `x` to `memory`, both [batch, sequence, width]."""
        q, k, v = (
            heads_of(part, self.heads) for part in (self.queries(x), self.keys(memory), self.values(memory))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.mix(without_heads(mixed))


class BartBlock(nn.Module):
    """A BART block: LayerNorm after attention, after attention to the encoder, after the perceptron.

    Args:
        width: Of the residual stream.
        heads: Attention heads.
        dropout: Rate on what is added to the stream.
        decodes: Whether it is causal and attends to an encoder.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, decodes: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=decodes)
        self.norm1 = nn.LayerNorm(width)
        self.cross = Attention(width, heads) if decodes else None
        self.norm2 = nn.LayerNorm(width) if decodes else None
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.norm3 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Maps [batch, sequence, width] to the same shape; `memory` are the encoder's states."""
        x = self.norm1(x + self.dropout(self.attention(x, x)))
        if self.norm2 is not None and self.cross is not None and memory is not None:
            x = self.norm2(x + self.dropout(self.cross(x, memory)))
        return self.norm3(x + self.dropout(self.contract(functional.gelu(self.expand(x)))))


class BartStack(nn.Module):
    """The encoder or the decoder of BART (Lewis et al. 2020), with learned positions.

    Args:
        depth: Number of blocks.
        width: Of the residual stream.
        heads: Attention heads.
        sequence: Number of positions.
        dropout: Rate after the positions and in the blocks.
        decodes: Whether it is causal and attends to an encoder.
    """

    def __init__(
        self, depth: int, width: int, heads: int, sequence: int, dropout: float, *, decodes: bool
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(sequence, width))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(BartBlock(width, heads, dropout, decodes=decodes) for _ in range(depth))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Maps embedded tokens [batch, sequence, width] to states of the same shape."""
        x = self.dropout(self.norm(x + self.positions))
        for block in self.blocks:
            x = block(x, memory)
        return x


@benchmark
def bart(
    *,
    batch: int = 4,
    sequence: int = 128,
    depth: int = 6,
    width: int = 512,
    heads: int = 8,
    vocabulary: int = 50265,
    dropout: float = 0.1,
) -> Example:
    """BART with the width of T5's small one: learned positions, one embedding for inputs and scores."""
    encoder, decoder = (
        BartStack(depth, width, heads, sequence, dropout, decodes=decodes) for decodes in (False, True)
    )
    model = SequenceToSequence(vocabulary, width, encoder, decoder, deviation=0.02)
    return _translated(model, batch, sequence)
