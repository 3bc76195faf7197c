"""A U-Net of diffusers that learns to predict the noise of images, within a budget.

Run it with `python examples/diffusers_unet.py`; it needs `pip install diffusers`. The U-Net is small, with
random weights; one of the hub's is loaded by `UNet2DModel.from_pretrained`.

What to look out for:

- The loss is computed outside of the model: `loss` tells irc how, so that its memory counts.
- The time steps are a tensor: each step may have others.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional

import irc

ROWS, SIZE, STEPS = 4, 16, 4

Batch = tuple[Tensor, Tensor, Tensor]


def model() -> Any:
    """A U-Net with attention in its lower half, and dropout."""
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=SIZE,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        dropout=0.1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).train()


def batches() -> list[Batch]:
    """Images with noise of random time steps, the time steps, and the noise."""
    generator = torch.Generator().manual_seed(0)
    scheduler: Any = diffusers.DDPMScheduler(num_train_timesteps=1000)
    noisy: list[Batch] = []
    for _ in range(STEPS):
        images = torch.rand(ROWS, 3, SIZE, SIZE, generator=generator) * 2 - 1
        noise = torch.randn(images.shape, generator=generator)
        times = torch.randint(0, 1000, (ROWS,), generator=generator)
        noisy.append((scheduler.add_noise(images, noise, times), times, noise))
    return noisy


def train(module: nn.Module) -> tuple[list[float], list[int]]:
    """Some steps of AdamW; returns the losses, and the measured peak of each step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses: list[float] = []
    peaks: list[int] = []
    for batch in batches():

        def forward_backward(batch: Batch = batch) -> Tensor:
            noisy, times, noise = batch
            loss = functional.mse_loss(module(noisy, times).sample, noise)
            loss.backward()
            return loss

        optimizer.zero_grad()
        loss, peak = irc.measured_step(module, forward_backward, batch)
        optimizer.step()
        losses.append(loss.item())
        peaks.append(peak)
    return losses, peaks


def main(budget: int | str = "60%", **options: Any) -> bool:
    """Trains the model as it is and fitted; whether losses and weights are the same bit for bit."""
    original, module = model(), model()
    noisy, times, noise = batches()[0]

    def loss(result: Any) -> Tensor:
        return functional.mse_loss(result.sample, noise)

    fitted = irc.optimize(module, (noisy, times), budget, loss=loss, **options)
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
