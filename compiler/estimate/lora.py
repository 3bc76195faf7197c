"""Low-rank adapters beside the linear layers of a model of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ir import UsageError
from .four_bits import FourBitLinear

__all__ = ["Lora", "add_adapters", "parse_train"]

_HEADS = ("score", "classifier", "classification_head")
"""The names of the heads of classifiers, which have no weights yet: they are trained whole."""
_KINDS = ("lora", "qlora")
"""Adapters beside layers as they are, and beside packed ones."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters on all linear layers but the last: their weights alone are trained.

    Args:
        rank: The rank of each.
        in_four_bits: Whether the linear layers beside them are packed.

    Source:
        Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021); Dettmers et al., QLoRA:
        Efficient Finetuning of Quantized LLMs (2023).
    """

    rank: int
    in_four_bits: bool = False


def parse_train(text: str) -> Lora | None:
    """Reads what is trained: `full` for all parameters, adapters as `lora:r=16`, or `qlora:r=16`.

    Returns:
        The adapters; None for all parameters.

    Raises:
        UsageError: IRC580 when it is written in another way.
    """
    if text == "full":
        return None
    kind, _, rank = text.partition(":r=")
    if kind in _KINDS and rank.isascii() and rank.isdecimal() and 0 < int(rank[:9]) < 1 << 20:
        return Lora(int(rank), in_four_bits=kind == "qlora")
    raise UsageError("IRC580", f"--train {text!r} is not known", help="give full, lora:r=16 or qlora:r=16")


class _Adapted(nn.Module):
    """A frozen linear layer, and a trained one of low rank beside it."""

    def __init__(self, base: Any, features: tuple[int, int], rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(features[0], rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, features[1], bias=False, dtype=dtype)

    @property
    def weight(self) -> Any:
        """The weight of the frozen layer, whose type some models look at."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """The bias of the frozen layer."""
        return getattr(self.base, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


def add_adapters(model: Any, lora: Lora, linear: tuple[type[nn.Module], ...]) -> None:
    """Freezes a model, and puts an adapter beside each of its linear layers but the last.

    The heads of classifiers are trained as they are.

    Args:
        model: The model.
        lora: The adapters.
        linear: The classes of linear layers whose weights are transposed, beside torch's own.
    """
    last = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in _HEADS)
    for name, module in list(model.named_modules()):
        if module is last or name.split(".")[0] in _HEADS or not isinstance(module, (nn.Linear, *linear)):
            continue
        weight: Any = module.weight
        features = weight.shape[::-1] if isinstance(module, nn.Linear) else weight.shape
        path, _, last_name = name.rpartition(".")
        if lora.in_four_bits:
            rows = weight if isinstance(module, nn.Linear) else weight.T
            module = FourBitLinear(rows.detach().contiguous(), getattr(module, "bias", None))
        adapted = _Adapted(module, (features[0], features[1]), lora.rank, weight.dtype)
        setattr(model.get_submodule(path), last_name, adapted)
