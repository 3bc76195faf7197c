"""The models that are exported: known architectures with drawn weights, in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import models

__all__ = ["SUBJECTS", "Subject"]


@dataclass(frozen=True)
class Subject:
    """A model with its inputs.

    Args:
        module: The model, in eval mode.
        inputs: By the names of its forward's arguments, in their order.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]


Maker = Callable[[bool], Subject]


def _image_model(name: str, full: Mapping[str, Any], tiny: Mapping[str, Any]) -> Maker:
    def make(is_tiny: bool) -> Subject:
        loss, (images, _) = models.MODELS[name](**(tiny if is_tiny else full))
        module = loss.get_submodule("model")
        for part, norm in module.named_modules():
            if part.endswith("norm3"):  # branches begin small, as they are trained: else rounding errors grow
                nn.init.constant_(norm.get_parameter("weight"), 0.2)
        return Subject(module, {"input" if isinstance(module, nn.Sequential) else "x": images})

    return make


def _lstm(is_tiny: bool) -> Subject:
    sizes = {"vocabulary": 50, "embedding": 6, "hidden": 5} if is_tiny else {}
    loss, (tokens, _) = models.lstm(batch=4, sequence=8, **sizes)
    return Subject(loss.get_submodule("model"), {"tokens": tokens})


def _tokens(vocabulary: int, sequence: int) -> Tensor:
    return torch.randint(vocabulary, (2, sequence))


def _masked(ids: Tensor) -> dict[str, Tensor]:
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _gpt2(is_tiny: bool) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    depth, width, vocabulary = (2, 24, 50) if is_tiny else (12, 192, 5000)
    config = GPT2Config(
        n_layer=depth,
        n_embd=width,
        n_head=3 if is_tiny else 12,
        vocab_size=vocabulary,
        n_positions=64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Subject(GPT2LMHeadModel(config), _masked(_tokens(vocabulary, 8 if is_tiny else 32)))


def _bert(is_tiny: bool) -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    depth, width, vocabulary = (2, 24, 50) if is_tiny else (12, 192, 5000)
    config = BertConfig(
        num_hidden_layers=depth,
        hidden_size=width,
        num_attention_heads=3 if is_tiny else 12,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=64,
    )
    return Subject(BertForMaskedLM(config), _masked(_tokens(vocabulary, 8 if is_tiny else 32)))


def _vit(is_tiny: bool) -> Subject:
    from transformers import ViTConfig, ViTForImageClassification

    depth, width, size = (2, 24, 16) if is_tiny else (12, 192, 64)
    settings: dict[str, Any] = dict(
        num_hidden_layers=depth,
        hidden_size=width,
        num_attention_heads=3,
        intermediate_size=4 * width,
        image_size=size,
        patch_size=size // 8,
        num_labels=10,
    )
    config = ViTConfig(**settings)
    return Subject(ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, size, size)})


def _t5(is_tiny: bool) -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    depth, width, vocabulary = (2, 24, 50) if is_tiny else (6, 192, 5000)
    settings: dict[str, Any] = dict(
        num_layers=depth,
        d_model=width,
        num_heads=3 if is_tiny else 8,
        d_kv=8,
        d_ff=4 * width,
        vocab_size=vocabulary,
        use_cache=False,
        decoder_start_token_id=0,
        attn_implementation="eager",  # torch's decompositions fail on the other one: "Cannot view a tensor"
    )
    config = T5Config(**settings)
    length = 8 if is_tiny else 24
    inputs = {
        "input_ids": _tokens(vocabulary, length),
        "decoder_input_ids": _tokens(vocabulary, length // 2),
    }
    return Subject(T5ForConditionalGeneration(config), inputs)


_MAKERS: dict[str, Maker] = {
    "ResNet-50": _image_model(
        "resnet50", {"batch": 4, "size": 96}, {"batch": 2, "size": 32, "width": 4, "depths": (1, 1)}
    ),
    "U-Net": _image_model("unet", {"batch": 2, "size": 64}, {"batch": 2, "size": 32, "base": 4}),
    "LSTM": _lstm,
    "GPT-2": _gpt2,
    "BERT": _bert,
    "ViT": _vit,
    "T5": _t5,
}


def _seeded(make: Maker) -> Maker:
    def made(is_tiny: bool = False) -> Subject:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            subject = make(is_tiny)
            _spread(subject)
            return subject

    return made


def _spread(subject: Subject) -> None:
    """Makes no two weights equal, and takes BatchNorm's statistics from the inputs.

    Fresh norms and biases are ones and zeros, and an exporter that shares equal tensors would make one of
    them.
    """
    norms = [m for m in subject.module.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for parameter in subject.module.parameters():
            if parameter.dim() < 2:
                parameter += 0.05 * torch.randn_like(parameter)
        for norm in norms:
            norm.momentum = 1.0
        if norms:
            subject.module.train()(**subject.inputs)
        for norm in norms:
            norm.momentum = 0.1
    subject.module.eval()


SUBJECTS: dict[str, Maker] = {name: _seeded(make) for name, make in _MAKERS.items()}
"""By name; each is called with whether a tiny one is wanted, and draws from a seed of its own."""
