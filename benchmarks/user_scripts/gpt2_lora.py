"""GPT-2 with dropout, trained through adapters of peft's, with labels given to the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import irc

TITLE = "GPT-2 of 6 layers, LoRA of peft's, dropout"


def model() -> Any:
    """Returns the model as the script makes it."""
    config = GPT2Config(
        n_layer=6, n_embd=384, n_head=6, vocab_size=8000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    adapters = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True
    )
    return get_peft_model(GPT2LMHeadModel(config), adapters)  # pyright: ignore[reportArgumentType]


def words() -> Tensor:
    """Returns a batch: [8, 128]."""
    return torch.randint(0, 8000, (8, 128), generator=torch.Generator().manual_seed(2))


def example() -> tuple[Tensor, ...]:
    """Returns the arguments of a call."""
    return (words(),)


def steps(model: nn.Module) -> Iterator[Tensor | None]:
    """Trains; yields None before each forward and the loss after each backward."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    batch = words()
    while True:
        yield None
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()


def planned(model: nn.Module, budget: str) -> Any:
    """Plans the model for a budget."""
    batch = words()
    return irc.optimize(
        model, (), budget, example_kwargs={"input_ids": batch, "labels": batch, "use_cache": False}
    )


def gradient_checkpointing(model: Any) -> nn.Module:
    """Turns on the checkpoints that transformers brings."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
