"""
A language model with LoRA adapters
===================================

A GPT-2 of Hugging Face with adapters by PEFT. The base model is frozen, so that most of the memory is what
backward keeps.
"""

import torch
import transformers
from peft import LoraConfig, get_peft_model

import irc

# %%
# A model with random weights. ``use_cache=False``: a cache of keys is of no use in training.

torch.manual_seed(0)
config = transformers.GPT2Config(
    n_layer=4,
    n_embd=128,
    n_head=4,
    vocab_size=512,
    n_positions=128,
    use_cache=False,
    bos_token_id=0,
    eos_token_id=0,
)
adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
model = get_peft_model(transformers.GPT2LMHeadModel(config), adapters).train()
ids = torch.randint(0, 512, (4, 128))
batch = {"input_ids": ids, "labels": ids}

# %%
# Wrap first, plan afterwards. The arguments of a step are keywords here; the loss is in the model's result.

model = irc.optimize(model, (), "55%", example_kwargs=batch)
print(model.plan.summary())

# %%
# Dropout draws what it would have drawn: the generator ends where eager leaves it. The loop is the usual
# one.

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for _ in range(3):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")

# %%
# Where the memory goes, by line of the model's code.

print(model.plan.explain(by="line", top=6))
