"""A model whose Python depends on data, by `torch.compile` with irc's backend: one budget for all its graphs.

The model looks at a number (`.item()`) to decide how deep it goes. Dynamo cuts it there into several graphs.
Each is planned when it first runs; what it keeps for its backward comes off what the later ones may take.

Run it with `python examples/torch_compile.py`.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

import irc


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The input, and what the layer makes of it."""
        return x + self.down(torch.tanh(self.up(x)))


class Adaptive(nn.Module):
    """Goes through more layers where the input is large."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(Block(width), Block(width))
        self.shallow = Block(width)
        self.deep = nn.Sequential(Block(width), Block(width), Block(width))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The loss, here a part of the model."""
        scale = x.abs().mean()
        x = self.stem(x)
        x = self.deep(x) if scale.item() > 1 else self.shallow(x)
        return self.head(x).square().mean()


def main(steps: int = 5, budget: int | str = "1000KiB", **options: Any) -> bool:
    """Trains eagerly and compiled; returns whether losses and weights are the same bit for bit."""
    torch.manual_seed(0)
    model = Adaptive(48)
    original = copy.deepcopy(model)

    backend = irc.backend(budget, **options)
    compiled = torch.compile(model, backend=backend)

    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, original)]
    same = True
    for step in range(steps):
        x = torch.randn(256, 48) * (2 if step % 2 else 1)  # every other step goes deep
        losses = [compiled(x), original(x)]
        same &= torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()  # before the next forward: gradients that are kept take room
        del loss, losses
    print(backend.summary())
    weights = model.state_dict()
    same &= all(torch.equal(value, weights[name]) for name, value in original.state_dict().items())
    print(f"after {steps} steps, losses and weights are {'the same' if same else 'DIFFERENT'}")
    return same and backend.peak_bytes > 0


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("irc").setLevel(logging.INFO)  # a line for each graph that is planned
    main()
