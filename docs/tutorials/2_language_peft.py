"""
A language model with LoRA adapters
===================================

This tutorial plans a Hugging Face GPT-2 with LoRA adapters of PEFT. The base model is frozen: it has no
gradients and no optimizer state. So most of the memory is activations that backward needs, and a plan can
save much of it.
"""

import torch
import transformers
from peft import LoraConfig, get_peft_model

import irc

# %%
# The model and a batch
# ---------------------
#
# The model has random weights, so that nothing is downloaded. ``use_cache=False`` turns off the cache of
# keys and values, which training does not use.

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
# Plan the step
# -------------
#
# Call ``irc.optimize`` after ``get_peft_model``. The arguments of a step are keyword arguments here, so
# they go into ``example_kwargs``. The model gets labels and returns the loss in its result, so ``loss=`` is
# left out.

model = irc.optimize(model, (), "55%", example_kwargs=batch)
print(model.plan.summary())

# %%
# Train
# -----
#
# The training loop does not change. Dropout draws the same masks as in the original, and the random
# generator ends in the same state.

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for _ in range(3):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")

# %%
# See the memory by line
# ----------------------
#
# This table shows the bytes by line of the model's code. :doc:`/howto/loops` shows irc with the Hugging
# Face Trainer and other libraries.

print(model.plan.explain(by="line", top=6))
