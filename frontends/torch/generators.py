"""Stands in for torch's generators while a forward is traced, which may seed those alone that it makes."""

# torch's own generator of the CPU has no other name that stays.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir import SEEDED, THROUGH_DYNAMO, Location, Symbol, UnsupportedError
from ...torch_support.containers import put_item
from .annotation_scopes import Scope, Scopes
from .source_lines import is_library, user_line

__all__ = ["Generators", "is_torch_generator"]


_TorchGenerator = torch.Generator
"""torch's own class: while a forward is traced, its name stands for another."""
_RANDOM = torch.random.__file__, torch.cuda.random.__file__


_tracing = threading.local()
"""Has the `Generators` of the model that this thread traces."""


class _StandIn(_TorchGenerator):
    """Stands for a generator; refuses that a thread seeds it, or reads its state, while it traces.

    Args:
        original: The generator.
        words: Its name in messages.
        is_read: Whether its state is asked of the original, as torch's checkpoints do.

    Attributes:
        scopes: The stretches of the forward that it is seeded in.
    """

    scopes: tuple[Scope, ...] = ()

    def __new__(cls, original: torch.Generator, words: str, *, is_read: bool = False) -> _StandIn:
        return super().__new__(cls, original.device)  # pyright: ignore[reportCallIssue]

    def __init__(self, original: torch.Generator, words: str, *, is_read: bool = False) -> None:
        _TorchGenerator.set_state(self, original.get_state())
        self.original, self.words, self.is_read = original, words, is_read
        self.refusals: list[UnsupportedError] = []

    def refuse(self, code: str, message: str, help: str) -> NoReturn:
        """Refuses what the forward does, even if it goes on."""
        at = Location(source=user_line(inspect.currentframe()))
        self.refusals.append(UnsupportedError(code, message, at=at, help=f"{help}; or {THROUGH_DYNAMO}"))
        raise self.refusals[-1]


def _refusing(name: str, refuse: Callable[[_StandIn], NoReturn]) -> Callable[..., Any]:
    def method(self: _StandIn, *args: Any) -> Any:
        frame = inspect.currentframe()
        is_torchs = user_line(frame) is None or (name == "get_state" and self.is_read and _is_by_torch(frame))
        if is_torchs or not vars(_tracing):
            return getattr(_TorchGenerator, name)(self.original, *args)
        return refuse(self)

    return method


def _refuse_seed(of: _StandIn) -> NoReturn:
    of.refuse(
        "IRC338",
        f"the forward seeds {of.words} or sets its state; a plan would not",
        "move it out of the module, before the call or around it (with torch.random.fork_rng()), or draw in "
        "the forward from torch.Generator().manual_seed()",
    )


def _refuse_read(of: _StandIn) -> NoReturn:
    of.refuse(
        "IRC338",
        f"the forward reads the state or the seed of {of.words}; a plan would freeze it",
        "pass what it reads as an argument",
    )


for _name in ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state", "__setstate__"):
    setattr(_StandIn, _name, _refusing(_name, _refuse_seed))
# the last one is what copies of it are made from
for _name in ("get_state", "get_offset", "initial_seed", "clone_state", "graphsafe_get_state", "__reduce__"):
    setattr(_StandIn, _name, _refusing(_name, _refuse_read))


def _is_by_torch(frame: FrameType | None) -> bool:
    """Whether torch's checkpoints, and not the model, ask the functions of `torch.random` for a state."""
    while frame is not None and frame.f_code.co_filename in (__file__, *_RANDOM):
        frame = frame.f_back
    return frame is not None and is_library(frame)


class _LikeTorchs(type(_TorchGenerator)):
    """Lets all generators be instances of a class that stands for torch's."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TorchGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _TorchGenerator)


class _Made(_StandIn, metaclass=_LikeTorchs):
    """A generator that the forward makes, and that caches may keep: elsewhere it is one as any other.

    Attributes:
        seeded: The generator that the graph names, another after each seed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        generator = _TorchGenerator(*args, **kwargs)
        return super().__new__(cls, generator, "") if vars(_tracing) else generator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seeded = _TorchGenerator(*args, **kwargs)
        super().__init__(self.seeded, "a generator that it makes")
        self.original, self.scopes = self, _open_scopes()
        _tracing.generators.of_run.append(self)

    def manual_seed(self: Any, seed: int) -> Any:
        if type(self) is not _Made:  # called by the name of the class
            return self.manual_seed(seed)
        _TorchGenerator.manual_seed(self, seed)
        self.seeded, self.scopes = _TorchGenerator(self.device).manual_seed(seed), _open_scopes()
        return self

    def initial_seed(self: Any) -> int:
        return _TorchGenerator.initial_seed(self) if type(self) is _Made else self.initial_seed()


class _NamesSeeds(TorchDispatchMode):
    """Lets draws from a generator that the forward makes name the one of its latest seed.

    Args:
        generators: Those of the forward.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self.generators = generators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags:
            args, kwargs = pytree.tree_map_only(
                _TorchGenerator, self.generators.drawn_from, (args, kwargs or {})
            )
        return func(*args, **(kwargs or {}))


@dataclass
class Generators:
    """Finds the generators of the user's that a forward draws from, and those that it makes.

    Attributes:
        originals: The user's generators by their names in the graph.
        of_run: Those that the latest run of the forward has made.
        seeded: What that run drew from of these, one for each seed.
    """

    originals: dict[str, torch.Generator] = field(default_factory=dict[str, torch.Generator])
    of_run: list[_Made] = field(default_factory=list[_Made])
    seeded: list[torch.Generator] = field(default_factory=list[torch.Generator])
    _stand_ins: dict[int, tuple[str, _StandIn]] = field(default_factory=dict[int, tuple[str, _StandIn]])

    def symbol_of(self, generator: torch.Generator) -> Symbol | None:
        """Returns the constant of the graph for a generator that was drawn from; None for a device's own.

        Raises:
            LookupError: The forward found the generator where nobody looks, or backward has made it.
        """
        if generator.device.type == "cpu" and _is_same(generator, torch.default_generator):
            return None
        if any(_is_same(generator, default) for default in torch.cuda.default_generators):
            return None
        for name, stand_in in self._stand_ins.values():
            if _is_same(generator, stand_in):
                return Symbol("generator", name) if name else None
        for place, seeded in enumerate(self.seeded):
            if _is_same(generator, seeded):
                return Symbol(SEEDED, f"{place}:{seeded.initial_seed()}@{seeded.device}")
        raise LookupError

    def drawn_from(self, generator: torch.Generator) -> torch.Generator:
        """Returns the generator that the graph names for one that the forward draws from.

        Eager runs the function of a checkpoint again in backward: a generator from outside of it has moved.
        """
        own = next((each for each in self.of_run if _is_same(generator, each)), None)
        others = (stand_in for name, stand_in in self._stand_ins.values() if name)
        drawn = own or next((each for each in others if _is_same(generator, each)), None)
        if drawn is None:
            return generator
        for scope in _open_scopes():
            if scope.runs_again and scope not in drawn.scopes:
                drawn.refuse(
                    "IRC339",
                    f"torch.utils.checkpoint{scope.where} draws from {drawn.words}, which it does not seed: "
                    "eager draws other numbers in backward, and gradients are those of another function",
                    "draw before the checkpoint, seed a generator within it, or call the function without it",
                )
        if own is None:
            return generator
        if own.seeded not in self.seeded:
            self.seeded.append(own.seeded)
        return own.seeded

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
    def one_run(self) -> Generator[None]:
        """Around one run of the forward: finds what it seeds.

        Raises:
            UnsupportedError: IRC338 for another number than in the run before; as of `standing_in`.
        """
        seeds_before = [each.initial_seed() for each in self.seeded]
        self.of_run, self.seeded = [], []
        with self.standing_in(), _NamesSeeds(self):
            yield
        seeds = [each.initial_seed() for each in self.seeded]
        if len(seeds) == len(seeds_before) and seeds != seeds_before:
            raise UnsupportedError(
                "IRC338",
                "the forward seeds a generator with another number in each run; a plan would freeze it",
                help=f"seed it with a constant, or pass the number as an argument; or {THROUGH_DYNAMO}",
            )

    @contextlib.contextmanager
    def standing_in(self) -> Generator[None]:
        """Refuses what stand-ins refuse, even if the model goes on.

        All functions of `torch.random` reach the generator by a global of their module.
        """
        owners: tuple[Any, ...] = torch, torch.random, torch._C
        cpu, gpus = torch._C.default_generator, torch.cuda.default_generators
        is_within = bool(vars(_tracing))
        stand_in = self._of_device(_original(cpu))
        for owner in owners:
            owner.default_generator = stand_in
        torch.cuda.default_generators = tuple(self._of_device(_original(gpu)) for gpu in gpus)
        torch.Generator, _tracing.generators = _Made, self
        try:
            yield
        finally:
            for owner in owners:
                owner.default_generator = cpu
            torch.cuda.default_generators = gpus
            if not is_within:
                torch.Generator = _TorchGenerator
                del _tracing.generators
        for each in (*(stand_in for _, stand_in in self._stand_ins.values()), *self.of_run):
            if each.refusals:
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


def _open_scopes() -> tuple[Scope, ...]:
    scopes = Scopes.current()
    return () if scopes is None else scopes.around(None)


def _original(generator: torch.Generator) -> torch.Generator:
    return generator.original if isinstance(generator, _StandIn) else generator


def _is_same(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether two objects of Python stand for one generator: torch makes a new one for a subclass."""
    return one._cdata == other._cdata  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
