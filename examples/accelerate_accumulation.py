"""Gradients of several batches added up by accelerate, within a budget that counts them.

Run it with `python examples/accelerate_accumulation.py`; it needs `pip install accelerate`.

What to look out for:

- `accumulate_gradients=True`: each gradient is added to `.grad` as soon as it is known, and the plan counts
  `.grad` as there all the time. Without it a step that finds gradients holds two sets of them.
- The model is fitted before `accelerator.prepare`.
- accelerate divides each loss by the number of batches; the loss that irc is told of is that of one.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional

import irc

ROWS, STEPS, ACCUMULATED = 64, 8, 4


def model() -> nn.Module:
    """A perceptron with dropout, whose activations take more than its parameters."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(48, 10)).train()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Random data, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(ROWS, 48, generator=generator), torch.randint(10, (ROWS,), generator=generator))
        for _ in range(STEPS)
    ]


def train(module: nn.Module) -> tuple[list[float], list[int]]:
    """Trains a model, with a step of AdamW for every four batches.

    Returns:
        The losses of the batches, and the measured peak of forward and backward of each.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    prepared: Any = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    wrapped, optimizer = prepared
    torch.manual_seed(1)
    losses: list[float] = []
    peaks: list[int] = []
    for inputs, labels in batches():

        def forward_backward(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            loss = functional.cross_entropy(wrapped(inputs), labels)
            accelerator.backward(loss)
            return loss

        with accelerator.accumulate(wrapped):
            loss, peak = irc.measured_step(module, forward_backward, (inputs, labels))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        peaks.append(peak)
    return losses, peaks


def main(budget: int | str = "80%", **options: Any) -> bool:
    """Trains the model as it is and fitted; whether losses and weights are the same bit for bit."""
    original, module = model(), model()
    inputs, labels = batches()[0]

    def loss(scores: Tensor) -> Tensor:
        return functional.cross_entropy(scores, labels)

    fitted = irc.optimize(module, (inputs,), budget, loss=loss, accumulate_gradients=True, **options)
    print(fitted.plan.summary())
    (expected, _), (losses, peaks) = train(original), train(fitted)
    pairs = zip(original.parameters(), module.parameters(), strict=True)
    is_same = expected == losses and all(torch.equal(a, b) for a, b in pairs)
    print(f"losses {losses}: {'the same' if is_same else 'DIFFERENT'} as without irc")
    plan = fitted.plan
    print(f"budget {plan.budget_bytes:,} B, predicted peak {plan.peak_bytes:,} B, own steps {max(peaks):,} B")
    return is_same and max(peaks) <= plan.peak_bytes


if __name__ == "__main__":
    main()
