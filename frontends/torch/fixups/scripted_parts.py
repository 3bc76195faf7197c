"""Code of torch.jit in a model: traced as it is written, where all of it can be."""

# torch.jit has no other way to see calls of its functions.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn

from ....ir import Location, UnsupportedError
from ....torch_support.scripted import (
    as_written,
    bound,
    is_method_of,
    is_scripted,
    rounds_otherwise,
    unoptimized,
    untraceable,
)
from ....torch_support.this_thread import replaced_here
from ..source_lines import user_line

__all__ = ["scripted_parts"]


@contextlib.contextmanager
def scripted_parts(root: nn.Module) -> Generator[dict[str, None]]:
    """While active, what torch.jit has made of parts of a module and of functions runs as it is written.

    Yields:
        The parts, and the functions as they are called, that torch.jit may differentiate by formulas that
        round in another way; in words.

    Raises:
        UnsupportedError: IRC534 for a part or a function that does what no trace sees.
    """
    rounding = dict[str, None]()
    parts = list(_outermost(root))
    for name, part in parts:
        if why := untraceable(part):
            raise _refused(f"submodule {name!r}", why, "module")
        if rounds_otherwise(part):
            rounding[f"submodule {name}"] = None
    call: Any = torch._C.ScriptFunction.__call__

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        line = user_line(sys._getframe(1))
        if why := untraceable(function):
            raise _refused(f"function {function.name!r}", why, "function", line)
        if rounds_otherwise(function):
            rounding[f"function {function.name}" + (f" ({line})" if line else "")] = None
        with unoptimized():
            return call(as_written(function), *bound(function, args, kwargs))

    scripted = [child for child in root.modules() if is_scripted(child)]
    call_method: Any = torch._C.ScriptMethod.__call__

    def method_called(method: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(is_method_of(method, each) for each in scripted):
            raise UnsupportedError(
                "IRC534",
                f"the forward calls {method.name} of a module that torch.jit has made, which is no submodule",
                help="register it as a submodule, or use the module that it was made of",
            )
        return call_method(method, *args, **kwargs)

    with (
        replaced_here(torch._C.ScriptFunction, "__call__", called),
        replaced_here(torch._C.ScriptMethod, "__call__", method_called),
        unoptimized() if parts else contextlib.nullcontext(),
    ):
        yield rounding


def _refused(name: str, why: str, kind: str, line: str | None = None) -> UnsupportedError:
    return UnsupportedError(
        "IRC534",
        f"{name} is made by torch.jit, and cannot be traced: {why}",
        at=None if line is None else Location(source=line),
        help=f"use the {kind} that it was made of",
    )


def _outermost(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the parts that Python calls: their own parts run within them."""
    scripted = {name: child for name, child in root.named_modules() if is_scripted(child)}
    for name, child in scripted.items():
        if name.rpartition(".")[0] not in scripted:
            yield name, child
