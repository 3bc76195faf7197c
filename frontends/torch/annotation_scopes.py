"""Records, while a module is traced, the stretches of its forward that annotations are about.

A stretch is one call of a marked module, one `with` block, or one call of `torch.utils.checkpoint`. While a
module is traced, torch's checkpoints run their function once, as it stands: its values are free for a plan.
"""

# torch's checkpoints have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils import checkpoint as torch_checkpoint

from ...ir import Annotation, Policy
from ...torch_support.layouts import in_layout
from .cast_caches import as_leaves
from .source_lines import user_line

__all__ = ["MARKS", "Scope", "Scopes", "is_inside"]

MARKS = "_irc_wishes"
"""The attribute of a marked module: pairs of a path ("" is the module itself) and the value of a `Policy`."""

_WORDS = {Policy.KEEP: "irc.keep", Policy.RECOMPUTE: "irc.recompute"}


@dataclass(frozen=True, slots=True)
class Scope:
    """One stretch of a forward.

    Args:
        number: Distinguishes the calls of one capture.
        annotation: The annotation there; None if torch's policy says it for each operation.
        where: The line that calls torch's checkpoint, as ` at model.py:12 in forward`, or "".
        draws_anew: Whether that checkpoint draws other random numbers in backward than in forward.
        is_reentrant: Whether that checkpoint has a backward of its own, within eager's.
        runs_again: Whether eager's backward runs that checkpoint's function again.
    """

    number: int
    annotation: Annotation | None
    where: str = ""
    draws_anew: bool = False
    is_reentrant: bool = False
    runs_again: bool = False


def is_inside(name: str, path: str) -> bool:
    """Whether the name of an ONNX node is a path, or begins with it up to a slash or a dot."""
    stem = path.rstrip("/.")
    return name == path or name.startswith((f"{stem}/", f"{stem}."))


class Scopes:
    """The stretches that are open, in the thread that traces.

    Args:
        root: The module that is traced.

    Attributes:
        asked: All annotations for `root`, its submodules and its ONNX nodes, whether they run or not; and
            those of the stretches that ran.
        without_gradients: The lines of reentrant checkpoints that make no gradient, as ` at model.py:12`.
    """

    _of_thread = threading.local()

    def __init__(self, root: nn.Module) -> None:
        self._numbers = itertools.count()
        self.asked: dict[Annotation, None] = {}
        self.without_gradients: list[str] = []
        self._open: list[Scope] = []
        self._opened: list[int] = [0]
        """The number of scopes that each call has opened."""
        self._nodes: list[tuple[str, Scope]] = []
        for name, module in root.named_modules():
            for path, value in module.__dict__.get(MARKS, ()):
                scope = self._scope(Policy(value), path or name or "the model")
                if path:
                    self._nodes.append((path, scope))
                elif module is root:
                    self._open.append(scope)
        self._nodes.sort(key=lambda pair: len(pair[0]))

    @staticmethod
    def current() -> Scopes | None:
        """The scopes of the capture that runs in this thread."""
        return getattr(Scopes._of_thread, "scopes", None)

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """While active, these are the current ones, and torch's checkpoints are scopes."""
        before = Scopes.current()
        Scopes._of_thread.scopes = self
        try:
            with _checkpoints_as_scopes():
                yield
        finally:
            Scopes._of_thread.scopes = before

    def around(self, onnx_node: str | None) -> tuple[Scope, ...]:
        """The stretches that the running operation is in, outermost first."""
        if onnx_node is None:
            return tuple(self._open)
        return (*self._open, *(scope for path, scope in self._nodes if is_inside(onnx_node, path)))

    def enter(self, module: nn.Module, name: str | None) -> None:
        """A submodule is called; `name` is its path, or None if the model has none for it."""
        marks = module.__dict__.get(MARKS, ())
        what = name or type(module).__name__
        scopes = [self._scope(Policy(value), what) for path, value in marks if not path]
        self._open += scopes
        self._opened.append(len(scopes))

    def leave(self) -> None:
        """Leaves the scope that was entered last."""
        if len(self._opened) > 1 and (count := self._opened.pop()):
            del self._open[-count:]

    def enter_stretch(self, policy: Policy) -> None:
        """A `with` block is entered."""
        annotation = Annotation(policy, f"{_WORDS[policy]}(){_here()}")
        self.asked[annotation] = None
        self._push(Scope(next(self._numbers), annotation))

    @contextlib.contextmanager
    def checkpoint(
        self, where: str, *, has_policy: bool = False, keeps_draws: bool, is_reentrant: bool = False
    ) -> Generator[None]:
        """While active, torch's checkpoint, called at `where`, runs its function."""
        hint = None if has_policy else Annotation(Policy.PREFER_RECOMPUTE, f"torch.utils.checkpoint{where}")
        if hint is not None:
            self.asked[hint] = None
        runs_again = torch.is_grad_enabled()
        draws_anew = runs_again and not keeps_draws
        self._push(Scope(next(self._numbers), hint, where, draws_anew, is_reentrant, runs_again))
        try:
            yield
        finally:
            self.leave()

    def _push(self, scope: Scope) -> None:
        self._open.append(scope)
        self._opened.append(1)

    def _scope(self, policy: Policy, what: str) -> Scope:
        annotation = Annotation(policy, f"{_WORDS[policy]}({what})")
        self.asked[annotation] = None
        return Scope(next(self._numbers), annotation)


def _here() -> str:
    line = user_line(inspect.currentframe())
    return f" at {line}" if line else ""


# ---------------------------------------------------------------------- torch's checkpoints

_IMPLEMENTATION = "_checkpoint_without_reentrant_generator_impl"
_SINCE_2_14 = hasattr(torch_checkpoint, _IMPLEMENTATION)
"""Whether torch's generator takes its options by name and the function's arguments in a tuple and a dict."""
_GENERATOR = _IMPLEMENTATION if _SINCE_2_14 else "_checkpoint_without_reentrant_generator"
"""The name of the generator that all of torch's checkpoints that are not reentrant go through."""

_lock = threading.Lock()
_users = 0
_reentrant: Any = None
_generator: Any = None
"""The attributes of torch that captures replace meanwhile."""


class _Reentrant:
    """Stands for torch's reentrant checkpoint: in a capture, the function runs under autograd."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        scopes = Scopes.current()
        if scopes is None:
            return _reentrant.apply(function, preserve, *args)
        # torch's does not see tensors inside of other arguments, and without one that asks for a gradient
        # nothing in the function gets one
        asks = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
        enabled = asks and torch.is_grad_enabled()
        where = _here()
        if not asks:
            scopes.without_gradients.append(where)
        arguments = _with_leaves(args) if enabled else args
        with (
            torch.set_grad_enabled(enabled),
            scopes.checkpoint(where, keeps_draws=preserve, is_reentrant=enabled),
        ):
            return function(*arguments)


class _Leaves(torch.autograd.Function):
    """Tensors whose gradients are laid out as they are: eager's checkpoint accumulates them in leaves.

    One function makes all of them, so that gradients of one tensor that is passed several times are added in
    eager's order. They are no views, of which torch refuses to write into the base under `no_grad`.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.strides = [
            tensor.stride()
            if is_non_overlapping_and_dense_or_false(tensor)
            else torch.empty(tensor.shape, device="meta").stride()
            for tensor in tensors
        ]
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(
            gradient if gradient is None else in_layout(gradient, strides)
            for gradient, strides in zip(gradients, ctx.strides, strict=True)
        )


def _with_leaves(arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with leaves in place of the tensors that ask for a gradient."""
    asking = [isinstance(argument, Tensor) and argument.requires_grad for argument in arguments]
    with as_leaves():
        leaves: Iterator[Tensor] = iter(_Leaves.apply(*itertools.compress(arguments, asking)))  # pyright: ignore
    return [next(leaves) if asks else argument for argument, asks in zip(arguments, asking, strict=True)]


def _non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None]:
    """Stands for torch's other checkpoint: in a capture, no hooks take what it saves."""
    scopes = Scopes.current()
    if scopes is None:
        yield from _generator(function, *args, **kwargs)
        return
    # before torch 2.14: preserve_rng_state, context_fn, and the other options in order
    keeps_draws: bool = kwargs["preserve_rng_state"] if _SINCE_2_14 else args[0]
    context_fn: Callable[[], Any] = kwargs["context_fn"] if _SINCE_2_14 else args[1]
    forward_context, _ = context_fn()
    has_policy = isinstance(forward_context, torch_checkpoint._CachingTorchDispatchMode)
    around = scopes.checkpoint(_here(), has_policy=has_policy, keeps_draws=keeps_draws)
    with around, forward_context:
        yield


@contextlib.contextmanager
def _checkpoints_as_scopes() -> Generator[None]:
    """While active, checkpoints are scopes in threads with a capture under way, and torch's in others."""
    global _users, _reentrant, _generator
    with _lock:
        _users += 1
        if _users == 1:
            _reentrant = torch_checkpoint.CheckpointFunction
            _generator = getattr(torch_checkpoint, _GENERATOR)
            _install(_Reentrant, _non_reentrant)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _install(_reentrant, _generator)


def _install(reentrant: Any, non_reentrant: Any) -> None:
    torch_checkpoint.CheckpointFunction = reentrant
    setattr(torch_checkpoint, _GENERATOR, non_reentrant)
