"""Stands in for torch's generators while a forward is traced, which may draw from them and not seed them."""

# torch's own generator of the CPU has no other name that stays.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ir import THROUGH_DYNAMO, Location, Symbol, UnsupportedError
from ...torch_support.containers import put_item
from .source_lines import user_line

__all__ = ["Generators", "is_torch_generator"]


class _StandIn(torch.Generator):
    """Stands for a generator, and refuses to be seeded by the thread that made it.

    Args:
        original: The generator.
        words: Its name in messages.
        is_read: Whether its state is asked of the original, from which the traced thread may draw.
    """

    def __new__(cls, original: torch.Generator, words: str, *, is_read: bool = False) -> _StandIn:
        return super().__new__(cls, original.device)  # pyright: ignore[reportCallIssue]

    def __init__(self, original: torch.Generator, words: str, *, is_read: bool = False) -> None:
        torch.Generator.set_state(self, original.get_state())
        self.original, self.words, self.is_read = original, words, is_read
        self.thread = threading.get_ident()
        self.refusals: list[UnsupportedError] = []


def _seeding(name: str) -> Callable[..., Any]:
    def method(self: _StandIn, *args: Any) -> Any:
        if threading.get_ident() != self.thread:
            return getattr(self.original, name)(*args)
        error = UnsupportedError(
            "IRC338",
            f"the forward seeds {self.words} or sets its state; a plan would not",
            at=Location(source=user_line(inspect.currentframe())),
            help="move it out of the module, before the call or around it (with torch.random.fork_rng()); or "
            f"{THROUGH_DYNAMO}, which leaves torch.manual_seed to Python",
        )
        self.refusals.append(error)
        raise error

    return method


def _reading(name: str) -> Callable[..., Any]:
    def method(self: _StandIn, *args: Any) -> Any:
        is_other = self.is_read or threading.get_ident() != self.thread
        return getattr(self.original if is_other else super(_StandIn, self), name)(*args)

    return method


for _name in ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"):
    setattr(_StandIn, _name, _seeding(_name))
for _name in ("get_state", "get_offset", "initial_seed", "clone_state", "graphsafe_get_state"):
    setattr(_StandIn, _name, _reading(_name))


@dataclass
class Generators:
    """Finds the generators of the user's that a forward draws from.

    Attributes:
        originals: The generators by their names in the graph.
    """

    originals: dict[str, torch.Generator] = field(default_factory=dict[str, torch.Generator])
    _stand_ins: dict[int, tuple[str, _StandIn]] = field(default_factory=dict[int, tuple[str, _StandIn]])

    def symbol_of(self, found: torch.Generator) -> Symbol | None:
        """Returns the constant of the graph for a generator that was drawn from; None for a device's own.

        Raises:
            LookupError: The forward has made the generator, or found it where nobody looks.
        """
        if found.device.type == "cpu" and _is_same(found, torch.default_generator):
            return None
        if any(_is_same(found, default) for default in torch.cuda.default_generators):
            return None
        for name, stand_in in self._stand_ins.values():
            if _is_same(found, stand_in):
                return Symbol("generator", name) if name else None
        raise LookupError

    def leaf(self, leaf: Any) -> Any:
        """Returns the stand-in of an argument that is a generator; other arguments as they are."""
        return self._stand_in(leaf, "a generator among the arguments") if is_torch_generator(leaf) else leaf

    def planned(self, leaf: Any) -> Any:
        """Returns what a signature holds for an argument: the symbol of a generator's stand-in, or itself."""
        return self.symbol_of(leaf) if isinstance(leaf, _StandIn) else leaf

    @contextlib.contextmanager
    def replaced(self, places: Iterable[tuple[str, Any, Any]]) -> Generator[None]:
        """Puts stand-ins to these places meanwhile.

        Args:
            places: The path of each generator, the dict or list that holds it, and its key there.
        """
        replaced: list[tuple[Any, Any, torch.Generator]] = []
        try:
            for path, held, key in places:
                original = held[key]
                replaced.append((held, key, original))
                put_item(held, key, self._stand_in(original, f"the generator {path}"))
            yield
        finally:
            for held, key, original in replaced:
                put_item(held, key, original)

    @contextlib.contextmanager
    def refusing_seeds(self) -> Generator[None]:
        """Refuses (IRC338) that a forward seeds a generator, by `torch.manual_seed` say, even if it goes on.

        All functions of `torch.random` reach the generator by a global of their module.
        """
        owners: tuple[Any, ...] = torch, torch.random, torch._C
        cpu, gpus = torch._C.default_generator, tuple(map(_original, torch.cuda.default_generators))
        stand_in = self._of_device(cpu)
        for owner in owners:
            owner.default_generator = stand_in
        torch.cuda.default_generators = tuple(map(self._of_device, gpus))
        try:
            yield
        finally:
            for owner in owners:
                owner.default_generator = cpu
            torch.cuda.default_generators = gpus
        for _, each in self._stand_ins.values():
            if each.refusals:  # the forward may have gone on
                raise each.refusals[0]

    def _stand_in(self, original: torch.Generator, words: str) -> _StandIn:
        if id(original) not in self._stand_ins:
            name = f"{len(self.originals)}@{original.device}"
            self.originals[name] = original
            self._stand_ins[id(original)] = name, _StandIn(original, words)
        return self._stand_ins[id(original)][1]

    def _of_device(self, original: torch.Generator) -> _StandIn:
        words = f"torch's generator of {original.device}"
        return self._stand_ins.setdefault(id(original), ("", _StandIn(original, words, is_read=True)))[1]


def is_torch_generator(value: Any) -> bool:
    """Whether a value is a generator of torch's."""
    return issubclass(type(value), torch.Generator)


def _original(generator: torch.Generator) -> torch.Generator:
    return generator.original if isinstance(generator, _StandIn) else generator


def _is_same(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether two objects of Python stand for one generator: torch makes a new one for a subclass."""
    return one._cdata == other._cdata  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
