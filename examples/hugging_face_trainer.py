"""Models of `transformers`, with random weights, trained by Hugging Face's `Trainer` within a budget.

Run it with `python examples/hugging_face_trainer.py gpt2 bert`, or without names for all of them; it needs
`pip install transformers accelerate`.

What to look out for:

- The example is what the Trainer itself hands to the model (`first_batch`): its shapes and keywords. A
  smaller last batch would be planned when it comes, which takes a while; it is left out here.
- `use_cache=False`: a cache of keys and values has no place in training.
- `attn_implementation="eager"`, or no attention mask: with others, some models look at the values of the mask
  and take another way where it masks nothing; a plan has one way (or pass `specialize_branches=True`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import irc

Data = list[dict[str, Tensor]]
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "intermediate_size": 64, "attn_implementation": "eager"}


def texts(*, mask: bool = True) -> Data:
    """Sixteen rows of eight random tokens, with themselves as labels."""
    tokens = torch.randint(1, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return [{**row, "attention_mask": torch.ones(8, dtype=torch.long)} if mask else row for row in rows]


def gpt2() -> tuple[nn.Module, Data]:
    """GPT-2; the embedding is tied to the head."""
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        use_cache=False,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config), texts()


def bert() -> tuple[nn.Module, Data]:
    """BERT, for one of three classes."""
    config = transformers.BertConfig(
        vocab_size=64, max_position_embeddings=16, num_labels=3, **SIZES, **HEADS
    )
    rows = enumerate(texts(mask=False))
    return transformers.BertForSequenceClassification(config), [
        {**row, "labels": torch.tensor(k % 3)} for k, row in rows
    ]


def vit() -> tuple[nn.Module, Data]:
    """A vision transformer, for one of three classes."""
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **SIZES, **HEADS)
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), [
        {"pixel_values": image, "labels": torch.tensor(k % 3)} for k, image in enumerate(images)
    ]


def t5() -> tuple[nn.Module, Data]:
    """T5: an encoder and a decoder; one embedding has three uses."""
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    return transformers.T5ForConditionalGeneration(config), texts(mask=False)


def llama() -> tuple[nn.Module, Data]:
    """Llama, with grouped keys and values."""
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=1, use_cache=False, **SIZES, **HEADS)
    return transformers.LlamaForCausalLM(config), texts()


def mamba() -> tuple[nn.Module, Data]:
    """Mamba: a state space model, whose recurrence is traced step by step."""
    config = transformers.MambaConfig(vocab_size=64, state_size=4, use_cache=False, **SIZES)
    return transformers.MambaForCausalLM(config), texts(mask=False)


MODELS: dict[str, Callable[[], tuple[nn.Module, Data]]] = {
    model.__name__: model for model in (gpt2, bert, vit, t5, llama, mamba)
}


def trainer_of(model: nn.Module, data: Data, folder: str, accumulation: int) -> transformers.Trainer:
    """A Trainer for two steps of AdamW, with gradients clipped, as its defaults are."""
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        dataloader_drop_last=True,
        logging_steps=1,
        seed=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)  # type: ignore[arg-type]
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def first_batch(trainer: transformers.Trainer) -> dict[str, Any]:
    """What the Trainer hands to the model in its first step; the generator's state is as before."""
    with torch.random.fork_rng():
        batches = iter(trainer.get_train_dataloader())
        (batch, *_), items = trainer.get_batch_samples(batches, 1, torch.device("cpu"))
    keywords = dict(batch)
    if trainer.model_accepts_loss_kwargs:
        keywords["num_items_in_batch"] = items
    return keywords


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


@dataclass(frozen=True)
class Trained:
    """The end of a training: losses, weights, the largest measured peak of a step, and the plan, if any."""

    losses: list[float]
    weights: dict[str, Tensor]
    measured_bytes: int
    plan: irc.Plan | None

    def equals(self, other: Trained) -> bool:
        """Whether losses and weights are the same bit for bit."""
        same = all(torch.equal(value, other.weights[name]) for name, value in self.weights.items())
        return same and self.losses == other.losses


def train(name: str, accumulation: int, budget: int | str | None = None, **options: Any) -> Trained:
    """Trains a model, within a budget if there is one; `options` are those of irc.optimize."""
    transformers.set_seed(0)
    model, data = MODELS[name]()
    plan: irc.Plan | None = None
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model, data, folder, accumulation)
        trained = model
        if budget is not None:
            batch = first_batch(trainer)
            model.train()
            # the one line: the fitted model is of a subclass of the model's class
            # gradients that accumulate over batches are there in forward, and have to be counted
            options["accumulate_gradients"] = accumulation > 1
            trained = irc.optimize(model, (), budget, example_kwargs=batch, **options)
            plan = trained.plan
            trainer = trainer_of(trained, data, folder, accumulation)
        peaks = measure_steps(trainer, trained)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(losses, model.state_dict(), max(peaks), plan)


def main(
    names: Sequence[str] = tuple(MODELS), budget: int | str = "85%", accumulation: int = 1, **options: Any
) -> dict[str, bool]:
    """Trains each model as it is and fitted; whether losses and weights are the same bit for bit."""
    transformers.logging.set_verbosity_error()
    verdicts: dict[str, bool] = {}
    for name in names:
        expected, fitted = train(name, accumulation), train(name, accumulation, budget, **options)
        plan = fitted.plan
        assert plan is not None and len(expected.losses) == 2
        same = expected.equals(fitted)
        verdicts[name] = same and fitted.measured_bytes <= plan.peak_bytes
        saved = plan.peak_bytes / plan.baseline_peak_bytes
        print(
            f"{name}: losses and weights {'the same' if same else 'DIFFERENT'}, {saved:.1%} of the memory, "
            f"{plan.overhead:.1%} more time; budget {plan.budget_bytes:,} B, predicted peak "
            f"{plan.peak_bytes:,} B, own steps {fitted.measured_bytes:,} B"
        )
    return verdicts


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(MODELS))
