"""Runs calls on data and without, on operands in many layouts, and finds the laws of what differs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TextIO

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from irc.frontends.torch.fixups.fake_kernels import fake_kernels_of_eager
from irc.frontends.torch.fixups.kernel_layouts import Laws, strides_by_law
from irc.torch_support.layouts import same_layout
from irc.torch_support.pytree import tensors_of

from .calls import Call, schema_calls

__all__ = ["Examined", "Seen", "examined_apart", "laws_of", "observed"]


def _strided(tensor: Tensor) -> Tensor:
    wide = tensor
    for axis in range(tensor.dim()):
        wide = wide.repeat_interleave(2, axis)
    return wide[(slice(None, None, 2),) * tensor.dim()]


def _in_order(order: Callable[[int], Sequence[int]]) -> Callable[[Tensor], Tensor]:
    def relaid(tensor: Tensor) -> Tensor:
        axes = list(order(tensor.dim()))
        back = [axes.index(axis) for axis in range(tensor.dim())]
        return tensor.permute(axes).contiguous().permute(back)

    return relaid


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.contiguous(),
    _in_order(lambda n: list(range(n))[::-1]),
    _in_order(lambda n: [*range(n - 2), n - 1, n - 2] if n > 1 else range(n)),
    _in_order(lambda n: [0, *range(2, n), 1] if n > 2 else list(range(n))[::-1]),
    _strided,
    lambda t: t[:1].expand(t.shape) if t.dim() and len(t) else t,
)
"""Rows, all axes reversed, the last two swapped, channels last, strided in each axis, expanded in one."""


_CALLS = 8
_LIMIT_SECONDS = 120
_LIMIT_BYTES = 16 * 2**30
"""What the process of one operation may take, before the system ends more than it."""


def _tells(call: Call) -> tuple[int, int]:
    """How much a call tells for its time: the most axes of an operand, and then the fewest elements."""
    operands = [tensor for tensor in tensors_of((call.args, call.kwargs)) if tensor.numel()]
    return max((each.dim() for each in operands), default=0), -sum(each.numel() for each in operands)


_SHAPES = ((2, 3, 4), (2, 3, 4, 5))


@dataclass(frozen=True)
class Seen:
    """One result of a call: the operands and it, without data but laid out as they were with data."""

    operands: tuple[Tensor, ...]
    result: Tensor
    is_right: bool
    """Whether torch's rule says the same."""


@dataclass(frozen=True)
class Examined:
    """An operation: how many calls of it ran, and the laws of its results if its process survived them."""

    calls: int
    laws: list[str | None] | None


def examined_apart(name: str, sampled: Sequence[Call]) -> Examined:
    """Examines an operation in a process of its own, as kernels may trust arguments that do not fit together.

    If that does not survive, once more without the operands that are made to have more axes.

    Args:
        name: As `aten.add.Tensor`.
        sampled: Its calls in samples; if there are none, calls are made by its schema.
    """
    for can_grow in (True, False):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(2)
                signal.alarm(_LIMIT_SECONDS)
                resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
                with open(write, "w") as pipe:
                    _examine(sampled or schema_calls(name), can_grow, pipe)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write)
        with open(read) as pipe:
            count, laws = [*pipe.read().splitlines(), "", ""][:2]
        if os.waitpid(child, 0)[1] == 0:
            return Examined(int(count), json.loads(laws))
    return Examined(int(count or 0), None)


def _examine(calls: Sequence[Call], can_grow: bool, pipe: TextIO) -> None:
    """Writes how many calls there are, and the laws of those that tell the most."""
    print(len(calls), file=pipe, flush=True)
    chosen = sorted(calls, key=_tells, reverse=True)[:_CALLS]
    json.dump(laws_of(observed(chosen, can_grow=can_grow)), pipe)


def observed(
    calls: Sequence[Call], laws: Laws | None = MappingProxyType({}), *, can_grow: bool = True
) -> list[list[Seen]]:
    """What calls return on operands in each layout, result by result, of the variants that run.

    Args:
        calls: Of one operation.
        laws: Those that hold beside torch's rules; None takes irc's own.
        can_grow: Whether the first call is also made with operands that have more axes.
    """
    seen: list[tuple[Any, list[Tensor], list[tuple[int, ...]]]] = []
    runs = [run for place, call in enumerate(calls) for run in _runs(call, can_grow=can_grow and place == 0)]
    with fake_kernels_of_eager(laws), FakeTensorMode(allow_non_fake_inputs=True):
        for func, args, kwargs, results in runs:
            with contextlib.suppress(Exception):
                fakes = tensors_of(
                    func(*pytree.tree_map(_without_data, args), **pytree.tree_map(_without_data, kwargs))
                )
                if [fake.shape for fake in fakes] == [result.shape for result in results]:
                    seen.append(((args, kwargs), results, [tuple(fake.stride()) for fake in fakes]))
    return [_compared(*each) for each in seen]


def _compared(arguments: Any, results: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Seen]:
    operands = tuple(map(_without_data, tensors_of(arguments)))
    return [
        Seen(operands, result, same_layout(result, own)) for result, own in zip(results, strides, strict=True)
    ]


def _runs(call: Call, *, can_grow: bool) -> Iterator[tuple[Any, Any, Any, list[Tensor]]]:
    """Runs a call on data in each layout; yields it with its results."""
    for each in (call, *(_grown(call) if can_grow else ())):
        for args, kwargs in _variants(each):
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                copied = pytree.tree_map(_without_data, (args, kwargs))
                yield (
                    call.func,
                    *copied,
                    [_without_data(result) for result in tensors_of(call.func(*args, **kwargs))],
                )


def _grown(call: Call) -> Iterator[Call]:
    """A call with operands of three axes and of four in place of the largest, if it has fewer than four."""
    leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
    shapes = {tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)}
    if shapes and max(map(len, shapes)) < 4:
        most = max(shapes, key=len)
        for shape in _SHAPES:
            grown = [
                torch.rand(shape).mul(1 if leaf.is_floating_point() else 2).to(leaf.dtype)
                if isinstance(leaf, Tensor) and tuple(leaf.shape) == most
                else leaf
                for leaf in leaves
            ]
            yield Call(call.func, *pytree.tree_unflatten(grown, tree))


def _variants(call: Call) -> Iterator[tuple[Any, Any]]:
    """The arguments of a call in other layouts: all operands in each, and each of the first three alone."""
    leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    rows, *others = LAYOUTS
    choices = [dict.fromkeys(places, layout) for layout in LAYOUTS]
    if len(places) > 1:
        choices += [{place: layout} for place in places[:3] for layout in others]
        mixed = [dict.fromkeys(places, layout) for layout in others[:3]]
        choices += [{**choice, place: LAYOUTS[-1]} for place in places[:3] for choice in mixed]
    for choice in choices:
        variant = [choice.get(k, rows)(leaf) if k in places else leaf for k, leaf in enumerate(leaves)]
        yield pytree.tree_unflatten(variant, tree)


def _without_data(leaf: Any) -> Any:
    """A tensor of a type, or one without data under a mode; sparse ones are none."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)


def laws_of(seen: Sequence[Sequence[Seen]]) -> list[str | None]:
    """For each result "" if torch's rule is right in all calls, else its law; None if no law explains it."""
    count = max(map(len, seen), default=0)
    return [_law([results[place] for results in seen if place < len(results)]) for place in range(count)]


def _law(seen: Sequence[Seen]) -> str | None:
    if all(each.is_right for each in seen):
        return ""
    return next(
        (law for law in _candidates(max(len(each.operands) for each in seen)) if _holds(law, seen)), None
    )


def _candidates(operands: int) -> Iterator[str]:
    places = range(min(operands, 4))
    yield "elementwise " + " ".join(map(str, places))
    yield "rows"
    for k in places:
        yield f"format {k}"
    for k in places:
        yield f"like {k}"
    for count in range(1, len(places) + 1):
        for chosen in itertools.permutations(places, count):
            yield "elementwise " + " ".join(map(str, chosen))


def _holds(law: str, seen: Sequence[Seen]) -> bool:
    """Whether a law gives each result its strides; where it says nothing torch's rule must be right."""
    for each in seen:
        strides = strides_by_law(law, each.result, each.operands)
        if not (each.is_right if strides is None else same_layout(each.result, strides)):
            return False
    return True
