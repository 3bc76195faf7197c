"""What a forward does to its module besides computing a result: attributes, buffers, generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...ir import RECORDERS_MARK, UnsupportedError, is_recorder
from .caches import caches_of, forget_traced, is_traced

__all__ = ["State"]

_ABSENT = object()


@dataclass
class State:
    """Watches a module while it is traced.

    Args:
        module: The module.

    Attributes:
        drawn: Python generators that the last run of the forward drew from. A forward that seeds one itself
            leaves it as it found it from the second run on, and draws the same in each step.
        flipped: Attributes that the last run left with another number or text than it found.
        replaced: Buffers and parameters that the last run put others in the place of, with the reason why
            that is no write into them.
    """

    module: nn.Module
    drawn: list[str] = field(default_factory=list[str])
    flipped: list[str] = field(default_factory=list[str])
    replaced: list[str] = field(default_factory=list[str])

    @contextlib.contextmanager
    def one_run(self) -> Generator[None]:
        """Around one run of the forward.

        A buffer that is assigned (`self.mean = 0.9 * self.mean + ...`) is written into instead: its values
        after the step are the same, and the tensor stays the one that the plan knows.
        """
        modules = list(self.module.named_modules())
        buffers = [dict(child._buffers) for _, child in modules]
        parameters = [dict(child._parameters) for _, child in modules]
        generators = _generators()
        caches = caches_of(self.module)
        attributes = [dict(vars(child)) for _, child in modules]
        try:
            yield
        finally:
            forget_traced(caches)
        self.drawn = [name for name, state in _generators().items() if state != generators[name]]
        self.flipped = [
            f"{name}.{key}".lstrip(".")
            for (name, child), known in zip(modules, attributes, strict=True)
            for key, value in _changed(child, known)
            if isinstance(value, (int, float, str))
        ]
        self.replaced = []
        for (name, child), held, trained in zip(modules, buffers, parameters, strict=True):
            for key, reason in _written(child, held):
                self.replaced.append(f"buffer {f'{name}.{key}'.lstrip('.')}{reason}")
            for key in child._parameters:
                if child._parameters[key] is not trained.get(key):
                    self.replaced.append(f"parameter {f'{name}.{key}'.lstrip('.')}")

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Afterwards, every attribute of the module and its submodules is what it was before.

        Raises:
            UnsupportedError: IRC338 when the forward assigns what it computes to an attribute, replaces a
                buffer by another kind of tensor, changes other Python state, or draws from a Python
                generator. A hook before the forward may assign (pruning, weight norm): it computes the
                attribute from parameters in each call.
        """
        before = [(name, child, dict(vars(child))) for name, child in self.module.named_modules()]
        contents = _contents(self.module)
        hooks = [(name, held, dict(held)) for name, held in _hooks(self.module)]
        assigned: list[str] = []
        counted: list[str] = []
        with self.kept():
            yield
            for name, held, entries in hooks:
                left = [hook for key, hook in held.items() if key not in entries]
                counted += [name for hook in left if not is_recorder(hook)]
            for name, child, attributes in before:
                for key, value in _changed(child, attributes):
                    found = assigned if is_traced(value) else counted
                    if found is assigned or isinstance(value, (int, float, str)):
                        found.append(f"{name}.{key}".lstrip("."))
            for name, value, items in contents:
                if not _are_same(items, list(_items(value))):
                    (assigned if is_traced(value) else counted).append(name)
        counted += [name for name in self.flipped if name not in counted]
        self._refuse(assigned, counted)

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Afterwards, attributes and Python's generators are as before, whatever they were meanwhile.

        So are hooks: what a forward installs for its next run would see traced tensors, or be there twice.
        """
        attributes = [(child, dict(vars(child))) for child in self.module.modules()]
        own = [
            (value, list(_items(value)))
            for _, entries in attributes
            for key, value in entries.items()
            if key in _OWN and isinstance(value, (dict, set))
        ]
        contents = _contents(self.module)
        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for child, entries in attributes:
                vars(child).clear()
                vars(child).update(entries)
            for value, items in own:
                _refill(value, items)
            for _, value, items in contents:
                _refill(value, items)

    def _refuse(self, assigned: list[str], counted: list[str]) -> None:
        if assigned:
            raise UnsupportedError(
                "IRC338",
                f"the forward assigns a tensor to the attribute {assigned[0]} "
                f"({len(assigned)} such attributes)",
                help="return the tensor, or register a buffer and write into it with copy_()",
            )
        if self.replaced:
            raise UnsupportedError(
                "IRC338",
                f"the forward replaces {self.replaced[0]} ({len(self.replaced)} such)",
                help="write into it with copy_(), under torch.no_grad()",
            )
        if counted:
            raise UnsupportedError(
                "IRC338",
                f"the forward changes Python state: {counted[0]} ({len(counted)} such); "
                "a plan would freeze it",
                help="keep it outside of the module, or in a buffer",
            )
        if self.drawn:
            raise UnsupportedError(
                "IRC338",
                f"the forward draws from {self.drawn[0]}; a plan would freeze what it drew",
                help="draw with torch (torch.rand), set the rate that asks for it to 0, or pass the numbers "
                "as an argument",
            )


_OWN = frozenset(vars(nn.Module()))
"""The attributes in which torch keeps what belongs to a module."""


def _generators() -> dict[str, Any]:
    kind, keys, *more = cast("tuple[Any, ...]", np.random.get_state())
    return {
        "random (Python's generator)": random.getstate(),
        "numpy.random": (kind, keys.tobytes(), *more),
    }


def _written(child: nn.Module, held: dict[str, Tensor | None]) -> Iterator[tuple[str, str]]:
    """Writes assigned buffers into those that they replaced; yields those that cannot be, with the reason."""
    for key, new in list(child._buffers.items()):
        old = held.get(key)
        if new is old:
            continue
        if old is None or new is None:
            yield key, " by a tensor where there was none, or the other way round"
        elif new.requires_grad:
            yield key, " by a tensor that has a gradient: detach() it"
        elif (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            yield key, f" by a tensor of another type ({new.dtype} of shape {list(new.shape)})"
        else:
            with torch.no_grad():
                old.copy_(new)
            child._buffers[key] = old


def _changed(child: nn.Module, attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The attributes that are others than before; caches of torch's own modules do not count."""
    if type(child).__module__.startswith("torch.") or any(map(_is_torchs, child._forward_pre_hooks.values())):
        return  # such as the flat weights of an LSTM, or the weight that weight norm computes
    for key, value in vars(child).items():
        if attributes.get(key, _ABSENT) is not value and key != RECORDERS_MARK:
            yield key, value


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is one of torch's, as of weight norm, or of a class made from one of torch's."""
    homes = [getattr(hook, "__module__", None), *(kind.__module__ for kind in type(hook).__mro__)]
    return any(str(home).startswith("torch.") for home in homes)


def _hooks(module: nn.Module) -> Iterator[tuple[str, dict[int, Any]]]:
    """The tables of hooks of a module and its submodules, each with a name."""
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if key.endswith("_hooks") and key in _OWN and isinstance(value, dict):
                yield f"{name}.{key}".lstrip("."), value


def _contents(module: nn.Module) -> list[tuple[str, Any, list[Any]]]:
    """The lists, dicts and sets among the attributes, each with its path and what is in it."""
    return [
        (f"{name}.{key}".lstrip("."), value, list(_items(value)))
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if key not in _OWN and isinstance(value, (list, dict, set))
    ]


def _items(container: Any) -> Iterator[Any]:
    for item in cast("dict[Any, Any] | list[Any]", container):
        yield item
        if isinstance(container, dict):
            yield container[item]


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _refill(container: Any, items: list[Any]) -> None:
    if _are_same(items, list(_items(container))):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(zip(items[::2], items[1::2], strict=True))
    else:
        getattr(container, "extend" if isinstance(container, list) else "update")(items)
