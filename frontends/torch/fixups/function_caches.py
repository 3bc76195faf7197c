"""Caches of functions (`functools.lru_cache`), in which a traced forward would leave tensors without data."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Set
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from ....torch_support.functions import WRAPPERS, closed_over

__all__ = ["caches_of", "forget_traced", "is_traced"]

_Cache: Any = type(functools.lru_cache(lambda: None))
_LEAVES = frozenset((str, bytes, int, float, bool, type(None), ModuleType, BuiltinFunctionType))
"""Types of values that hold no others, and are most of them."""
_MOST_ITEMS = 10_000
_LIBRARIES = ("torch", "irc", "sympy", "numpy")


def caches_of(module: nn.Module) -> list[Any]:
    """The caches that a module's code has: among its methods and attributes, and what code beside them names.

    Functions that decorators hold count, those that their files import, and what classes, objects, containers
    and files hold that functions name, but for torch and irc. Of installed packages only those of the modules
    are opened, of containers those that are no data.
    """
    children = list(module.modules())
    kinds = {kind for child in children for kind in type(child).__mro__}
    waiting: list[Any] = [value for child in children for value in vars(child).values()]
    waiting += kinds
    packages = {_package(kind.__module__) for kind in kinds}
    seen: set[int] = set()
    caches: list[Any] = []
    while waiting:
        value = waiting.pop()
        if type(value) in _LEAVES or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is _Cache:
            caches.append(value)
            waiting.append(value.__wrapped__)
        elif type(value) is FunctionType:
            names = value.__globals__
            waiting += closed_over(value)
            if _is_library(names.get("__name__")):
                continue
            if not _is_foreign(names.get("__name__"), packages):
                waiting += _named(value)
            if id(names) not in seen:
                seen.add(id(names))
                waiting += [each for each in list(names.values()) if type(each) in (FunctionType, _Cache)]
        else:
            waiting += _parts(value, packages)
    return caches


def _named(function: FunctionType) -> Iterator[Any]:
    """Yields what a function names among its globals, and in files that it imports."""
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names.update(code.co_names)
        codes += [each for each in code.co_consts if type(each) is CodeType]
    tables: list[dict[str, Any]] = [function.__globals__, sys.modules]
    seen: set[int] = set()
    while tables:
        table = tables.pop()
        for value in [table[name] for name in names if name in table]:
            if not issubclass(type(value), ModuleType):
                yield value
            elif id(value) not in seen and not _is_library(vars(value).get("__name__")):
                seen.add(id(value))
                tables.append(vars(value))


def _parts(value: Any, packages: Set[str]) -> Iterable[Any]:
    """Returns the parts of a class, a container, a method, or an object of a class that is not foreign."""
    kind = cast("type[Any]", type(value))  # not isinstance(), which some objects answer with a warning
    if kind in (list, tuple, set, frozenset, dict):
        items = value.values() if kind is dict else value
        return items if len(items) <= _MOST_ITEMS else ()
    if kind in WRAPPERS:
        wrapped = [getattr(value, name) for name in WRAPPERS[kind]]
        return [*wrapped, value.__self__] if kind is MethodType else wrapped
    if issubclass(kind, type):
        kinds = [each for each in value.__mro__ if not _is_foreign(each.__module__, packages)]
        return [part for each in kinds for part in list(vars(each).values())] + [kind] * (kind is not type)
    is_opened = kind.__dictoffset__ and not issubclass(kind, (ModuleType, Tensor))
    if is_opened and not _is_foreign(kind.__module__, packages):
        return (*object.__getattribute__(value, "__dict__").values(), kind)
    return ()


def _is_foreign(module: object, packages: Set[str]) -> bool:
    """Whether a module is a library's, or of an installed package that is none of these."""
    if _is_library(module):
        return True
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    return "-packages" in str(file) and _package(module) not in packages


def _is_library(module: object) -> bool:
    """Whether a module is torch's, irc's or Python's: its caches hold none of a forward's tensors."""
    return (package := _package(module)) in _LIBRARIES or package in sys.stdlib_module_names


def _package(module: object) -> str:
    return str(module).partition(".")[0]  # a class may have no text there


def forget_traced(caches: Iterable[Any]) -> None:
    """Clears the caches that hold a traced tensor: the next call, traced or not, would be given it."""
    for cache in caches:
        if cache.cache_info().currsize and _leads_to_traced(cache):
            cache.cache_clear()


def _leads_to_traced(cache: Any) -> bool:
    """Whether a result of a cache is a traced tensor, or holds one: in an object, or as a closure does."""
    waiting = gc.get_referents(cache)
    seen = {id(cache.__wrapped__)}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = cast("type[Any]", type(value))
        if issubclass(kind, (FakeTensor, FunctionalTensor)):
            return True
        if kind is FunctionType:
            waiting += value.__closure__ or ()
        elif not issubclass(kind, (type, ModuleType, nn.Module, Tensor)):
            waiting += gc.get_referents(value)
    return False


def is_traced(held: object) -> bool:
    """Whether something is or holds a tensor that exists only while a module is traced."""
    kind = cast("type[Any]", type(held))  # not isinstance(), which asks the object for its class
    if issubclass(kind, (set, frozenset)):
        held = list(cast("set[object]", held))
    return any(issubclass(type(leaf), (FakeTensor, FunctionalTensor)) for leaf in pytree.tree_leaves(held))
