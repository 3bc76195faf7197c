"""The backend of `torch.compile` by its name: `torch.compile(model, backend="irc", options={...})`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ...ir import UsageError
from .backend import Backend, backend

__all__ = ["irc_backend"]

_made: dict[int, tuple[Mapping[str, Any], Backend]] = {}
"""The backend of each call of `torch.compile`, by the identity of its options, which stay alive for that."""


def irc_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a graph for `torch.compile(model, backend="irc", options={"budget": "4GiB"})`.

    All graphs of one call of `torch.compile` share a budget, as those of one `irc.backend` do.

    Args:
        graph: The graph, from Dynamo.
        example_inputs: Its inputs.
        options: The arguments of `irc.backend`, by name.
        mode: A mode of Inductor, which this backend has none of.

    Raises:
        UsageError: IRC548 without a budget, for an option that `irc.backend` has not, or for a mode; as
            `irc.backend`.
    """
    given = {} if options is None else options
    known = inspect.signature(backend).parameters
    if mode is not None or "budget" not in given or not given.keys() <= known.keys():
        unknown = [name for name in given if name not in known]
        others = ", ".join(sorted(known.keys() - {"budget", "profile"}))
        what = f"mode {mode!r}" if mode is not None else f"options {unknown}" if unknown else "no budget"
        raise UsageError(
            "IRC548",
            f'torch.compile(backend="irc") was given {what}',
            help=f'give options={{"budget": "4GiB"}}, and perhaps {others}',
        )
    if id(given) not in _made:
        _made[id(given)] = given, backend(**given)
    return _made[id(given)][1](graph, example_inputs)
