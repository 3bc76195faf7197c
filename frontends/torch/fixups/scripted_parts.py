"""Parts of a model that torch.jit has made: traced as they are written, where all of them can be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ....ir import UnsupportedError
from ....torch_support.scripted import is_scripted, rounds_otherwise, unoptimized, untraceable

__all__ = ["rounding_parts", "scripted_parts"]


def scripted_parts(root: nn.Module) -> contextlib.AbstractContextManager[None]:
    """While active, the parts of a module that torch.jit has made run operation by operation.

    Raises:
        UnsupportedError: IRC534 for a part that does what no trace sees.
    """
    parts = list(_outermost(root))
    for name, part in parts:
        if why := untraceable(part):
            raise UnsupportedError(
                "IRC534",
                f"submodule {name!r} is made by torch.jit, and cannot be traced: {why}",
                help="use the module that it was made of",
            )
    return unoptimized() if parts else contextlib.nullcontext()


def rounding_parts(root: nn.Module) -> list[str]:
    """The parts that torch.jit may differentiate by formulas that round in another way."""
    return [name for name, part in _outermost(root) if rounds_otherwise(part)]


def _outermost(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the parts that Python calls: their own parts run within them."""
    scripted = {name: child for name, child in root.named_modules() if is_scripted(child)}
    for name, child in scripted.items():
        if name.rpartition(".")[0] not in scripted:
            yield name, child
