"""The module behind a fitted one: what is traced, and which of the root's attributes its forward reads."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from ...ir import RECORDERS_MARK, UsageError
from .snapshot import Attributes, attribute
from .wrappers import wrapper_of

__all__ = ["FITTED", "MARK", "ORIGINAL", "Original", "check_class", "own_forward", "unfitted"]

FITTED, ORIGINAL = "_irc", "_irc_original"
"""Where a fitted module keeps its plans and the module that was planned, in its `__dict__`."""

MARK = "_irc_made"
"""What the class of a fitted module has, and no class that is made of it later."""

_UNREAD = frozenset(vars(nn.Module())) | {"forward", FITTED, ORIGINAL, RECORDERS_MARK}


class Original:
    """A stand-in for a module that runs its original forward and shares all that it holds.

    Attributes set on the stand-in are not set on the module. It remembers which attributes were read.

    Args:
        module: Any module, fitted or not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = vars(module)
        self._names: set[str] = set()
        plain = unfitted(module)
        original = type(plain)
        names = self._names

        def read(self: nn.Module, name: str) -> Any:
            names.add(name)
            return cast(Any, original).__getattribute__(self, name)

        # transformers has tables by the text of a class
        named = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        members = {**named, "__getattribute__": read}
        kind = type(f"Original{original.__name__}", (original,), members)
        self.module: nn.Module = _instance(kind, vars(plain))

    def reads(self) -> Attributes:
        """The root's own attributes that were read so far, parameters and submodules left aside."""
        wanted = (n for n in self._names if n not in _UNREAD and not n.startswith("__"))
        return tuple((name, attribute(self._held, name)) for name in sorted(wanted))


def unfitted(module: nn.Module) -> nn.Module:
    """What a fitted module was made of, sharing all that it holds; another module as it is.

    Raises:
        UsageError: IRC530 as in `check_class`.
    """
    original: nn.Module | None = vars(module).get(ORIGINAL)
    if original is None:
        return module
    check_class(module, "planned again", may_be_sharded=True)
    # a forward that was set on the fitted module since wraps the planned one
    held = {k: value for k, value in vars(module).items() if k not in (FITTED, ORIGINAL, "forward")}
    forward = own_forward(module)
    if forward is not None:
        held["forward"] = forward
    return _instance(type(original), held)


def check_class(fitted: nn.Module, verb: str, *, may_be_sharded: bool = False) -> None:
    """Refuses a fitted module whose class was changed, as by a parametrization of what it holds itself.

    Args:
        fitted: The module.
        verb: What it cannot be then.
        may_be_sharded: Whether the class that `fully_shard` makes of it is right too.

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


def own_forward(fitted: nn.Module) -> Any:
    """The forward that the original of a fitted module has as an attribute of its own, or None."""
    return vars(vars(fitted)[ORIGINAL]).get("forward")


def _instance(kind: type[Any], held: dict[str, Any]) -> nn.Module:
    made = object.__new__(kind)  # an fx.GraphModule would make a class of its own
    made.__dict__.update(held)
    return made
