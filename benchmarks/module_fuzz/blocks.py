"""The kinds of blocks: each takes a tensor of [rows, LENGTH, WIDTH], and returns one of that shape.

They are listed in `blocks.txt`. A block may return more results behind its first one: these become results
of the model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from . import parts
from .parts import LENGTH, WIDTH

__all__ = ["KINDS", "LENGTH", "WIDTH", "Kind"]

_TABLE = Path(__file__).with_name("blocks.txt")


class _Part(nn.Module):
    """A block whose forward is a function of itself and of a tensor."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        """What the function returns."""
        return self.function(self, x)


@dataclass(frozen=True)
class Kind:
    """A kind of blocks.

    Args:
        attributes: Expressions of the modules, parameters and numbers that its functions use, by name.
        variants: Each with its line in the table.
    """

    attributes: dict[str, str]
    variants: list[tuple[int, str]]

    def variant(self, seed: int) -> tuple[int, str]:
        """The variant that a seed chooses."""
        return random.Random(seed).choice(self.variants)

    def make(self, seed: int) -> nn.Module:
        """A block, of the variant that a seed chooses; its weights come from torch's generator."""
        line, text = self.variant(seed)
        names: dict[str, Any] = dict(vars(parts))
        if text.startswith("= "):
            return eval(text[2:], names)
        *statements, result = text.split("; ")
        source = "\n" * (line - 1) + f"def block(s, x): {'; '.join((*statements, f'return {result}'))}"
        exec(compile(source, _TABLE, "exec"), names)
        part = _Part(names["block"])
        for name, expression in self.attributes.items():
            if re.search(rf"\bs\.{name}\b", text):
                setattr(part, name, eval(expression, names))
        return part


def _kinds() -> dict[str, Kind]:
    """Reads the table."""
    kinds: dict[str, Kind] = {}
    kind = Kind({}, [])
    for number, line in enumerate(_TABLE.read_text().splitlines(), 1):
        if line.startswith("    "):
            kind.variants.append((number, line.strip()))
        elif line and not line.startswith("#"):
            name, _, attributes = line.partition(":")
            assert name not in kinds, name
            pairs = (each.split(" = ", 1) for each in attributes.strip().split("; ") if each)
            kinds[name] = kind = Kind({attribute: text for attribute, text in pairs}, [])
    return kinds


KINDS = _kinds()
"""By name."""
