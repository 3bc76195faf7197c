"""LoRA: adapters of PEFT beside frozen weights, trained within a budget.

Run it with `python examples/peft_lora.py`; it needs `pip install transformers peft`. The model is a small
Llama with random weights.

What to look out for:

- The model is wrapped first, and fitted last.
- Adapters are merged, saved and loaded as without irc: the fitted model is one of PEFT's.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from torch import Tensor

import irc

WORDS, STEPS = 500, 4


def model() -> Any:
    """A Llama with adapters beside all linear layers; these alone are trained."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    adapters = peft.LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters).train()


def train(module: Any, batches: list[Tensor]) -> tuple[list[float], list[int]]:
    """Some steps of AdamW; returns the losses, and the measured peak of each step."""
    optimizer = torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=1e-3)
    torch.manual_seed(1)
    losses: list[float] = []
    peaks: list[int] = []
    for words in batches:

        def forward_backward(words: Tensor = words) -> Tensor:
            loss = module(input_ids=words, labels=words).loss
            loss.backward()
            return loss

        optimizer.zero_grad()
        loss, peak = irc.measured_step(module, forward_backward, words)
        optimizer.step()
        losses.append(loss.item())
        peaks.append(peak)
    return losses, peaks


def main(budget: int | str = "50%", **options: Any) -> bool:
    """Trains the model as it is and fitted; whether losses and adapters are the same bit for bit."""
    transformers.logging.set_verbosity_error()
    original, module = model(), model()
    batches = [torch.randint(0, WORDS, (4, 64)) for _ in range(STEPS)]
    batch = {"input_ids": batches[0], "labels": batches[0]}
    fitted = irc.optimize(module, (), budget, example_kwargs=batch, **options)
    print(fitted.plan.summary())
    (expected, _), (losses, peaks) = train(original, batches), train(fitted, batches)
    pairs = zip(original.parameters(), module.parameters(), strict=True)
    is_same = expected == losses and all(torch.equal(a, b) for a, b in pairs)
    print(f"losses {losses}: {'the same' if is_same else 'DIFFERENT'} as without irc")
    plan = fitted.plan
    print(f"budget {plan.budget_bytes:,} B, predicted peak {plan.peak_bytes:,} B, own steps {max(peaks):,} B")
    return is_same and max(peaks) <= plan.peak_bytes


if __name__ == "__main__":
    main()
