"""Copies, pickles and files of fitted modules, which carry their plans.

The class of a fitted module is made at run time and belongs to no file. What is written instead is the
module that was planned, in the way of its own class, and beside it the program's source and the plan; reading
makes the class anew and compiles the source.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any, Self

from torch import fx, nn

from ...ir import UsageError
from .original import FITTED, MARK, ORIGINAL, check_class, class_of_same_name
from .plan_cache import PlanCache
from .plan_cache_state import PlanCacheState

__all__ = ["Persistent", "fitted_class"]

_FORMAT = 2


@dataclass(frozen=True)
class Carried:
    """What a fitted module is made from again.

    Args:
        format: Which version of this class was written.
        original: The module that was planned.
        attributes: The attributes of the fitted module that are others than the original's.
        removed: Names of attributes that the original has and the fitted module has not.
        unbound: The plans, without what can be found again in the original.
    """

    format: int
    original: nn.Module
    attributes: dict[str, Any]
    removed: tuple[str, ...]
    unbound: PlanCacheState


class Persistent(nn.Module):
    """A fitted module as far as it can be copied, pickled and saved."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Leaves out what the user's class does with subclasses, for those that are made of it here."""
        if MARK not in vars(cls):
            super().__init_subclass__(**keywords)

    def _get_name(self) -> str:
        """What stands before the parts in the module's text; its class has the original's name."""
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
        return copied


def fitted_class(base: type[Persistent], original: nn.Module) -> type[Persistent]:
    """The class of what is fitted to a module: a subclass of the module's, of the same name.

    Libraries write the name of a class into files, as `save_pretrained` does, and read it again.

    Args:
        base: What the class has beyond the module's own.
        original: The module; an attribute `plan` of its own stays.

    Raises:
        UnsupportedError: IRC555 as in `class_of_same_name`.
    """
    kind = type(original)
    forward = functools.wraps(kind.forward)(_signed(base.forward))  # what it takes stays to be seen
    members: dict[str, Any] = {MARK: True, "forward": forward}
    if not hasattr(original, "plan"):
        members["plan"] = vars(base)["irc_plan"]
    if isinstance(original, fx.GraphModule):
        members["recompile"] = _refuse_recompile
    return class_of_same_name(kind, (base, kind), members)


def _signed(function: Any) -> Any:
    """A function that does the same, to write another signature on."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return forward


def _refuse_recompile(module: nn.Module) -> None:
    raise UsageError(
        "IRC507",
        "the graph of a fitted GraphModule was edited: its plan is for the graph as it was",
        help="edit the original, and call irc.optimize again",
    )


def _blank(base: type[Persistent]) -> Persistent:
    return object.__new__(base)


def _base(kind: type[Persistent]) -> type[Persistent]:
    """The class that all fitted modules have in common."""
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
        unbound=plans.unbound(fitted),
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
    fitted.__dict__[FITTED] = PlanCache(carried.unbound, fitted)
