"""Supervised fine-tuning by TRL's `SFTTrainer`, on rows of any length, within one budget.

Run it with `python examples/trl_sft.py`; it needs `pip install trl datasets`. The model is a small Llama with
random weights, and the rows are random tokens.

What to look out for:

- The example is what the trainer hands to the model: a batch as its collator pads it, with `use_cache=False`
  and the number of tokens in it.
- `SFTConfig` turns gradient checkpointing on and trains in bfloat16 unless it is told otherwise. Leave the
  checkpoints out: irc chooses what runs again.
- The trainer reads the logits for its metrics, after backward: they are a result of the model and stay.
"""

from __future__ import annotations

import tempfile
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

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


def train(module: Any) -> list[float]:
    """Trains a model; returns the losses of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(module, folder)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def example(module: Any) -> dict[str, Any]:
    """What the trainer hands to the model in its first step."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        trainer = trainer_of(module, folder)
        batches = iter(trainer.get_train_dataloader())
        (batch, *_), items = trainer.get_batch_samples(batches, 1, torch.device("cpu"))
    return {**batch, "use_cache": False, "num_items_in_batch": items}


def peak_of_longest(fitted: Any, batch: dict[str, Any]) -> int:
    """The measured peak of a step of the longest batch, in bytes."""
    words = torch.full((ROWS, LONGEST), 3)
    longest = {**batch, "input_ids": words, "labels": words.clone(), "attention_mask": torch.ones_like(words)}
    return irc.measured_peak_bytes(fitted, (), keywords=longest, loss=lambda result: result.loss)


def main(budget: int | str = "80%", **options: Any) -> bool:
    """Trains the model as it is and fitted; whether losses and weights are the same bit for bit."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    original, module = model(), model()
    batch = example(module)
    dynamic = {"input_ids": {1: (SHORTEST, LONGEST)}}
    fitted = irc.optimize(module, (), budget, example_kwargs=batch, dynamic=dynamic, **options)
    print(fitted.plan.summary())
    expected, losses = train(original), train(fitted)
    pairs = zip(original.parameters(), module.parameters(), strict=True)
    is_same = expected == losses and all(torch.equal(a, b) for a, b in pairs)
    print(f"losses {losses}: {'the same' if is_same else 'DIFFERENT'} as without irc")
    measured = peak_of_longest(fitted, batch)
    plan = fitted.plan
    print(
        f"budget {plan.budget_bytes:,} B, predicted peak {plan.peak_bytes:,} B, "
        f"measured {measured:,} B for the longest batch"
    )
    return is_same and measured <= plan.peak_bytes


if __name__ == "__main__":
    main()
