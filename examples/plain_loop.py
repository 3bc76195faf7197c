"""A plain training loop with one line more: the model trains in 60% of its memory, with the same numbers.

Run it with `python examples/plain_loop.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import irc


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    """A convolution with BatchNorm and ReLU."""
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())


def make_model() -> nn.Sequential:
    """A small network for images; its activations take much more memory than its parameters."""
    return nn.Sequential(
        block(3, 16),
        *(block(16, 16) for _ in range(5)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def train(model: nn.Module, steps: int) -> tuple[list[float], list[int]]:
    """Trains on random images, always the same; returns the losses, and the measured peak of each step."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    peaks: list[int] = []
    for _ in range(steps):
        images = torch.randn(8, 3, 32, 32, generator=generator)
        labels = torch.randint(10, (8,), generator=generator)

        def forward_backward(images: Tensor = images, labels: Tensor = labels) -> Tensor:
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        optimizer.zero_grad()
        loss, peak = irc.measured_step(model, forward_backward, (images, labels))
        optimizer.step()
        losses.append(loss.item())
        peaks.append(peak)
    return losses, peaks


def main(steps: int = 4, **options: Any) -> bool:
    """Trains a model as it is and fitted; returns whether losses and weights are the same bit for bit."""
    torch.manual_seed(0)
    model = make_model()
    original = copy.deepcopy(model)
    images, labels = torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)

    def loss(scores: Tensor) -> Tensor:
        return functional.cross_entropy(scores, labels)

    # The one line: example arguments, and a budget. `loss` tells what the loop computes outside of the model.
    fitted = irc.optimize(model, (images,), "60%", loss=loss, **options)

    print(fitted.plan.summary())
    (losses, peaks), (expected, _) = train(fitted, steps), train(original, steps)
    same = losses == expected
    weights = fitted.state_dict()
    same &= all(torch.equal(value, weights[name]) for name, value in original.state_dict().items())
    print(f"after {steps} steps, losses and weights are {'the same' if same else 'DIFFERENT'}")
    plan = fitted.plan
    print(f"budget {plan.budget_bytes:,} B, predicted peak {plan.peak_bytes:,} B, own steps {max(peaks):,} B")
    return same and max(peaks) <= plan.peak_bytes


if __name__ == "__main__":
    main()
