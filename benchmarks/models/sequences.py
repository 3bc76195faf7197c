"""Sequence models: GPT-2 blocks, an LSTM classifier, and T5 of `transformers`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .images import Classifier
from .registry import Example, benchmark, transformers_for

__all__ = ["TransformerBlock", "gpt2", "gpt2_no_dropout", "lstm", "t5"]


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
        parts = self.queries_keys_values(x).chunk(3, 2)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


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


# ---------------------------------------------------------------------- T5


class Translator(nn.Module):
    """T5 of `transformers` with its loss.

    Args:
        model: A model for conditional generation.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the scores after each of `target`; all are tokens [batch, sequence]."""
        return self.model(input_ids=source, decoder_input_ids=target, labels=labels, use_cache=False).loss


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
    """T5, small (Raffel et al. 2020), with tokens of a source, a target, and the target one token on."""
    transformers = transformers_for("T5")
    configuration = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=depth,
        num_heads=heads,
        dropout_rate=dropout,
        use_cache=False,
    )
    model = Translator(transformers.T5ForConditionalGeneration(configuration))
    tokens = torch.randint(vocabulary, (2, batch, sequence + 1))
    return model, (tokens[0, :, 1:].clone(), tokens[1, :, :-1].clone(), tokens[1, :, 1:].clone())
