"""Copies, pickles and saves fitted modules together with their plans.

The class of a fitted module is made at run time and is in no file. A pickle therefore holds the module that
was planned, written as its own class writes it, and beside it the program's source and the plan. Reading
makes the class again and compiles the source.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any, Self

from torch import fx, nn

from ...ir import UsageError
from .guards.module_state import CALL
from .original import FITTED, MARK, ORIGINAL, check_class, class_of_same_name
from .plan_cache import PlanCache
from .plan_cache_state import PlanCacheState
from .planned_forward import PlannedForward

__all__ = ["Persistent", "fitted_class"]

_FORMAT = 3


@dataclass(frozen=True)
class Carried:
    """The content of a pickle of a fitted module.

    Args:
        format: The version of this class.
        original: The module that was planned.
        attributes: The attributes of the fitted module that differ from the original's.
        removed: The names of attributes that only the original has.
        state: The plans, without the tensors that the original holds.
    """

    format: int
    original: nn.Module
    attributes: dict[str, Any]
    removed: tuple[str, ...]
    state: PlanCacheState


class Persistent(nn.Module):
    """The part of a fitted module that copies, pickles and saves it."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Skips the `__init_subclass__` of the user's class for the subclasses that are made here."""
        if MARK not in vars(cls):
            super().__init_subclass__(**keywords)

    def _get_name(self) -> str:
        """Returns the name in the module's `repr`; its class has the original's name."""
        return f"Fitted{super()._get_name()}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (_base(type(self)),), _carried(self)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Carried):
            _restore(self, state)
        else:
            super().__setstate__(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        carried = _carried(self)
        copied: Any = _blank(_base(type(self)))
        memo[id(self)] = copied
        _restore(copied, copy.deepcopy(carried, memo))
        return copied

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.__dict__.pop(CALL, None)  # as torch's copies have none
        return copied


def fitted_class(base: type[Persistent], original: nn.Module) -> type[Persistent]:
    """Makes the class of a fitted module: a subclass of the module's class, with the same name.

    Libraries write the name of a class into files, as `save_pretrained` does, and read it again.

    Args:
        base: The class with the members that a fitted module has beyond its own.
        original: The module; an attribute `plan` of its own stays.

    Raises:
        UnsupportedError: IRC555 as in `class_of_same_name`.
    """
    kind = type(original)
    function = functools.wraps(kind.forward)(_signed(base, kind))  # the signature stays visible
    forward = PlannedForward(function, vars(base)["irc_run"], kind.forward)
    members: dict[str, Any] = {MARK: True, "forward": forward}
    if not hasattr(original, "plan"):
        members["plan"] = vars(base)["irc_plan"]
    if isinstance(original, fx.GraphModule):
        members["recompile"] = _refuse_recompile
    return class_of_same_name(kind, (base, kind), members)


def _signed(base: type[Persistent], kind: type[nn.Module]) -> Any:
    """Makes the forward of fitted modules as a function that can get another signature.

    A forward that wraps it, as accelerate's does, is traced with a stand-in of the class that is planned.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (base if isinstance(self, base) else kind).forward(self, *args, **kwargs)

    return forward


def _refuse_recompile(module: nn.Module) -> None:
    raise UsageError(
        "IRC507",
        "the graph of a fitted GraphModule was edited: its plan is for the graph before the edit",
        help="edit the original, and call irc.optimize again",
    )


def _blank(base: type[Persistent]) -> Persistent:
    return object.__new__(base)


def _base(kind: type[Persistent]) -> type[Persistent]:
    """Returns the base class of all fitted modules."""
    return next(each for each in kind.__mro__ if Persistent in each.__bases__)


def _carried(fitted: Persistent) -> Carried:
    check_class(fitted, "copied or saved")
    original: nn.Module = fitted.__dict__[ORIGINAL]
    plans: PlanCache = fitted.__dict__[FITTED]
    theirs = original.__dict__
    attributes = {name: value for name, value in fitted.__dict__.items() if name not in (FITTED, ORIGINAL)}
    return Carried(
        format=_FORMAT,
        original=original,
        attributes={k: value for k, value in attributes.items() if k not in theirs or theirs[k] is not value},
        removed=tuple(name for name in theirs if name not in attributes),
        state=plans.state(fitted),
    )


def _restore(fitted: Persistent, carried: Carried) -> None:
    if carried.format != _FORMAT:
        raise UsageError(
            "IRC530",
            f"the fitted module was written in format {carried.format}; this version of irc reads {_FORMAT}",
            help="load it with the version that wrote it, save its state_dict, and call irc.optimize again",
        )
    original = carried.original
    fitted.__class__ = fitted_class(type(fitted), original)
    kept = {name: value for name, value in original.__dict__.items() if name not in carried.removed}
    fitted.__dict__.update({**kept, **carried.attributes, ORIGINAL: original})
    if (forward := fitted.__dict__.pop("forward", None)) is not None:
        fitted.forward = forward  # pickle reads a method as an attribute of the copy: its class's is none
    fitted.__dict__[FITTED] = PlanCache(carried.state, fitted)
