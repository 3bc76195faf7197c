"""Watches what a forward does to its module besides computing a result: attributes, buffers, generators."""

# The tables in which torch keeps buffers, parameters and hooks have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...ir import THROUGH_DYNAMO, Assignment, UnsupportedError
from ...ir.scalars import Leaf
from ...torch_support.attribute_reads import AttributeReads, recording_attribute_reads
from ...torch_support.code_names import CodeNames
from ...torch_support.functions import closed_over
from ...torch_support.module_hooks import modules_of_hook
from ...torch_support.object_graph import ABSENT
from ...torch_support.recorders import RECORDERS_MARK, is_recorder
from .assignments import unkept_attributes
from .code import code_names, code_reach
from .counters import Counter, CounterReadError
from .fixups.function_caches import caches_of, forget_traced, is_traced
from .generators import Generators, is_torch_generator
from .iterators import is_iterator, untouched_iterators
from .object_graph import HeldObject, changed, digest, holds_traced, is_generator, is_plain, own_reach

__all__ = ["State", "state_changes"]


@dataclass
class State:
    """Watches a module while it is traced.

    It looks at what the module's attributes lead to (containers, objects with attributes, generators), and at
    what its code leads to: attributes of its classes, globals and closures of their functions. See
    `own_reach` and `code_reach`.

    Args:
        module: The module.
        generators: The generators of torch's that it draws from.

    Attributes:
        drawn: Generators that the last run of the forward drew from. A forward that seeds one itself leaves
            it as it found it from the second run on, and draws the same in each step.
        flipped: The items that the last run left with another number or text than it found.
        assigned: The items in which runs left a tensor that they computed, where no plan can.
        assignments: The attributes that the last run changed as each step has to, with what it left there:
            results that nothing reads before they are assigned, and the numbers of `counters`.
        counters: The numbers in attributes that are not known while the forward runs.
        counters_are_unknown: Whether that is so; if not, they are what they are.
        replaced: Buffers and parameters that the last run put others in the place of, with the reason why
            that is not a write into them.
    """

    module: nn.Module
    generators: Generators = field(default_factory=Generators)
    drawn: list[str] = field(default_factory=list[str])
    flipped: list[str] = field(default_factory=list[str])
    assigned: list[str] = field(default_factory=list[str])
    replaced: list[str] = field(default_factory=list[str])
    assignments: list[tuple[Assignment, Any]] = field(default_factory=list[tuple[Assignment, Any]])
    counters: tuple[Assignment, ...] = ()
    counters_are_unknown: bool = True
    _constants: dict[str, Any] = field(default_factory=dict[str, Any])
    """The values that the runs so far assigned to attributes, the same in each, by their paths."""
    _numbers: dict[str, Assignment] = field(default_factory=dict[str, Assignment])
    """The numbers in attributes that runs changed, by their paths."""

    @functools.cached_property
    def _caches(self) -> list[Any]:
        """The caches of the module's code, listed when a run has ended: a forward imports, too."""
        return caches_of(self.module)

    @contextlib.contextmanager
    def one_run(self) -> Generator[None]:
        """Around one run of the forward.

        A buffer that is assigned (`self.mean = 0.9 * self.mean + ...`) is written into instead: its values
        after the step are the same, and the tensor stays the one that the plan knows. Tensors that are left
        elsewhere are taken away again: the next run would find them, and have no use for them.

        Raises:
            CounterReadError: The forward looks at one of `counters`.
        """
        modules = list(self.module.named_modules())
        buffers = [dict(child._buffers) for _, child in modules]
        parameters = [dict(child._parameters) for _, child in modules]
        generators = _generators()
        holders = self.holders()
        tables = [(name, child, dict(vars(child)), dict(child._modules)) for name, child in modules]
        self.assignments = []
        with recording_attribute_reads() as reads:
            try:
                with self._counting():
                    yield
            finally:
                forget_traced(self._caches)
                self._compare(holders, reads)
                self._compare_tables(tables, reads)
        self.drawn += [name for name, state in _generators().items() if state != generators[name]]
        self.replaced = []
        for (name, child), held, trained in zip(modules, buffers, parameters, strict=True):
            for key, reason in _written(child, held):
                self.replaced.append(f"buffer {f'{name}.{key}'.lstrip('.')}{reason}")
            for key, parameter in child._parameters.items():
                if parameter is not trained.get(key):
                    self.replaced.append(f"parameter {f'{name}.{key}'.lstrip('.')}")

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Afterwards, all that is looked at is what it was before.

        Raises:
            UnsupportedError: IRC338 when the forward assigns what it computes to an attribute, replaces a
                buffer by another kind of tensor, changes other Python state, or draws from a Python
                generator or iterator. A hook before the forward may assign (pruning, weight norm): it
                computes the attribute from parameters in each call.
        """
        hooks = [(name, held, dict(held)) for name, held in _hooks(self.module)]
        counted: list[str] = []
        self.assigned = []
        with self.kept():
            holders = own_reach(self.module, _excused)
            yield
            for name, held, entries in hooks:
                changed_keys = (
                    held.keys() ^ entries.keys()
                )  # a hook may remove itself, and eager's next step has none
                hooks_there = (held.get(key, entries.get(key)) for key in changed_keys)
                counted += [name for hook in hooks_there if not is_recorder(hook)]
            counted += [holder.path_of(key) for holder, key in state_changes(holders)]
        counted += [name for name in self.flipped if name not in counted]
        self._numbers = self._numbers if set(counted) == self._numbers.keys() else {}
        self._refuse(self.assigned, counted)

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Afterwards, all that is looked at is as before, whatever it was meanwhile.

        So are hooks: what a forward installs for its next run would see traced tensors, or be there twice.
        Some stays that a first call sets once: an attribute of a configuration that was None, such as
        `config.problem_type`, and names in a registry that only code leads to.

        A function of the model's own that calls `backward()` within its backward leaves traced gradients.
        """
        leaves = [parameter for parameter in self.module.parameters() if parameter.is_leaf]
        gradients = [(leaf, leaf.grad) for leaf in leaves]
        attributes = [(child, dict(vars(child))) for child in self.module.modules()]
        tables = [HeldObject.of_container(table) for table in _tables(self.module)]
        holders = self.holders()
        python, numpy = random.getstate(), np.random.get_state()
        own = _places(holders, is_torch_generator)
        try:
            iterators = _places(holders, is_iterator)
            with _no_callbacks_of_gc(), untouched_iterators(iterators), self.generators.replaced(own):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            forget_traced(self._caches)
            for leaf, gradient in gradients:
                if leaf.grad is not gradient and is_traced(leaf.grad):
                    leaf.grad = gradient
            for child, entries in attributes:
                vars(child).clear()
                vars(child).update(entries)
            for holder in tables:
                holder.put_back()
            for holder in holders:
                self._put_back(holder)

    def _put_back(self, holder: HeldObject) -> None:
        if holder.is_own and not holder.is_object:
            holder.put_back()
            return
        for key, old, new in list(changed(holder)):
            if holder.is_own:
                stays = _is_learned(holder, old, new) and holder.path_of(key) not in self.flipped
            elif old is ABSENT and holder.is_container and is_plain(new):
                stays = holder.path_of(key) not in self.flipped  # a thread may have added it
            else:
                stays = not (_is_number(old, new) or is_generator(holder.value) or holds_traced(new))
            if not stays:
                holder.put_back_item(key)

    def holders(self) -> list[HeldObject]:
        """Lists the objects to which the module leads, with what they hold now."""
        own = own_reach(self.module, _excused)
        return [*own, *code_reach(self.module, own)]

    def code_names(self) -> CodeNames:
        """Returns the attributes of classes, and the globals, that the module's code names."""
        return code_names(self.module, own_reach(self.module, _excused))

    def may_count(self) -> bool:
        """Lets numbers that a run changed be unknown in the next, if that is all that it was refused for."""
        is_asked = bool(self._numbers) and not (self.counters or self.assigned or self.replaced or self.drawn)
        self.counters = tuple(self._numbers.values()) if is_asked else ()
        return is_asked

    @contextlib.contextmanager
    def _counting(self) -> Generator[None]:
        """Afterwards, the numbers of `counters` are as before; meanwhile they are not known, unless asked."""
        reads: list[str] = []
        tables = [vars(self.module.get_submodule(each.module)) for each in self.counters]
        if self.counters_are_unknown:
            for place, (held, each) in enumerate(zip(tables, self.counters, strict=True)):
                held[each.name] = Counter(Leaf(place), reads)
        found: list[Any] = []
        try:
            yield
            found += (held.get(each.name) for held, each in zip(tables, self.counters, strict=True))
        finally:
            for held, each in zip(tables, self.counters, strict=True):
                held[each.name] = each.before
        if not self.counters_are_unknown:
            return
        if reads or any(type(each) is not Counter for each in found):
            raise CounterReadError
        counted = zip(self.counters, found, strict=True)
        self.assignments = [(replace(each, number=number.operand), None) for each, number in counted]

    def _compare(self, holders: list[HeldObject], reads: AttributeReads) -> None:
        """Notes what one run changed, and takes away what exists only while it is traced."""
        self.drawn, self.flipped = [], []
        names = {id(child): name for name, child in self.module.named_modules()}
        for holder in holders:
            name = names.get(id(holder.value))
            for key, old, new in list(changed(holder)):
                path = holder.path_of(key)
                if is_generator(holder.value):
                    self.drawn.append(f"the generator {path}")
                elif holds_traced(new):
                    if name is None or reads.is_read(holder.value, key):
                        self.assigned += [path] * (path not in self.assigned)
                    else:
                        self.assignments.append((Assignment(name, key), new))
                    holder.put_back_item(key)
                elif is_torch_generator(new):
                    self.flipped.append(path)
                    holder.put_back_item(key)
                elif name is not None and not reads.is_read(holder.value, key) and is_plain(new):
                    holder.put_back_item(key)
                    self._assign_constant(name, key, path, new)
                elif _is_number(old, new) and (holder.is_own or old is not ABSENT):
                    self.flipped.append(path)
                    is_counter = type(old) is type(new) and type(new) in (int, float)
                    if name is not None and is_counter and reads.are_known(holder.value):
                        self._numbers.setdefault(path, Assignment(name, key, before=old))
            if name is not None:
                self._take_unchanged(holder, name, reads)

    def _take_unchanged(self, holder: HeldObject, name: str, reads: AttributeReads) -> None:
        """Notes the attributes of a module that were assigned what they held, or held nothing but texts.

        Between two calls, others may assign something else.
        """
        taken = {each.name for each, _ in self.assignments if each.module == name}
        for key in reads.assigned_to(holder.value) - taken - holder.without:
            now = vars(holder.value).get(key, ABSENT)
            if reads.is_read(holder.value, key) or now is ABSENT:
                continue
            if is_plain(now):
                self._assign_constant(name, key, holder.path_of(key), now)
            elif type(now) in (list, dict, tuple) and all(map(is_plain, pytree.tree_leaves(now))):
                self.assignments.append((Assignment(name, key), now))

    def _assign_constant(self, name: str, key: str, path: str, value: Any) -> None:
        """Notes an attribute that each run leaves with the same number or text."""
        known = self._constants.setdefault(path, value)
        if type(known) is type(value) and repr(known) == repr(value):
            self.assignments.append((Assignment(name, key, is_constant=True, constant=value), None))
        else:
            self.flipped.append(path)

    def _compare_tables(
        self, tables: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]], reads: AttributeReads
    ) -> None:
        """Notes modes and submodules that a run changed, and attributes of torch's modules; undoes it."""
        for name, child, held, modules in tables:
            keys = ["training"]
            if _excused(child) is None:
                keys += (key for key in vars(child) if key not in _OWN and is_plain(vars(child)[key]))
            now = vars(child)
            for key in keys:
                old, new = held.get(key, ABSENT), now.get(key, ABSENT)
                if _is_number(old, new) and (type(old) is not type(new) or repr(old) != repr(new)):
                    self.flipped.append(f"{name}.{key}".lstrip("."))
                    if old is not ABSENT:
                        now[key] = old
            if _excused(child) is None:
                computed = _computed_before(child)
                made = {k: value for k, value in now.items() if k not in _OWN | computed and k[0] != "_"}
                left = [
                    key for key, value in made.items() if value is not held.get(key) and holds_traced(value)
                ]
                for key in left:
                    path, value = f"{name}.{key}", now[key]
                    if reads.is_read(child, key):
                        self.assigned += [path] * (path not in self.assigned)
                        continue
                    self.assignments.append((Assignment(name, key), value))  # as a hook may
                    if key in held:
                        now[key] = held[key]
                    else:
                        del now[key]
            if list(modules.items()) != list(child._modules.items()):
                self.flipped.append(f"the submodules of {name or 'the module'}")
                child._modules.clear()
                child._modules.update(modules)

    def _refuse(self, assigned: list[str], counted: list[str]) -> None:
        if assigned:
            raise unkept_attributes(assigned)
        if self.replaced:
            raise UnsupportedError(
                "IRC338",
                f"the forward replaces {self.replaced[0]} ({len(self.replaced)} such)",
                help="write into it with copy_(), under torch.no_grad(); if the first call alone sets it, "
                "call the module once before",
            )
        if counted:
            raise UnsupportedError(
                "IRC338",
                f"the forward changes Python state: {counted[0]} ({len(counted)} such); "
                "a plan would freeze it",
                help="keep it outside of the module, or in a buffer; if the first call alone sets it, call "
                "the module once before",
            )
        if self.drawn:
            raise UnsupportedError(
                "IRC338",
                f"the forward draws from {self.drawn[0]}; a plan would freeze what it drew",
                help="draw with torch (torch.rand), set the rate that asks for it to 0, or pass the numbers "
                f"as an argument; or {THROUGH_DYNAMO}",
            )


_OWN = frozenset(vars(nn.Module()))
"""The attributes in which torch keeps what belongs to a module."""


@contextlib.contextmanager
def _no_callbacks_of_gc() -> Generator[None]:
    """Meanwhile, collecting garbage calls nobody: what a callback counts is no state of the forward."""
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()
    try:
        yield
    finally:
        gc.callbacks[:0] = callbacks


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
            child._buffers[key] = old
            yield key, " by a tensor where there was none" if old is None else " by None"
        elif new.requires_grad:
            yield key, " by a tensor that has a gradient: detach() it"
        elif (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            yield key, f" by a tensor of another type ({new.dtype} of shape {list(new.shape)})"
        else:
            with torch.no_grad():
                old.copy_(new)
            child._buffers[key] = old


def _excused(child: nn.Module) -> frozenset[str] | None:
    """The attributes of a module that are none of its state; None for all, as of torch's own modules.

    Those are the tables of every module, and what torch's hooks compute before each forward (pruning, weight
    norm). torch's own modules have caches, such as the flat weights of an LSTM.
    """
    if type(child).__module__.startswith("torch."):
        return None
    return _OWN | {RECORDERS_MARK} | _computed_before(child)


def _computed_before(child: nn.Module) -> frozenset[str]:
    """Returns texts of torch's hooks before a forward: the attributes that they compute are among them."""
    hooks = (hook for hook in child._forward_pre_hooks.values() if _is_torchs(hook))
    return frozenset(text for hook in hooks for text in _texts(hook))


def _texts(hook: Any) -> Iterator[str]:
    """The texts that a hook holds: names of attributes are among them."""
    if isinstance(hook, functools.partial):
        values: list[Any] = [*hook.args, *hook.keywords.values()]
    else:
        function = getattr(hook, "__func__", hook)
        values = [*getattr(hook, "__dict__", {}).values()]
        values += closed_over(function) if hasattr(function, "__closure__") else []
    return (value for value in values if issubclass(type(value), str))


def state_changes(holders: Iterable[HeldObject]) -> Iterator[tuple[HeldObject, Any]]:
    """Yields the items of objects that are another state, and not what the objects lazily fill in."""
    for holder in holders:
        for key, old, new in list(changed(holder)):
            if _is_state(holder, old, new) and not _is_learned(holder, old, new):
                yield holder, key


def _is_number(old: Any, new: Any) -> bool:
    """Whether a number, a text, None or a tuple of such is another one."""
    return (is_plain(old) or old is ABSENT) and (is_plain(new) or new is ABSENT)


def _is_state(holder: HeldObject, old: Any, new: Any) -> bool:
    """Whether a change is one of the module's state, and not what it lazily makes for itself."""
    if holder.is_container or is_plain(new) or new is ABSENT:
        return not is_generator(holder.value)
    return old is not ABSENT and old is not None and (is_plain(old) or not _are_alike(old, new))


def _is_learned(holder: HeldObject, old: Any, new: Any) -> bool:
    """Whether an object that is not a module fills in what it has not known yet."""
    return holder.is_object and (old is None or old is ABSENT) and is_plain(new)


def _are_alike(old: Any, new: Any) -> bool:
    """Whether two objects that were made one after the other hold the same."""
    return digest(old) == digest(new)


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is one of torch's, as of weight norm, or of a class made from one of torch's."""
    return any(name.startswith("torch.") for name in modules_of_hook(hook))


def _hooks(module: nn.Module) -> Iterator[tuple[str, dict[int, Any]]]:
    """The tables of hooks of a module and its submodules, each with a name."""
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if key.endswith("_hooks") and key in _OWN and issubclass(type(value), dict):
                yield f"{name}.{key}".lstrip("."), value


def _tables(module: nn.Module) -> Iterator[Any]:
    """Returns the attributes that torch keeps of each module, and the lists and dicts of its own modules."""
    for child in module.modules():
        is_excused = _excused(child) is None
        for key, value in vars(child).items():
            if issubclass(type(value), (dict, set, list)) and (key in _OWN or is_excused):
                yield value


def _places(holders: list[HeldObject], is_one: Callable[[Any], bool]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the places of such values among the items of objects, if they can be replaced for a while."""
    for holder in holders:
        found = [key for key, value in holder.items.items() if is_one(value)]
        held = holder.store if found else None
        if held is not None:
            yield from ((holder.path_of(key), held, key) for key in found)
