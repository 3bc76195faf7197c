"""QLoRA: adapters of PEFT beside weights that bitsandbytes holds in 4 bits, trained within a budget.

Run it with `python examples/qlora.py`; it needs `pip install transformers accelerate peft bitsandbytes`. The
model is a small Llama with random weights; with one of the hub's, only its name changes.

What to look out for:

- The model is packed, prepared and wrapped first, and fitted last.
- `bnb_4bit_compute_dtype` is the type of everything else, or that of autocast.
- Leave gradient checkpointing out: irc chooses what runs again.
"""

from __future__ import annotations

import tempfile
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

import irc

STEPS = 4
WORDS = 500


def quantised(folder: str) -> Any:
    """The model of a folder with its linear layers in NF4, and adapters beside them."""
    packed = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=packed, dtype=torch.bfloat16, device_map="cpu"
    )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapters = peft.LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    return peft.get_peft_model(model, adapters).train()


def save_small_llama(folder: str) -> None:
    """Writes a Llama with random weights, as the hub would hold it."""
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        use_cache=False,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def train(model: nn.Module, batches: list[Tensor]) -> tuple[list[float], list[int]]:
    """Some steps of AdamW; returns the losses, and the measured peak of each step."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    torch.manual_seed(1)
    losses: list[float] = []
    peaks: list[int] = []
    for words in batches:

        def forward_backward(words: Tensor = words) -> Tensor:
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            return loss

        optimizer.zero_grad()
        loss, peak = irc.measured_step(model, forward_backward, words)
        optimizer.step()
        losses.append(loss.item())
        peaks.append(peak)
    return losses, peaks


def main(budget: int | str = "50%", **options: Any) -> bool:
    """Trains the model as it is and fitted; whether losses and adapters are the same bit for bit."""
    transformers.logging.set_verbosity_error()
    batches = [torch.randint(0, WORDS, (4, 64)) for _ in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        save_small_llama(folder)
        original, model = quantised(folder), quantised(folder)
    example = {"input_ids": batches[0], "labels": batches[0]}
    fitted = irc.optimize(model, (), budget, example_kwargs=example, **options)
    print(fitted.plan.summary())
    (expected, _), (losses, peaks) = train(original, batches), train(fitted, batches)
    pairs = zip(original.named_parameters(), fitted.named_parameters(), strict=True)
    is_same = expected == losses and all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    print(f"losses {losses}: {'the same' if is_same else 'DIFFERENT'} as without irc")
    plan = fitted.plan
    print(f"budget {plan.budget_bytes:,} B, predicted peak {plan.peak_bytes:,} B, own steps {max(peaks):,} B")
    return is_same and max(peaks) <= plan.peak_bytes


if __name__ == "__main__":
    main()
