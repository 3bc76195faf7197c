"""Lets Dynamo compute with numbers as symbols, and notes what it does with them."""

# Dynamo's handling of symbols has no public door.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import operator
import threading
import unittest.mock
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["Operation", "SymbolUses", "symbolic_numbers"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A node that Dynamo made, as it was then: one that is erased forgets its arguments.

    Args:
        node: The node.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass
class SymbolUses:
    """What Dynamo did while it computed with symbols.

    Args:
        operations: The nodes that it made.
        decides: Whether a symbol decided anything, or was written as text.
    """

    operations: list[Operation] = field(default_factory=list[Operation])
    decides: bool = False


_IDENTITIES = ("is", operator.is_), ("is not", operator.is_not)
"""The comparisons that Dynamo answers for a symbol without a guard."""


@contextlib.contextmanager
def symbolic_numbers(sources: set[str], found: SymbolUses) -> Generator[None]:
    """Lets Dynamo compute with numbers as symbols meanwhile, in this thread.

    Args:
        sources: The numbers, as Dynamo names variables: `L['n']`.
        found: Takes what Dynamo does with them.
    """
    import torch._dynamo.config as config
    from torch._dynamo import symbolic_convert
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, auto_unset
    from torch._dynamo.variables import builder, builtin, lazy
    from torch._dynamo.variables.tensor import SymNodeVariable

    thread = threading.get_ident()

    def noting_nodes(create: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
        def created(*args: Any, **kwargs: Any) -> fx.Node:
            node = create(*args, **kwargs)
            if threading.get_ident() == thread:
                found.operations.append(Operation(node, node.args, node.kwargs))
            return node

        return created

    def noting_decisions(decide: Callable[..., Any]) -> Callable[..., Any]:
        def decided(env: ShapeEnv, expression: Any, *args: Any, **kwargs: Any) -> Any:
            found.decides |= bool(expression.free_symbols) and threading.get_ident() == thread
            return decide(env, expression, *args, **kwargs)

        return decided

    def noting_texts(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            found.decides |= threading.get_ident() == thread
            return make(*args, **kwargs)

        return made

    def noting_calls(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(builtin: Any, tx: Any, args: list[Any], kwargs: Any) -> Any:
            note_identity(builtin.fn, args)
            return call(builtin, tx, args, kwargs)

        return called

    def noting_operator(function: Callable[..., Any]) -> Callable[..., Any]:
        def compared(tx: Any, args: list[Any], kwargs: Any) -> Any:
            note_identity(function, args)
            return handlers[function](tx, args, kwargs)

        return compared

    def note_identity(function: object, args: list[Any]) -> None:
        if function in handlers and threading.get_ident() == thread:
            values = [each.realize() for each in args]
            with_none = any(
                each.is_python_constant() and each.as_python_constant() is None for each in values
            )
            are_symbols = any(isinstance(each, SymNodeVariable) for each in values)
            found.decides |= are_symbols and not with_none

    def as_symbols(process: Callable[..., Any]) -> Callable[..., Any]:
        def processed(tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            entry = process(tx, name, *args, **kwargs)
            is_symbol = name in sources and threading.get_ident() == thread
            return FrameStateSizeEntry(scalar=auto_dynamic, size=auto_unset) if is_symbol else entry

        return processed

    handlers = {function: symbolic_convert.compare_op_handlers[sign] for sign, function in _IDENTITIES}
    noting = {sign: noting_operator(function) for sign, function in _IDENTITIES}
    patched: Any = config.patch  # pyright: ignore[reportAttributeAccessIssue]
    escaped = (source.replace("[", r"\[").replace("]", r"\]") for source in sources)
    with (
        patched(specialize_int=False, specialize_float=False),
        torch.compiler.config.patch(dynamic_sources=",".join(escaped)),  # pyright: ignore[reportAttributeAccessIssue]
        _replaced(builder, "process_automatic_dynamic", as_symbols),
        _replaced(fx.Graph, "create_node", noting_nodes),
        _replaced(lazy.LazySymNodeFormatString, "__init__", noting_texts),
        _replaced(builtin.BuiltinVariable, "call_function", noting_calls),
        unittest.mock.patch.dict(symbolic_convert.compare_op_handlers, noting),
        _replaced(ShapeEnv, "evaluate_expr", noting_decisions),
        _replaced(ShapeEnv, "guard_or_defer_runtime_assert", noting_decisions),
    ):
        yield


@contextlib.contextmanager
def _replaced(holder: Any, name: str, wrap: Callable[[Any], Any]) -> Generator[None]:
    before = getattr(holder, name)
    setattr(holder, name, wrap(before))
    try:
        yield
    finally:
        setattr(holder, name, before)
