"""Proves that a forward does not look at some numbers among its arguments, by Dynamo.

Dynamo interprets the forward's bytecode on tensors without data. It opens an argument when anything looks at
its value, type or identity, and then guards it. A number that has no guard, and that the code which Dynamo
writes does not load (to return or to store it), makes no difference to the forward. None of the code is run.
"""

# Dynamo has no public door to its answers about tracing, nor to the code that it writes.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dis
import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["TraceAnswers", "is_number", "unread_numbers"]


@dataclass(frozen=True, slots=True)
class TraceAnswers:
    """The answers that the model's code got when it was captured.

    Args:
        compiling: The answer of `torch.compiler.is_compiling()`.
        exporting: The answer of `torch.compiler.is_exporting()`.
    """

    compiling: bool = False
    exporting: bool = False


def is_number(leaf: object) -> bool:
    """Whether an argument is a number of Python's own classes; a truth value is none."""
    return type(leaf) is int or type(leaf) is float


def unread_numbers(
    module: nn.Module,
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    answers: TraceAnswers,
) -> frozenset[int]:
    """Finds the numbers among the arguments of a call that the forward is proved not to look at.

    They make no difference together: what the forward looks at stays the same whatever they are.

    Args:
        module: The module whose forward is called.
        leaves: The leaves of the positional and keyword arguments.
        tree: Their nesting.
        answers: The answers that capture gave.

    Returns:
        Their indices among the leaves.
    """
    marked = [_Place(k, leaf) if is_number(leaf) else leaf for k, leaf in enumerate(leaves)]
    call = _Call(pytree.tree_unflatten(marked, tree))
    if len(call.names) != sum(map(is_number, leaves)):
        return frozenset()  # a number is within an object of another class
    with _unmarked([*filter(_is_tensor, leaves), *module.parameters(), *module.buffers()]):
        texts = _guards_and_code(call, module.forward, answers)
    if texts is None:
        return frozenset()
    return frozenset(place for place, name in call.names.items() if not any(name in text for text in texts))


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


def _guards_and_code(call: _Call, forward: Callable[..., Any], answers: TraceAnswers) -> list[str] | None:
    """Returns the sources that Dynamo guards in a call and the variables of the code that it writes.

    None stands for a forward that Dynamo does not follow as a whole.
    """
    namespace: dict[str, Any] = {"forward": forward, "only_interpreted": _only_interpreted}
    text = f"def call({', '.join(call.values)}):\n    only_interpreted()\n    return forward({call.text})\n"
    exec(compile(text, "<irc call>", "exec"), namespace)
    function = namespace["call"]
    written: list[CodeType] = []
    guarded: list[str] | None = None

    def note_guards(guards: Sequence[Any]) -> NoReturn:
        nonlocal guarded
        guarded = [f"{guard.name} {guard.orig_guard.name}" for guard in guards]
        raise _Interpreted

    options: Any = {"guard_filter_fn": note_guards}
    try:
        with _settings(answers), _noting_code(function.__code__, written):
            run = torch.compile(function, fullgraph=True, dynamic=False, backend=_refuse, options=options)
            run(**call.values)
    except _Interpreted:
        if guarded is not None and written:
            return [*guarded, *map(_variables, written)]
    except Exception:  # whatever Dynamo does not follow
        pass
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


def _variables(code: CodeType) -> str:
    """Returns the names that a code reads or writes."""
    return " ".join(str(instruction.argval) for instruction in dis.get_instructions(code))


@contextlib.contextmanager
def _noting_code(code: CodeType, written: list[CodeType]) -> Generator[None]:
    """Collects the code that Dynamo writes for another one meanwhile."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    def note(interpreted: CodeType, transformed: CodeType) -> None:
        if interpreted is code:
            written.append(transformed)

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
