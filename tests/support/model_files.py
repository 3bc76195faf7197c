"""A file of small models with factories, as a user would write it."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from irc.tools import cli

__all__ = ["MODELS", "planned_folder"]

MODELS = '''
import torch
from torch import nn


def mlp():
    torch.manual_seed(0)
    layers = []
    for _ in range(8):
        layers += [nn.Linear(32, 32), nn.GELU()]
    return nn.Sequential(*layers), (torch.randn(64, 32),)


def noisy():
    """Dropout, running statistics, a frozen weight, a buffer, and a result that is a dict."""
    torch.manual_seed(0)

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.norm = nn.BatchNorm1d(16)
            self.dropout = nn.Dropout(0.3)
            self.layers[1].weight.requires_grad_(False)
            self.register_buffer("scale", torch.full((16,), 1.5))

        def forward(self, x):
            for layer in self.layers:
                x = self.dropout(torch.tanh(layer(x))) * self.scale
            return {"hidden": self.norm(x), "kind": "noisy"}

    return Noisy(), torch.randn(32, 16)


def tied():
    """Integer inputs, and one weight under two names."""
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3)))
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens, targets):
            logits = self.head(self.layers(self.embedding(tokens)))
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Tied(), (torch.randint(20, (4, 6)), torch.randint(20, (4, 6)))


def nested():
    """Tensors in a dict beside a constant; one of them wants a gradient; weights in channels-last order."""
    torch.manual_seed(0)

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
            self.to(memory_format=torch.channels_last)

        def forward(self, features, times):
            x = features["x"].contiguous(memory_format=torch.channels_last) * features["gain"]
            for conv in self.convs:
                x = torch.relu(conv(x)) * times
            return x

    gain = torch.ones(1, 4, 1, 1, requires_grad=True)
    return Nested(), ({"x": torch.randn(2, 4, 8, 8), "gain": gain}, 2)


def branching():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            return y * 2 if y.sum() > 0 else y

    return Branching(), torch.randn(2, 4)
'''


@functools.cache
def _planned(text: str, name: str, options: tuple[str, ...]) -> tempfile.TemporaryDirectory[str]:
    """Plans a model of a file with this text; the folder goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="irc-planned-")
    models, out = Path(folder.name, "models.py"), Path(folder.name, "out")
    models.write_text(text)
    assert cli.main(["optimize", f"{models}:{name}", *options, "-q", "-o", str(out)]) == 0
    return folder


def planned_folder(models: Path, name: str, *options: str) -> Path:
    """Returns a folder `out` beside `models`, as `irc optimize` writes it; each plan is made once."""
    made = Path(_planned(models.read_text(), name, options).name)
    out = models.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(made / "out", out)
    plan = out / "plan.json"
    plan.write_text(plan.read_text().replace(str(made / "models.py"), str(models)))
    return out
