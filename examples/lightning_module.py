"""A PyTorch Lightning module around a fitted model: the Trainer drives it as any other.

Run it with `python examples/lightning_module.py`; it needs `pip install pytorch-lightning`.
"""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import irc

BATCH = 128


class Classifier(lightning.LightningModule):
    """Trains a model by cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.peaks = model, list[int]()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        inputs, labels = batch
        return functional.cross_entropy(self.model(inputs), labels)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Frees the gradients of the step before; Lightning does that only between forward and backward."""
        self.zero_grad()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Measures what the trainer runs before the optimizer's step: forward, backward and all between."""

        def measured() -> Any:
            loss, peak = irc.measured_step(self.model, optimizer_closure)
            self.peaks.append(peak)
            return loss

        super().optimizer_step(epoch, batch_idx, optimizer, measured)

    def configure_optimizers(self) -> Any:
        """AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_model() -> nn.Sequential:
    """A deep perceptron with dropout."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def train(model: nn.Module) -> tuple[dict[str, Tensor], list[int]]:
    """Two epochs on random data, always the same; returns the weights, and the measured peak of each step."""
    lightning.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(300, 32), torch.randint(10, (300,)))
    # another batch size would be planned when it comes: leave out what does not fill a batch
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    classifier = Classifier(model)
    trainer.fit(classifier, loader)
    return model.state_dict(), classifier.peaks


def main(budget: int | str = "75%", **options: Any) -> bool:
    """Trains a model as it is and fitted; returns whether the weights are the same bit for bit."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.manual_seed(0)
    expected, _ = train(make_model())

    torch.manual_seed(0)
    model, inputs, labels = make_model(), torch.zeros(BATCH, 32), torch.zeros(BATCH, dtype=torch.long)

    def loss(scores: Tensor) -> Tensor:
        return functional.cross_entropy(scores, labels)

    fitted = irc.optimize(model, (inputs,), budget, loss=loss, **options)
    print(fitted.plan.summary())
    weights, peaks = train(fitted)
    same = all(torch.equal(value, weights[name]) for name, value in expected.items())
    print(f"the weights are {'the same' if same else 'DIFFERENT'}")
    plan = fitted.plan
    print(f"budget {plan.budget_bytes:,} B, predicted peak {plan.peak_bytes:,} B, own steps {max(peaks):,} B")
    return same and max(peaks) <= plan.peak_bytes


if __name__ == "__main__":
    main()
