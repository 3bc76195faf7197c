"""The module behind a fitted module: it is traced, and records which of its attributes the forward reads."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from ...ir import Assignment, UnsupportedError, UsageError
from ...torch_support.attribute_reads import READS_AS_ANY, reads_all
from ...torch_support.recorders import RECORDERS_MARK
from .guards.module_state import CALL, Attributes, attribute
from .planned_forward import rebound
from .refuse_wrappers import wrapper_of

__all__ = [
    "FITTED",
    "MARK",
    "ORIGINAL",
    "Original",
    "check_class",
    "class_of_same_name",
    "unfitted",
    "unfitted_with",
]

FITTED, ORIGINAL = "_irc", "_irc_original"
"""The keys of the plan cache and of the original module in the `__dict__` of a fitted module."""

MARK = "_irc_made"
"""The mark of the class of a fitted module; classes that are made of it later do not have it themselves."""

_UNREAD = frozenset(vars(nn.Module())) | {"forward", FITTED, ORIGINAL, RECORDERS_MARK}


class Original:
    """A stand-in for a module that runs the original forward and shares all attributes.

    Attributes set on the stand-in are not set on the module. It records which attributes are read.

    Args:
        module: Any module, fitted or not.
        forward: The forward that it runs beside that of its class; None for that one.
    """

    def __init__(self, module: nn.Module, forward: Any = None) -> None:
        held = self._held = vars(module)
        self._names: set[str] = set()
        plain = unfitted_with(module, forward)
        original = type(plain)
        names = self._names

        def read(self: nn.Module, name: str) -> Any:
            names.add(name)
            if reads_all(name, sys._getframe(1)):
                names.update(held)
            return cast(Any, original).__getattribute__(self, name)

        members = {"__getattribute__": read, READS_AS_ANY: True}
        kind = class_of_same_name(original, (_Unnoticed, original), members)
        self.module: nn.Module = _instance(kind, vars(plain), plain)

    def add_reads(self, names: Iterable[str]) -> None:
        """Adds attributes that were read of the module itself: a forward may know it by another name."""
        self._names.update(names)

    def reads(self, assignments: Sequence[Assignment] = ()) -> Attributes:
        """Returns the attributes of the root that were read so far, without parameters and submodules.

        Args:
            assignments: The attributes that the forward changes, which are left out.
        """
        names = self._names - {each.name for each in assignments if not each.module}
        wanted = (n for n in names if n not in _UNREAD and not n.startswith("__"))
        return tuple((name, attribute(self._held, name)) for name in sorted(wanted))


class _Unnoticed:
    """A base class that keeps a subclass from the `__init_subclass__` of the bases after it."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        pass


def class_of_same_name(kind: type, bases: tuple[type, ...], members: dict[str, Any]) -> type[Any]:
    """Makes a subclass with the name of the class: transformers has tables by names, and writes the names.

    Args:
        kind: The class.
        bases: The bases of the subclass. The first of them skips the class's own `__init_subclass__`, which
            may need keywords, or keep a list of subclasses.
        members: The members of the subclass.

    Raises:
        UnsupportedError: IRC555 if the class does not allow such a subclass.
    """
    try:  # under a name of its own: metaclasses may keep lists of classes
        made = type(f"_Irc{kind.__name__}", bases, {"__module__": kind.__module__, **members})
    except Exception as error:  # whatever a metaclass raises
        raise UnsupportedError(
            "IRC555",
            f"a fitted module needs a subclass of the model's class {kind.__qualname__}, which cannot be "
            f"made: {type(error).__name__}: {error}",
            help="wrap the model in a module of a plain class; the metaclass "
            f"{type(kind).__qualname__} stands in the way",
        ) from error
    made.__name__, made.__qualname__ = kind.__name__, kind.__qualname__
    return made


def unfitted(module: nn.Module) -> nn.Module:
    """Returns the module that a fitted one was made of, with its attributes; other modules unchanged.

    A forward that was set on the fitted module is one of its attributes.

    Raises:
        UsageError: IRC530 as in `check_class`.
    """
    original: nn.Module | None = vars(module).get(ORIGINAL)
    if original is None:
        return module
    check_class(module, "planned again", may_be_sharded=True)
    attributes = {k: value for k, value in vars(module).items() if k not in (FITTED, ORIGINAL)}
    return _instance(type(original), attributes, module)


def unfitted_with(module: nn.Module, forward: Any) -> nn.Module:
    """Returns what `unfitted` does, with a forward of its own in place of that of its class if it is given.

    Raises:
        UsageError: IRC530 as in `check_class`.
    """
    plain = unfitted(module)
    attributes = {name: value for name, value in vars(plain).items() if name != "forward"}
    if forward is not None:
        attributes["forward"] = forward
    return _instance(type(plain), attributes, module)


def check_class(fitted: nn.Module, verb: str, *, may_be_sharded: bool = False) -> None:
    """Refuses a fitted module whose class was changed, as by a parametrization of its own tensors.

    Args:
        fitted: The module.
        verb: The action that is refused, such as "planned again".
        may_be_sharded: Whether the class that `fully_shard` makes is allowed.

    Raises:
        UsageError: IRC530.
    """
    kind = type(fitted)
    if MARK in vars(kind) or (may_be_sharded and wrapper_of(kind) is not None):
        return
    raise UsageError(
        "IRC530",
        f"the fitted module cannot be {verb}: its class was changed to {kind.__name__} since",
        help="undo the change, or make it to the original and call irc.optimize again",
    )


def _instance(kind: type[Any], attributes: dict[str, Any], module: nn.Module) -> nn.Module:
    """Makes an instance of a class with attributes of a module, whose own forward becomes its own."""
    made = object.__new__(kind)  # an fx.GraphModule would make a class of its own
    made.__dict__.update(attributes)
    made.__dict__.pop(CALL, None)  # it calls the other instance
    if "forward" in attributes:
        made.__dict__["forward"] = rebound(attributes["forward"], module, made)
    return made
