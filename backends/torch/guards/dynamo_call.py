"""Lets Dynamo interpret a call of a forward on tensors without data, and reports what it did with numbers.

Dynamo interprets the forward's bytecode. It opens an argument when anything looks at its value, type or
identity, and then guards it. None of the code that it writes is run.
"""

# Dynamo has no public door to its answers about tracing, nor to the code that it writes.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dis
import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .symbolic_numbers import SymbolUses, symbolic_numbers

__all__ = ["Interpretation", "TraceAnswers", "interpret", "is_number"]


@dataclass(frozen=True, slots=True)
class TraceAnswers:
    """The answers that the model's code got when it was captured.

    Args:
        compiling: The answer of `torch.compiler.is_compiling()`.
        exporting: The answer of `torch.compiler.is_exporting()`.
    """

    compiling: bool = False
    exporting: bool = False


@dataclass
class Interpretation:
    """What Dynamo did with the numbers of a call.

    Args:
        names: The variables of the numbers, by their indices among the leaves of the arguments.
        guards: The kind and the source of each guard.
        variables: The names that the written code reads or writes, one for each time.
        symbols: What it did with the symbolic ones.
    """

    names: dict[int, str]
    guards: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    variables: list[str] = field(default_factory=list[str])
    symbols: SymbolUses = field(default_factory=SymbolUses)


def is_number(leaf: object) -> bool:
    """Whether an argument is a number of Python's own classes; a truth value is none."""
    return type(leaf) is int or type(leaf) is float


def interpret(
    module: nn.Module,
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    answers: TraceAnswers,
    symbolic: frozenset[int] = frozenset(),
) -> Interpretation | None:
    """Interprets the forward of a module.

    Args:
        module: The module whose forward is called.
        leaves: The leaves of the positional and keyword arguments.
        tree: Their nesting.
        answers: The answers that capture gave.
        symbolic: The indices of numbers that Dynamo is to compute with as symbols.

    Returns:
        None if Dynamo does not follow the forward as a whole, and if numbers are within other objects.
    """
    marked = [_Place(k, leaf) if is_number(leaf) else leaf for k, leaf in enumerate(leaves)]
    call = _Call(pytree.tree_unflatten(marked, tree))
    if len(call.names) != sum(map(is_number, leaves)):
        return None  # a number is within an object of another class
    with _unmarked([*filter(_is_tensor, leaves), *module.parameters(), *module.buffers()]):
        return _interpreted(call, module.forward, answers, symbolic)


# ---------------------------------------------------------------------- the call, written out


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a number among the leaves of the arguments."""

    index: int
    number: float


class _Call:
    """Writes a call's arguments as Python; its numbers within tuples, lists and dicts are variables.

    Attributes:
        names: The variables of numbers, by the index of the number.
        values: The values of all variables.
        text: The arguments.
    """

    def __init__(self, call: Any) -> None:
        self.names: dict[int, str] = {}
        self.values: dict[str, Any] = {}
        args, kwargs = call
        self.text = f"*{self._text(args)}, **{self._text(kwargs)}"

    def _text(self, value: Any) -> str:
        kind: type = type(value)
        if kind is _Place:
            name = self.names[value.index] = f"irc_number_{value.index}_"
            self.values[name] = value.number
            return name
        if kind is tuple or kind is list:
            items = "".join(f"{self._text(item)}, " for item in value)
            return f"({items})" if kind is tuple else f"[{items}]"
        if kind is dict and all(type(key) is str for key in value):
            return f"{{{', '.join(f'{key!r}: {self._text(item)}' for key, item in value.items())}}}"
        name = f"irc_argument_{len(self.values)}_"
        self.values[name] = value
        return name


# ---------------------------------------------------------------------- Dynamo


class _Interpreted(BaseException):
    """Ends Dynamo once its guards are known, before any of its code runs."""


def _interpreted(
    call: _Call, forward: Callable[..., Any], answers: TraceAnswers, symbolic: frozenset[int]
) -> Interpretation | None:
    """Returns what Dynamo did in a call; None stands for a forward that it does not follow as a whole."""
    namespace: dict[str, Any] = {"forward": forward, "only_interpreted": _only_interpreted}
    text = f"def call({', '.join(call.values)}):\n    only_interpreted()\n    return forward({call.text})\n"
    exec(compile(text, "<irc call>", "exec"), namespace)
    function = namespace["call"]
    found = Interpretation(call.names)
    is_guarded = False

    def note_guards(guards: Sequence[Any]) -> NoReturn:
        nonlocal is_guarded
        is_guarded = True
        found.guards += [(each.guard_type, f"{each.name} {each.orig_guard.name}") for each in guards]
        raise _Interpreted

    options: Any = {"guard_filter_fn": note_guards}
    sources = {f"L[{call.names[place]!r}]" for place in symbolic}
    try:
        with (
            _settings(answers),
            _noting_code(function.__code__, found),
            symbolic_numbers(sources, found.symbols) if sources else contextlib.nullcontext(),
        ):
            run = torch.compile(function, fullgraph=True, dynamic=False, backend=_refuse, options=options)
            run(**call.values)
    except _Interpreted:
        return found if is_guarded and found.variables else None
    except Exception:  # whatever Dynamo does not follow
        return None
    return None


def _refuse(*_: Any) -> Callable[..., NoReturn]:
    """A backend of Dynamo's whose graphs are not to be run."""

    def graph(*_: Any) -> NoReturn:
        raise _Interpreted

    return graph


def _only_interpreted() -> None:
    """Raises if it is run: Dynamo, which is switched off then, takes `_nothing` for it."""
    raise RuntimeError


def _nothing() -> None:
    pass


@functools.cache
def _substitute() -> None:
    torch.compiler.substitute_in_graph(_only_interpreted)(_nothing)


@contextlib.contextmanager
def _noting_code(code: CodeType, found: Interpretation) -> Generator[None]:
    """Notes the names in the code that Dynamo writes for another one meanwhile."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    def note(interpreted: CodeType, transformed: CodeType) -> None:
        if interpreted is code:
            found.variables += [str(each.argval) for each in dis.get_instructions(transformed)]

    hook = register_bytecode_hook(note)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        hook.remove()


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


@contextlib.contextmanager
def _unmarked(tensors: Sequence[Tensor]) -> Generator[None]:
    """Takes the attributes off these tensors that Dynamo gives them meanwhile."""
    before = [dict(vars(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, attributes in zip(tensors, before, strict=True):
            for name in vars(tensor).keys() - attributes.keys():
                delattr(tensor, name)


@contextlib.contextmanager
def _settings(answers: TraceAnswers) -> Generator[None]:
    """Lets Dynamo follow what capture follows, give its answers, and treat each number as a constant."""
    import torch._dynamo.config as config
    import torch._dynamo.variables.torch as variables

    _substitute()
    patched: Any = config.patch  # pyright: ignore[reportAttributeAccessIssue]
    compiling = (
        torch.compiler.is_compiling,
        torch._utils.is_compiling,  # pyright: ignore[reportAttributeAccessIssue, reportDeprecated]
        torch._dynamo.external_utils.is_compiling,  # pyright: ignore[reportDeprecated]
    )
    never = (torch.compiler.is_dynamo_compiling, torch._dynamo.eval_frame._is_in_optimized_module)
    known: dict[Any, Any] = variables.tracing_state_functions()  # pyright: ignore[reportUnknownMemberType]
    before = dict(known)
    flag = torch.compiler._is_exporting_flag
    with (
        patched(suppress_errors=False, allow_rnn=True),
        torch.compiler.config.patch(dynamic_sources=""),  # pyright: ignore[reportAttributeAccessIssue]
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        known.update({**dict.fromkeys(compiling, answers.compiling), **dict.fromkeys(never, False)})
        known[torch.compiler.is_exporting] = torch.compiler._is_exporting_flag = answers.exporting
        try:
            yield
        finally:
            known.update(before)
            torch.compiler._is_exporting_flag = flag
