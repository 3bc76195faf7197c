"""Hooks that a module's forward puts on its own tensors: traced if they compute, else refused."""

# torch's dispatch modes have no public door.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ....ir import Location, UnsupportedError
from .hook_effects import effects_put_back

__all__ = ["Hooked", "keeps_zeros", "refuse_hooks_that_stay", "tensor_hooks"]

Hooked = list[tuple[Tensor, Any]]
"""Tensors with the hooks that a forward has put on them."""

_Method = Callable[..., Any]
_Hook = Callable[[Tensor], Any]


@contextlib.contextmanager
def tensor_hooks() -> Generator[Hooked]:
    """While active, hooks on tensors must return a gradient, which then is part of what is traced.

    A hook that returns nothing is there for what it does elsewhere: it would run once, while the module is
    traced, and never again. Other threads are left alone.

    Yields:
        The hooks so far.

    Raises:
        UnsupportedError: IRC536 for such a hook, when it is called, and for `retain_grad`.
    """
    hooked: Hooked = []
    originals: dict[str, _Method] = {name: getattr(Tensor, name) for name in _REPLACED}
    for name, replacement in _REPLACED.items():
        setattr(Tensor, name, _in_this_thread(replacement, originals[name], hooked))
    try:
        yield hooked
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def refuse_hooks_that_stay(hooked: Hooked, state: Iterable[Tensor]) -> None:
    """Refuses hooks that a forward puts on parameters and buffers: eager's next step calls them once more.

    Raises:
        UnsupportedError: IRC536.
    """
    kept = {id(tensor) for tensor in state}
    for tensor, hook in hooked:
        if id(tensor) in kept:
            raise UnsupportedError(
                "IRC536",
                f"the forward puts a hook on a parameter or a buffer ({hook!r}), where it stays: each step "
                "would put one more there, and call them all",
                at=_place(hook),
                help="register it once, outside of the forward: model.weight.register_hook(...)",
            )


def keeps_zeros(tensor: Tensor, hook: _Hook) -> bool:
    """Whether a hook of a tensor turns a gradient of zeros into no other one, as far as it can be told."""
    try:
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), effects_put_back(hook):
            zeros = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
            return not bool(hook(zeros).any())
    except Exception:  # it computes with what is traced, whose values are not known
        return False


def _in_this_thread(replacement: _Method, original: _Method, hooked: Hooked) -> _Method:
    thread = threading.get_ident()

    @functools.wraps(original)
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(tensor, *args, **kwargs)
        hooked.append((tensor, args[0] if args else kwargs.get("hook")))
        return replacement(functools.partial(original, tensor), *args, **kwargs)

    return method


def _register_hook(original: _Method, hook: _Hook) -> Any:
    @functools.wraps(hook)
    def traced(gradient: Tensor) -> Tensor:
        result = hook(gradient)
        if result is None:
            raise _refused(f"a hook on a tensor ({hook!r}), which returns no gradient", _place(hook))
        return result

    return original(traced)


def _register_post_accumulate_grad_hook(original: _Method, hook: _Hook) -> Any:
    raise _refused(f"a hook on a tensor ({hook!r})", _place(hook))


def _retain_grad(original: _Method) -> Any:
    raise _refused("retain_grad() on a tensor")


_REPLACED: dict[str, _Method] = {
    "register_hook": _register_hook,
    "register_post_accumulate_grad_hook": _register_post_accumulate_grad_hook,
    "retain_grad": _retain_grad,
}


def _place(hook: _Hook) -> Location | None:
    code = getattr(hook, "__code__", None)
    if code is None:
        return None
    return Location(source=f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}")


def _refused(what: str, at: Location | None = None) -> UnsupportedError:
    return UnsupportedError(
        "IRC536",
        f"the forward calls for {what}: it would run while the module is traced, and in no step",
        at=at,
        help="return the tensor from the forward and register the hook on the result, or return the gradient "
        "from the hook",
    )
