"""Models of sequences, sets, graphs and functions of our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from .registry import Instance, Maker, architecture, enter

# ---------------------------------------------------------------------- recurrent


class Tagger(nn.Module):
    """An embedding, a recurrent network, and a class for each token.

    Args:
        recurrent: Maps [batch, sequence, 8] to [batch, sequence, width] and a state.
        width: Of its result.
    """

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=0)
        self.recurrent = recurrent
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: Tensor, tags: Tensor) -> dict[str, Any]:
        """The loss, the scores, and the last state as the recurrent network returns it."""
        states, last = self.recurrent(self.embedding(tokens))
        scores = self.head(states)
        loss = functional.cross_entropy(scores.mT, tags, label_smoothing=0.1)
        return {"loss": loss, "scores": scores.detach(), "state": last}


def _tagged(recurrent: nn.Module, width: int) -> Instance:
    tokens, tags = torch.randint(30, (16, 6)), torch.randint(5, (16, 6))
    return Instance(Tagger(recurrent, width), (tokens, tags))


class Cells(nn.Module):
    """LSTM cells that a Python loop runs.

    Args:
        width: Of the state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [batch, sequence, 8] to [batch, sequence, width] and the last state."""
        state = None
        found: list[Tensor] = []
        for step in x.unbind(1):
            hidden, memory = self.cell(step, state)
            state = self.norm(hidden), memory
            found.append(state[0])
        return torch.stack(found, 1), found[-1]


class ConvolutionalLSTM(nn.Module):
    """An LSTM whose gates are convolutions (Shi et al. 2015).

    Args:
        width: Channels of the state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(1 + width, 4 * width, 3, padding=1)
        self.head = nn.Conv2d(width, 1, 1)
        self.width = width

    def forward(self, frames: Tensor) -> Tensor:
        """The mean square error of each next frame, for frames [batch, time, 1, h, w]."""
        hidden = memory = frames.new_zeros(len(frames), self.width, *frames.shape[-2:])
        total = frames.new_zeros(())
        for now, following in zip(frames.unbind(1)[:-1], frames.unbind(1)[1:], strict=True):
            i, f, o, g = self.gates(torch.cat([now, hidden], 1)).chunk(4, 1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * memory.tanh()
            total += functional.mse_loss(self.head(hidden), following)
        return total


class WaveNet(nn.Module):
    """Gated dilated causal convolutions with weight norm (van den Oord et al. 2016).

    Args:
        width: Channels.
        depth: Layers; the dilation doubles.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        norm = parametrizations.weight_norm
        self.enter = nn.Embedding(32, width)
        self.gates = nn.ModuleList(
            norm(nn.Conv1d(width, 2 * width, 2, dilation=1 << k)) for k in range(depth)
        )
        self.mixes = nn.ModuleList(norm(nn.Conv1d(width, 2 * width, 1)) for _ in range(depth))
        self.leave = nn.Conv1d(width, 32, 1)

    def forward(self, samples: Tensor) -> Tensor:
        """The cross entropy of each next sample, for quantized samples [batch, time]."""
        x = self.enter(samples[:, :-1]).mT
        skipped = torch.zeros_like(x)
        for index, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            value, opening = gate(functional.pad(x, (1 << index, 0))).chunk(2, 1)
            more, skip = mix(value.tanh() * opening.sigmoid()).chunk(2, 1)
            x, skipped = x + more, skipped + skip
        return functional.cross_entropy(self.leave(skipped.relu()), samples[:, 1:])


class DeepSpeech(nn.Module):
    """Convolution, a bidirectional GRU, and the CTC loss of transcripts of different lengths.

    Args:
        width: Of the GRU.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Sequential(
            nn.Conv1d(8, width, 5, 2, 2), nn.BatchNorm1d(width), nn.Hardtanh(0, 20)
        )
        self.recurrent = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 12)

    def forward(self, features: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """The loss for features [batch, 8, time], labels [batch, most], and how many of them count."""
        states, _ = self.recurrent(self.convolution(features).mT)
        chances = self.head(states).log_softmax(-1).transpose(0, 1)
        times = torch.full((len(features),), len(chances))
        return functional.ctc_loss(chances, labels, times, lengths, zero_infinity=True)


@architecture
def deep_speech() -> Instance:
    """Speech recognition with the CTC loss in the module."""
    lengths = torch.tensor([3, 5, 4, 2])
    return Instance(DeepSpeech(8), (torch.randn(4, 8, 32), torch.randint(1, 12, (4, 5)), lengths))


# ---------------------------------------------------------------------- attention


@architecture
def torch_transformer() -> Instance:
    """`nn.Transformer` with a causal mask, padding, and dropout."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40, 16)
            self.transformer = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)

        def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            states = self.transformer(
                self.embedding(source),
                self.embedding(target),
                tgt_mask=mask,
                src_key_padding_mask=padding,
                tgt_is_causal=True,
            )
            return functional.linear(states, self.embedding.weight)

    padding = torch.zeros(8, 16, dtype=torch.bool)
    padding[::2, 12:] = True
    return Instance(Translator(), (torch.randint(40, (8, 16)), torch.randint(40, (8, 12)), padding))


class Latents(nn.Module):
    """A set transformer: learned queries attend to a set, then to each other (Lee et al. 2019).

    Args:
        width: Of the states.
        latents: Number of queries.
    """

    def __init__(self, width: int, latents: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, latents, width))
        self.enter = nn.Linear(3, width)
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        """Maps points [batch, count, 3] to latents, and the attention's weights."""
        states = self.enter(points)
        latents, weights = self.cross(self.queries.expand(len(points), -1, -1), states, states)
        return {"latents": self.layers(latents), "weights": weights.detach()}


@architecture
def checkpointed_transformer() -> Instance:
    """A stack whose layers the model itself checkpoints with `torch.utils.checkpoint`."""
    from torch.utils.checkpoint import checkpoint

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
            return x

    return Instance(Stack(), (torch.randn(8, 24, 16),))


# ---------------------------------------------------------------------- sets and graphs


class PointNet(nn.Module):
    """Shared perceptrons of points and their maximum, with a learned rotation (Qi et al. 2017).

    Args:
        width: Of the hidden layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rotation = nn.Sequential(nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU())
        self.turn = nn.Linear(width, 9)
        self.features = nn.Sequential(
            nn.Conv1d(3, width, 1),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 1),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 1),
        )
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.AlphaDropout(0.3), nn.SELU(), nn.Linear(width, 4)
        )

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        """The loss for points [batch, 3, count]; the rotation is kept near an orthogonal one."""
        turn = self.turn(self.rotation(points).amax(-1)).view(-1, 3, 3) + torch.eye(3)
        features = self.features(turn @ points).max(-1).values
        orthogonal = torch.linalg.matrix_norm(turn @ turn.mT - torch.eye(3)).mean()
        return functional.cross_entropy(self.head(features), labels) + 0.001 * orthogonal


class GraphAttention(nn.Module):
    """Attention over the edges of a graph (Velickovic et al. 2018), with scatter operations.

    Args:
        width: Of the nodes' states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.values = nn.Linear(width, width, bias=False)
        self.scores = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Maps nodes [count, width] to the same shape, along edges [2, number]."""
        source, target = edges
        values = self.values(x)
        scores = functional.leaky_relu(self.scores(torch.cat([values[source], values[target]], -1)), 0.2)[
            :, 0
        ]
        highest = torch.full((len(x),), -torch.inf).scatter_reduce(0, target, scores, "amax")
        weights = (scores - highest[target]).exp()
        total = torch.zeros(len(x)).index_add(0, target, weights)
        messages = values[source] * (weights / (total[target] + 1e-9))[:, None]
        return torch.zeros_like(values).index_add(0, target, messages)


class GraphNetwork(nn.Module):
    """Two layers of graph attention, and a class for some of the nodes.

    Args:
        width: Of the nodes' states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphAttention(width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, edges: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
        """The loss over the nodes `chosen`."""
        for layer in self.layers:
            x = functional.dropout(functional.elu(self.norm(layer(x, edges))), 0.2, self.training)
        return functional.cross_entropy(x[chosen], labels)


@architecture
def graph_attention() -> Instance:
    """A graph attention network."""
    edges = torch.randint(60, (2, 240))
    return Instance(
        GraphNetwork(16), (torch.randn(60, 16), edges, torch.arange(0, 60, 2), torch.randint(16, (30,)))
    )


class Recommender(nn.Module):
    """DLRM: bags of categories, and products of all pairs (Naumov et al. 2019).

    Args:
        width: Of the embeddings.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, width, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width))
        layers: list[nn.Module] = [nn.Linear(width + 6, 16), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(16, 16), nn.ReLU()]
        self.top = nn.Sequential(*layers, nn.Linear(16, 1))

    def forward(self, dense: Tensor, categories: list[Tensor], clicks: Tensor) -> Tensor:
        """The loss; each of `categories` is [batch, few]."""
        vectors = [self.bottom(dense)] + [bag(c) for bag, c in zip(self.bags, categories, strict=True)]
        stacked = torch.stack(vectors, 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        products = torch.bmm(stacked, stacked.mT)[:, rows, columns]
        scores = self.top(torch.cat([vectors[0], products], 1))[:, 0]
        return functional.binary_cross_entropy_with_logits(scores, clicks)


@architecture
def recommender() -> Instance:
    """DLRM with three bags of categories."""
    categories = [torch.randint(50, (256, 4)) for _ in range(3)]
    return Instance(Recommender(8), (torch.randn(256, 5), categories, torch.rand(256).round()))


class Contrast(nn.Module):
    """MoCo: a moving average of the encoder, and a queue of keys in a buffer (He et al. 2020).

    Args:
        width: Of the keys.
        length: Of the queue.
    """

    queue: Tensor
    place: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.encoder, self.slow = (self._encoder(width) for _ in range(2))
        self.slow.requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(width, length), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    @staticmethod
    def _encoder(width: int) -> nn.Sequential:
        parts: list[nn.Module] = []
        for source in (3, 8, 8, 8):
            parts += [nn.Conv2d(source, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, width))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """The loss of two views of each image; the keys of `other` enter the queue."""
        queries = functional.normalize(self.encoder(one), dim=1)
        with torch.no_grad():
            keys = functional.normalize(self.slow(other), dim=1)
        alike = (queries * keys).sum(1, keepdim=True)
        scores = torch.cat([alike, queries @ self.queue.clone()], 1) / 0.07
        loss = functional.cross_entropy(scores, torch.zeros(len(one), dtype=torch.int64))
        with torch.no_grad():
            where = (self.place + torch.arange(len(one))) % self.queue.shape[1]
            self.queue.index_copy_(1, where, keys.T)
            self.place.add_(len(one)).remainder_(self.queue.shape[1])
        return loss


# ---------------------------------------------------------------------- functions


class SpectralConvolution(nn.Module):
    """A Fourier layer (Li et al. 2021): complex weights on the lowest frequencies.

    Args:
        width: Channels.
        modes: Frequencies kept.
    """

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.complex64) / width)
        self.local = nn.Conv1d(width, width, 1)
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, width, points] to the same shape."""
        spectrum = torch.fft.rfft(x)
        low = torch.einsum("bik,iok->bok", spectrum[..., : self.modes], self.weight)
        changed = torch.zeros_like(spectrum)
        changed[..., : self.modes] = low
        return functional.gelu(torch.fft.irfft(changed, n=x.shape[-1]) + self.local(x))


@architecture
def fourier_operator() -> Instance:
    """A Fourier neural operator."""
    layers = [nn.Conv1d(2, 16, 1), *(SpectralConvolution(16, 8) for _ in range(3)), nn.Conv1d(16, 1, 1)]
    return Instance(nn.Sequential(*layers), (torch.randn(8, 2, 64),))


class Dynamics(nn.Module):
    """A neural differential equation, in steps of Runge and Kutta (Chen et al. 2018).

    Args:
        width: Of the hidden layer.
        steps: Number of steps.
    """

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(4, width), nn.Softplus(), nn.Linear(width, 4))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        """The path [steps + 1, batch, 4] from `x`."""
        path, size = [x], 1 / self.steps
        for _ in range(self.steps):
            k1 = self.slope(x)
            k2 = self.slope(x + 0.5 * size * k1)
            k3 = self.slope(x + 0.5 * size * k2)
            x = x + size / 6 * (k1 + 2 * k2 + 2 * k3 + self.slope(x + size * k3))
            path.append(x)
        return torch.stack(path)


class Radiance(nn.Module):
    """A radiance field with its volume rendering (Mildenhall et al. 2020).

    Args:
        width: Of the hidden layers.
        samples: Points on each ray.
    """

    def __init__(self, width: int, samples: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(24, width), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(width, 4))
        self.samples = samples

    def forward(self, origins: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
        """The error of rendered rays [count, 3]."""
        edges = torch.linspace(0.1, 2.0, self.samples)
        depths = edges + torch.rand(len(origins), self.samples) * (edges[1] - edges[0])
        points = origins[:, None] + directions[:, None] * depths[..., None]
        angles = points[..., None] * 2.0 ** torch.arange(4)
        found = self.network(torch.cat([angles.sin(), angles.cos()], -1).flatten(2))
        density = 1 - torch.exp(
            -functional.softplus(found[..., 3]) * depths.diff(append=depths[:, -1:] + 0.1)
        )
        passed = torch.cumprod(torch.cat([torch.ones(len(origins), 1), 1 - density + 1e-6], -1), -1)[:, :-1]
        rendered = ((density * passed)[..., None] * found[..., :3].sigmoid()).sum(1)
        return functional.mse_loss(rendered, colours)


class Physics(nn.Module):
    """A network whose loss is a differential equation: its forward differentiates it (Raissi et al. 2019).

    Args:
        width: Of the hidden layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, points: Tensor) -> Tensor:
        """The residual of the heat equation at points [count, 2] of time and place."""

        def value(point: Tensor) -> Tensor:
            return self.network(point)[0]

        slope = torch.func.vmap(torch.func.jacrev(value))(points)
        curvature = torch.func.vmap(torch.func.hessian(value))(points)
        return (slope[:, 0] - 0.1 * curvature[:, 1, 1]).square().mean()


class Sparsemax(nn.Module):
    """Attention that is exactly zero on most columns: sort, cumulated sums, and a threshold.

    Args:
        width: Columns.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.masks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3)
        )
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 16), nn.GLU()) for _ in range(3))
        self.head = nn.Linear(8, 2)

    @staticmethod
    def sparse(x: Tensor) -> Tensor:
        """The projection on the simplex (Martins and Astudillo 2016)."""
        ordered = x.sort(-1, descending=True).values
        sums = ordered.cumsum(-1) - 1
        counts = torch.arange(1, x.shape[-1] + 1)
        size = (counts * ordered > sums).sum(-1, keepdim=True)
        return (x - sums.gather(-1, size - 1) / size).clamp(min=0)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        """The loss for rows [batch, width] of a table, with the entropy of the masks."""
        prior, total, entropy = torch.ones_like(rows), torch.zeros(len(rows), 8), torch.zeros(())
        for mask, layer in zip(self.masks, self.layers, strict=True):
            weights = self.sparse(mask(rows) * prior)
            prior = prior * (1.3 - weights)
            entropy = entropy - (weights * (weights + 1e-9).log()).sum(-1).mean()
            total = total + layer(rows * weights).relu()
        return functional.cross_entropy(self.head(total), labels) + 0.001 * entropy


class Words(nn.Module):
    """word2vec with negative samples that the forward draws (Mikolov et al. 2013).

    Args:
        vocabulary: Number of words.
        width: Of their vectors.
    """

    frequencies: Tensor

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.register_buffer("frequencies", torch.rand(vocabulary), persistent=False)

    def forward(self, words: Tensor, contexts: Tensor) -> Tensor:
        """The loss for words [batch] and contexts [batch]."""
        others = torch.multinomial(self.frequencies, 8 * len(words), replacement=True).view(-1, 8)
        inner = self.inner(words)
        near = functional.logsigmoid((inner * self.outer(contexts)).sum(-1))
        far = functional.logsigmoid(-(self.outer(others) @ inner[..., None])[..., 0]).sum(-1)
        return -(near + far).mean()


@architecture
def traced_graph_module() -> Instance:
    """A `torch.fx.GraphModule` of a perceptron, as quantization and pruning tools make them."""
    activations = [nn.Mish(), nn.CELU(), nn.Softsign(), nn.Hardswish(), nn.Tanhshrink(), nn.GELU()]
    layers = [part for activation in activations for part in (nn.Linear(16, 16), activation)]
    return Instance(torch.fx.symbolic_trace(nn.Sequential(*layers)), (torch.randn(256, 16),))


class Orthogonal(nn.Module):
    """An RNN with an orthogonal matrix, as a parametrization.

    Args:
        width: Of the state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(4, width)
        self.turn = parametrizations.orthogonal(nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """The last state for x [batch, sequence, 4]."""
        state = x.new_zeros(len(x), self.enter.out_features)
        for step in x.unbind(1):
            state = torch.tanh(self.turn(state) + self.enter(step))
        return state


class Ensemble(nn.Module):
    """Perceptrons that `torch.vmap` runs side by side.

    Args:
        members: Number of perceptrons.
    """

    def __init__(self, members: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(members, 8, 16) / 3)
        self.second = nn.Parameter(torch.randn(members, 16, 1) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, 8] to [members, batch, 1]."""

        def member(first: Tensor, second: Tensor) -> Tensor:
            return torch.tanh(x @ first) @ second

        return torch.vmap(member)(self.first, self.second)


_INSTANCES: dict[str, Maker] = {
    "gru": lambda: _tagged(nn.GRU(8, 8, 2, dropout=0.2, batch_first=True, bidirectional=True), 16),
    "rnn": lambda: _tagged(nn.RNN(8, 16, 2, nonlinearity="relu", batch_first=True), 16),
    "projected-lstm": lambda: _tagged(nn.LSTM(8, 16, proj_size=8, batch_first=True), 8),
    "lstm-cells": lambda: _tagged(Cells(16), 16),
    "convolutional-lstm": lambda: Instance(ConvolutionalLSTM(8), (torch.rand(4, 6, 1, 12, 12),)),
    "wavenet": lambda: Instance(WaveNet(16, 4), (torch.randint(32, (4, 128)),)),
    "set-transformer": lambda: Instance(Latents(16, 8), (torch.randn(16, 40, 3),)),
    "point-net": lambda: Instance(PointNet(16), (torch.randn(8, 3, 64), torch.randint(4, (8,)))),
    "momentum-contrast": lambda: Instance(
        Contrast(8, 64), (torch.randn(16, 3, 16, 16), torch.randn(16, 3, 16, 16))
    ),
    "neural-ode": lambda: Instance(Dynamics(16, 5), (torch.randn(64, 4),)),
    "radiance-field": lambda: Instance(Radiance(32, 8), tuple(torch.rand(64, 3) for _ in range(3))),
    "physics-informed": lambda: Instance(Physics(16), (torch.rand(64, 2),)),
    "tabnet": lambda: Instance(Sparsemax(12), (torch.randn(128, 12), torch.randint(2, (128,)))),
    "word2vec": lambda: Instance(Words(64, 16), (torch.randint(64, (128,)), torch.randint(64, (128,)))),
    "orthogonal-rnn": lambda: Instance(Orthogonal(12), (torch.randn(32, 6, 4),)),
    "ensemble": lambda: Instance(Ensemble(4), (torch.randn(64, 8),)),
}

for _name, _make in _INSTANCES.items():
    enter(_name, _make)
