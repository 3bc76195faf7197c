"""Supervised fine-tuning by TRL's `SFTTrainer` within a budget.

Run it with `python examples/trl_sft.py`; it needs `pip install trl datasets`. The model is a small Llama with
random weights, and the rows are random tokens.

What to look out for:

- The trainer gives the model a forward of its own, which computes the loss in chunks of the vocabulary. Fit
  the model after the trainer has it, and put the fitted module into the trainer. One that is fitted before is
  planned again in the first step.
- The example is what the trainer hands to that forward, `fused_lm_head=True` among it. The trainer computes
  its loss from `log_probs`: tell irc so by `loss=`.
- `SFTConfig` turns gradient checkpointing on and trains in bfloat16 unless it is told otherwise. Leave the
  checkpoints out: irc chooses what runs again.
- Batches are padded to one length here, so that one plan is for all of them.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl
from torch import Tensor

import irc

WORDS = 200
SHORTEST, LONGEST = 16, 64
ROWS, STEPS = 4, 8


def model() -> Any:
    """A small Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).train()


def rows() -> Any:
    """Rows of random tokens, each of its own length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (ROWS * STEPS,), generator=generator).tolist()
    words = (torch.randint(3, WORDS, (length,), generator=generator) for length in lengths)
    return datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in words])


def tokenizer() -> Any:
    """A tokenizer of numbers, for the trainer alone: the rows are tokens already."""
    words = tokenizers.models.WordLevel({str(k): k for k in range(WORDS)}, unk_token="1")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", unk_token="1", eos_token="2"
    )


def trainer_of(module: Any, folder: str) -> Any:
    """An SFTTrainer for one epoch."""
    config = trl.SFTConfig(
        folder,
        max_length=LONGEST,
        pad_to_multiple_of=LONGEST,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        dataloader_drop_last=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(model=module, args=config, train_dataset=rows(), processing_class=tokenizer())
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def first_batch(trainer: Any) -> dict[str, Any]:
    """The model's arguments in the trainer's first step; the generator's state is as before."""
    with torch.random.fork_rng():
        (batch, *_), _ = trainer.get_batch_samples(
            iter(trainer.get_train_dataloader()), 1, torch.device("cpu")
        )
    return {**batch, "use_cache": False, "fused_lm_head": True}


def loss(result: Any) -> Tensor:
    """The loss that the trainer computes from the result, up to the number of tokens."""
    return -result.log_probs.sum()


def measure_steps(trainer: Any, module: Any) -> list[int]:
    """Lets a trainer measure each of its own steps; returns the list of their peaks, which grows."""
    take, peaks = trainer.training_step, list[int]()

    def step(model: Any, inputs: dict[str, Any], *rest: Any) -> Tensor:
        value, peak = irc.measured_step(module, partial(take, model, inputs, *rest), inputs)
        peaks.append(peak)
        return value

    trainer.training_step = step
    return peaks


@dataclass(frozen=True)
class Trained:
    """The end of a training: losses, the model, and the measured peak of each step."""

    losses: list[float]
    model: Any
    peaks: list[int]


def train(budget: int | str | None = None, **options: Any) -> Trained:
    """Trains a model, within a budget if there is one; `options` are those of irc.optimize."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model(), folder)
        if budget is not None:
            batch = first_batch(trainer)
            fitted = irc.optimize(trainer.model, (), budget, example_kwargs=batch, loss=loss, **options)
            print(fitted.plan.summary())
            trainer.model = trainer.model_wrapped = fitted
        peaks = measure_steps(trainer, trainer.model)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(losses, trainer.model, peaks)


def main(budget: int | str = "90%", **options: Any) -> bool:
    """Trains the model as it is and fitted; whether losses and weights are the same bit for bit."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    original, fitted = train(), train(budget, **options)
    pairs = zip(original.model.parameters(), fitted.model.parameters(), strict=True)
    is_same = original.losses == fitted.losses and all(torch.equal(a, b) for a, b in pairs)
    print(f"losses {fitted.losses}: {'the same' if is_same else 'DIFFERENT'} as without irc")
    plan, measured = fitted.model.plan, max(fitted.peaks)
    print(
        f"budget {plan.budget_bytes:,} B, predicted peak {plan.peak_bytes:,} B, own steps {measured:,} B, "
        f"{max(original.peaks):,} B without irc"
    )
    return is_same and measured <= plan.peak_bytes and len(fitted.model.irc_plans) == 1


if __name__ == "__main__":
    main()
