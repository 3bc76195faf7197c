"""Hooks on submodules: traced if they compute, else refused."""

# torch keeps these hooks in private tables.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ....ir import THROUGH_DYNAMO, UnsupportedError
from ....torch_support.module_hooks import BACKWARD_HOOKS, HookStandIn, hooks_of, name_of_hook
from ....torch_support.pytree import tensors_of
from .hook_effects import effects_put_back

__all__ = ["ModuleHook", "module_hooks"]


@dataclass(frozen=True, slots=True)
class ModuleHook(HookStandIn):
    """A hook of a submodule while the module is traced.

    What the hook computes is traced as the forward's own code is: it must return a value, change a tensor
    that it is given, or, in forward, assign attributes of its module or of the module whose method it is.
    Another one is there for what it does elsewhere, once, and in no step.

    Args:
        hook: The hook.
        name: Its table and its code, in words.
        submodule: The name of its submodule.
        is_backward: Whether it runs in backward.
        thread: The thread that traces; the others call the hook itself.
    """

    name: str
    submodule: str
    is_backward: bool
    thread: int

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Calls the hook.

        Raises:
            UnsupportedError: IRC338 and IRC505.
        """
        if threading.get_ident() != self.thread:
            return self.hook(module, *args)
        before, owners = _seen(args), [module, *_owner(self.hook)]
        attributes = [dict(vars(owner)) for owner in owners]
        with effects_put_back(self.hook) as changed:
            result = self.hook(module, *args)
        is_assigned = any(map(_differ, attributes, map(vars, owners)))  # which the forward may do, too
        if self.is_backward and is_assigned:
            changed.append("an attribute of its module")
        if changed:
            raise UnsupportedError(
                "IRC338",
                f"the hook of submodule {self.submodule!r} ({self.name}) changes Python state: {changed[0]} "
                f"({len(changed)} such); a plan would freeze it",
                help="let the hook return what it computes; let one of a forward keep tensors in an "
                f"attribute of its module (module.kept = output); or {THROUGH_DYNAMO}, which calls hooks",
            )
        if result is None and (self.is_backward or (_seen(args) == before and not is_assigned)):
            raise UnsupportedError(
                "IRC505",
                f"submodule {self.submodule!r} has a hook ({self.name}) that returns nothing: it would run "
                "while the module is traced, and in no step",
                help="remove it, let it return what it computes, let one of a forward keep tensors in an "
                "attribute of its module (module.kept = output), or register it on the root module or on a "
                "parameter; if it is there for gradient checkpointing, gradient_checkpointing_disable(): irc "
                f"chooses what runs again; or {THROUGH_DYNAMO}, which calls hooks",
            )
        return result


@contextlib.contextmanager
def module_hooks(root: nn.Module) -> Generator[None]:
    """While active, the hooks on submodules are `ModuleHook`s, which refuse what cannot be traced."""
    thread = threading.get_ident()
    replaced: list[tuple[dict[int, Any], int, Any]] = []
    for name, child in list(root.named_modules())[1:]:
        for table, key, hook in hooks_of(child):
            held: dict[int, Any] = vars(child)[table]
            is_backward = table in BACKWARD_HOOKS
            held[key] = ModuleHook(hook, name_of_hook(table, hook), name, is_backward, thread)
            replaced.append((held, key, hook))
    try:
        yield
    finally:
        for held, key, hook in replaced:
            held[key] = hook


def _seen(args: tuple[Any, ...]) -> list[tuple[int, bool]]:
    """Returns how often the tensors among some arguments were written, and whether they have a gradient."""
    return [(tensor._version, tensor.requires_grad) for tensor in tensors_of(args)]


def _owner(hook: Any) -> list[nn.Module]:
    """Returns the module of which a hook is a method, if it is one."""
    owner = getattr(hook, "__self__", None)
    return [owner] if isinstance(owner, nn.Module) else []


def _differ(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() != others.keys() or any(value is not others[name] for name, value in some.items())
