"""Small models that are hard to cut: tied weights, skips, statistics, a tensor that many stages read."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "go_on",
    "half_frozen",
    "narrow",
    "refuse_together",
    "run_folders",
    "run_probes",
    "skips",
    "sometimes",
    "tagger",
    "tied",
    "translator",
    "wide",
]

Example = tuple[nn.Module, tuple[Tensor, ...]]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


class _Tied(nn.Module):
    """A language model whose embedding is its last matrix, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(_Block(16) for _ in range(8))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens) * (tokens > 3).unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


class _Tagger(nn.Module):
    """Two LSTM layers, which eager runs as kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.LSTM(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0]).square().mean()


class _Skips(nn.Module):
    """A U: what the way down makes is read on the way up; with statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 4, 6, 8)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(self._layer(a, b) for a, b in pairs)
        self.middle = self._layer(8, 8)
        self.up = nn.ModuleList(self._layer(2 * b, a) for a, b in reversed(pairs))

    @staticmethod
    def _layer(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        x = self.middle(x)
        for layer, skip in zip(self.up, reversed(kept), strict=True):
            x = layer(torch.cat((x, skip), 1))
        return x.square().mean()


class _Translator(nn.Module):
    """An encoder, and a decoder each of whose blocks reads all that the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(_Block(12) for _ in range(3)))
        self.decoder = nn.ModuleList(_Block(12) for _ in range(5))
        self.reading = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, x = self.encoder(source), target
        for block, reading in zip(self.decoder, self.reading, strict=True):
            scores = torch.softmax(x @ reading(read).transpose(1, 2), -1)
            x = block(x + scores @ read)
        return x.square().mean()


class _Sometimes(nn.Module):
    """Has parameters that get no gradient, that nothing reads, and that are not saved; one has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.choice = nn.Parameter(torch.randn(8, 8))
        self.spare = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.ones(2))
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.get_buffer("scale")
            x = x + (x @ self.choice).argmax(-1, keepdim=True)
        return x.square().mean()


def wide() -> Example:
    """Layers that keep much for backward beside what they weigh."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(4096, 64),)


class _HalfFrozen(nn.Module):
    """Layers of which the first ones are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        for layer in self.layers[:4]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def half_frozen() -> Example:
    torch.manual_seed(0)
    return _HalfFrozen(), (torch.randn(8, 8),)


def sometimes() -> Example:
    return _Sometimes(), (torch.randn(8, 8),)


def tied() -> Example:
    torch.manual_seed(0)
    return _Tied(), (torch.randint(0, 40, (16, 6)), torch.randint(0, 40, (16, 6)))


def tagger() -> Example:
    torch.manual_seed(0)
    return _Tagger(), (torch.randint(0, 20, (8, 3)),)


def skips() -> Example:
    torch.manual_seed(0)
    return _Skips(), (torch.randn(16, 3, 8, 8),)


def translator() -> Example:
    torch.manual_seed(0)
    return _Translator(), (torch.randn(16, 5, 12), torch.randn(16, 4, 12))


def _meet(rank: int, ranks: int, meeting: str) -> None:
    """Joins a group of ranks, each with one thread, that waits two minutes for each other at the most."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=limit
    )


def run_folders(rank: int, ranks: int, meeting: str, folders: Sequence[str], results: str) -> None:
    """Trains what is in each folder on one of several ranks; the first writes down what all of them saw."""
    from irc.compiler.pipeline.run import run_pipeline

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _meet(rank, ranks, meeting)
    try:
        found = {name: run_pipeline(Path(name), 2, with_original=True).to_json() for name in folders}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(results).write_text(json.dumps(found))


def go_on(rank: int, ranks: int, meeting: str, folder: str, begin: str, end: str) -> None:
    """Loads a checkpoint into the ranks of a written pipeline, takes a step and writes another."""
    from irc.compiler.pipeline.artifact import read_pipeline
    from irc.compiler.pipeline.trainer import PipelineTrainer

    _meet(rank, ranks, meeting)
    try:
        written = read_pipeline(Path(folder), rank)
        trainer = PipelineTrainer(
            written.stages, written.state, rebuild=lambda leaves: leaves[0], saved=written.own_names
        )
        trainer.load(begin)
        trainer.step(*written.examples)
        trainer.optimizer.step()
        trainer.save(end)
    finally:
        dist.destroy_process_group()


def refuse_together(rank: int, ranks: int, meeting: str, folder: str, begin: str, results: str) -> None:
    """Loads what does not fit one of the ranks, then steps with it; each writes what it was told."""
    import irc
    from irc.compiler.pipeline.artifact import read_pipeline
    from irc.compiler.pipeline.trainer import PipelineTrainer

    _meet(rank, ranks, meeting)
    try:
        written = read_pipeline(Path(folder), rank)
        trainer = PipelineTrainer(
            written.stages, written.state, rebuild=lambda leaves: leaves[0], saved=written.own_names
        )
        before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        said = "nothing"
        try:
            trainer.load(begin)
        except irc.UsageError as error:
            said = str(error)
        same = all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_dict().items())
        batch = [tensor[:4] for tensor in written.examples] if rank == 1 else written.examples
        refused = "nothing"
        try:
            trainer.step(*batch)
        except irc.UsageError as error:
            refused = str(error)
        Path(f"{results}-{rank}").write_text(json.dumps([said, same, refused]))
        trainer.step(*written.examples)  # they still go together
    finally:
        dist.destroy_process_group()


def narrow() -> Example:
    """As `wide`, but with fewer results."""
    torch.manual_seed(0)
    model, args = wide()
    assert isinstance(model, nn.Sequential)
    model[-2] = nn.Linear(64, 8)
    return model, args


def run_probes(rank: int, ranks: int, meeting: str, results: str) -> None:
    """Pairs of ranks run a pipeline each; then the loss of one fails. Each rank writes down what it saw."""
    import irc

    _meet(rank, ranks, meeting)
    pairs: list[Any] = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    torch.manual_seed(rank)  # as in a program that forgets to
    model = _Sometimes()
    args = (torch.randn(8, 8),)
    steps = 0

    def loss(result: Tensor, _: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        if steps > 9:
            raise ValueError("no loss today")
        return result

    pipe = irc.pipeline(
        model, args, "64MiB", stages=2, micro_batches=2, loss=loss, costs="analytic", time_limit=0.5
    )
    trainer = pipe.start(group=pairs[rank // 2])
    optimizer = torch.optim.SGD(trainer.parameters(), 0.1)
    for _ in range(2):
        trainer.step(*args)
        optimizer.step()
        optimizer.zero_grad()
    trainer.step(*args)
    shared = model.get_parameter("layers.0.weight")
    assert shared.grad is not None
    found: dict[str, object] = {
        "names": sorted(trainer.state_dict()),
        "shared": shared.flatten().tolist(),
        "gradient": shared.grad.flatten().tolist(),
        "choice": model.choice.grad is None,
        "failures": [],
    }
    dist.barrier()
    failures: list[str] = []
    for _ in range(4):
        try:
            trainer.step(*args)
        except (irc.IrcError, ValueError) as error:
            failures.append(str(error))
            if len(failures) == 2:
                break
    found["failures"] = failures
    Path(f"{results}-{rank}").write_text(json.dumps(found))
    os._exit(0)  # what is in flight stays there
