"""Small instances of the models of `transformers`, as transformers.json has them: settings and batches.

A model has the settings besides its class and its batch; `use` stands for shared ones, and `config` for a
configuration within. A batch is a name, or kinds of tensors with their shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .registry import Instance, enter, transformers_for

_VOCABULARY, _SEQUENCE, _BATCH = 96, 32, 8


@cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(Path(__file__).with_name("transformers.json").read_text())


def _enter(name: str, row: Mapping[str, Any]) -> None:
    def make() -> Instance:
        model = getattr(transformers_for(name), row["model"])
        settings = {key: value for key, value in row.items() if key not in ("model", "batch")}
        return Instance(model(model.config_class(**_settings(name, settings))), keywords=_batch(row["batch"]))

    enter(name, make)


def _settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the shared ones, and with configurations made."""
    found = dict(_table()["shared"][given["use"]]) if "use" in given else {}
    for key, value in given.items():
        if isinstance(value, dict):
            inner = _settings(name, value)
            made = inner.pop("config", None)
            found[key] = inner if made is None else getattr(transformers_for(name), made)(**inner)
        elif key != "use":
            found[key] = value
    return found


# ---------------------------------------------------------------------- batches


def _tokens(batch: int = _BATCH, sequence: int = _SEQUENCE, vocabulary: int = _VOCABULARY) -> Tensor:
    """Token numbers [batch, sequence], from 4 on: the first four are left to special tokens."""
    return torch.randint(4, vocabulary, (batch, sequence))


def _padded(batch: int = _BATCH, sequence: int = _SEQUENCE) -> Tensor:
    """An attention mask [batch, sequence] of sentences of which every other ends a quarter earlier."""
    mask = torch.ones(batch, sequence, dtype=torch.int64)
    mask[1::2, sequence * 3 // 4 :] = 0
    return mask


_KINDS: dict[str, Callable[..., Tensor]] = {
    "tokens": _tokens,
    "padded": _padded,
    "attend": lambda *shape: torch.ones(shape, dtype=torch.int64),
    "below": lambda high, *shape: torch.randint(high, shape),
    "ones": torch.ones,
    "rand": torch.rand,
    "randn": torch.randn,
}


def _batch(asked: str | Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a step."""
    if isinstance(asked, str) and asked in _MADE:
        return _MADE[asked]()
    kinds: Mapping[str, Any] = _table()["batches"][asked] if isinstance(asked, str) else asked
    return {k: _KINDS[v[0]](*v[1:]) if isinstance(v, list) else v for k, v in kinds.items()}


def _next_token() -> dict[str, Any]:
    tokens, mask = _tokens(), _padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _short() -> dict[str, Any]:
    tokens = _tokens(sequence=12)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked() -> dict[str, Any]:
    tokens, mask = _tokens(), _padded()
    labels = tokens.masked_fill((torch.rand(tokens.shape) > 0.3) | (mask == 0), -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _answered() -> dict[str, Any]:
    start, end = torch.randint(_SEQUENCE * 3 // 4, (2, _BATCH))
    tokens, mask = _tokens(), _padded()
    return {"input_ids": tokens, "attention_mask": mask, "start_positions": start, "end_positions": end}


def _discriminated() -> dict[str, Any]:
    labels = torch.randint(2, (_BATCH, _SEQUENCE)).float()
    return {"input_ids": _tokens(), "labels": labels}


def _boxed() -> dict[str, Any]:
    corners = torch.randint(500, (_BATCH, _SEQUENCE, 2))
    return {**_masked(), "bbox": torch.cat([corners, corners + torch.randint(1, 400, corners.shape)], -1)}


def _with_image() -> dict[str, Any]:
    tokens = torch.cat([torch.full((_BATCH, 16), 95), _tokens(_BATCH, 16, 90)], 1)
    return {"input_ids": tokens, "pixel_values": torch.randn(_BATCH, 3, 32, 32), "labels": _tokens()}


def _decisions() -> dict[str, Any]:
    return {
        "states": torch.randn(_BATCH, 10, 5),
        "actions": torch.randn(_BATCH, 10, 2),
        "rewards": torch.randn(_BATCH, 10, 1),
        "returns_to_go": torch.randn(_BATCH, 10, 1),
        "timesteps": torch.arange(10).expand(_BATCH, 10).clone(),
        "attention_mask": torch.ones(_BATCH, 10),
    }


_MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "next-token": _next_token,
    "short": _short,
    "masked": _masked,
    "pretraining": lambda: {**_masked(), "next_sentence_label": torch.randint(2, (_BATCH,))},
    "answered": _answered,
    "discriminated": _discriminated,
    "boxed": _boxed,
    "llava": _with_image,
    "sam": lambda: {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.rand(1, 1, 2, 2) * 60},
    "decisions": _decisions,
}
"""Batches whose tensors depend on one another."""

for _name, _row in _table()["models"].items():
    _enter(_name, _row)
