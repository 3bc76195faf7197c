"""Rows of any length, padded batch by batch, trained by Hugging Face's `Trainer` within one budget.

Run it with `python examples/dynamic_padding.py`; it needs `pip install transformers accelerate`. The model is
a small GPT-2 with random weights, and the rows are random tokens.

What to look out for:

- `dynamic` names an argument, its dimension, and the smallest and largest size. All plans are made by
  `irc.optimize`; a batch of a length that did not come before then trains at once.
- The budget holds for the longest batch. Shorter ones take less, and compute less again.
- The example batch may have any length in the range: the collator pads the first rows here.
- Leave the last batch out (`dataloader_drop_last`) if it has fewer rows: it would get plans of its own, which
  takes as long as those of the others.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import irc

WORDS, PAD = 200, 0
SHORTEST, LONGEST = 16, 96
ROWS, STEPS = 4, 8

Batch = dict[str, Tensor]


def model() -> nn.Module:
    """A small GPT-2 with dropout."""
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LONGEST,
        n_embd=64,
        n_layer=4,
        n_head=4,
        use_cache=False,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def rows() -> list[Batch]:
    """Rows of random tokens, each of its own length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (ROWS * STEPS,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, WORDS, (length,), generator=generator)} for length in lengths]


def padded(batch: list[Batch]) -> Batch:
    """Pads the rows of a batch to the longest of them, with a mask, and labels that leave the padding out."""
    words = nn.utils.rnn.pad_sequence(
        [row["input_ids"] for row in batch], batch_first=True, padding_value=PAD
    )
    mask = (words != PAD).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def trainer_of(module: nn.Module, folder: str) -> transformers.Trainer:
    """A Trainer for one epoch of AdamW."""
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        logging_steps=1,
        seed=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data: Any = rows()
    collator: Any = padded
    trainer = transformers.Trainer(model=module, args=arguments, train_dataset=data, data_collator=collator)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def measure_steps(trainer: transformers.Trainer, module: nn.Module) -> list[int]:
    """Lets a trainer measure each of its own steps; returns the list of their peaks, which grows."""
    take: Any = trainer.training_step
    peaks: list[int] = []

    def step(model: nn.Module, inputs: dict[str, Any], *rest: Any) -> Tensor:
        loss, peak = irc.measured_step(module, partial(take, model, inputs, *rest), inputs)
        peaks.append(peak)
        return loss

    trainer.training_step = step  # type: ignore[method-assign]
    return peaks


def train(module: nn.Module) -> tuple[list[float], list[int]]:
    """Trains a model; returns the losses of its steps, and their measured peaks."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(module, folder)
        peaks = measure_steps(trainer, module)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peaks


def example(module: nn.Module) -> dict[str, Any]:
    """What the Trainer hands to the model in its first step."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        trainer = trainer_of(module, folder)
        batches = iter(trainer.get_train_dataloader())
        (batch, *_), items = trainer.get_batch_samples(batches, 1, torch.device("cpu"))
    return {**batch, "num_items_in_batch": items} if trainer.model_accepts_loss_kwargs else dict(batch)


def main(budget: int | str = "70%", **options: Any) -> bool:
    """Trains the model as it is and fitted; whether losses and weights are the same bit for bit."""
    transformers.logging.set_verbosity_error()
    original, module = model(), model()
    batch = example(module)
    fitted = irc.optimize(
        module,
        (),
        budget,
        example_kwargs=batch,
        dynamic={"input_ids": {1: (SHORTEST, LONGEST)}},
        **options,
    )
    print(fitted.plan.summary())
    for planned in fitted.irc_plans:
        print(f"{planned.call}: predicted peak {planned.plan.peak_bytes:,} B")
    (expected, _), (losses, peaks) = train(original), train(fitted)
    pairs = zip(original.parameters(), module.parameters(), strict=True)
    is_same = expected == losses and all(torch.equal(a, b) for a, b in pairs)
    print(f"losses {losses}: {'the same' if is_same else 'DIFFERENT'} as without irc")
    budget_bytes = fitted.plan.budget_bytes
    predicted = max(planned.plan.peak_bytes for planned in fitted.irc_plans)
    print(f"budget {budget_bytes:,} B, predicted peak {predicted:,} B, own steps {max(peaks):,} B")
    return is_same and max(peaks) <= predicted


if __name__ == "__main__":
    main()
