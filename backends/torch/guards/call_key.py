"""A call of a planned module: what it is made of, in what way it differs from others, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from ....ir import Autocast, DType, Input, IrcError, Slot, TensorType, UsageError
from ....torch_support.pytree import is_openable
from .attribute_reads import Names, counting, differences
from .module_state import Snapshot, State
from .settings import ABSENT, differing, is_plain

__all__ = ["CallKey", "GuardFailure"]


@dataclass(eq=False, slots=True)
class CallKey:
    """A call, and what it finds.

    Args:
        root: The fitted module.
        args: The positional arguments.
        kwargs: The keyword arguments.
        leaves: Both, flat.
        tree: How they nest.
        tensors: The tensors among the leaves.
        snapshot: The modules at the time of the call.
        autocast: The device types for which automatic casting is on.
    """

    root: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    tree: Any
    tensors: list[Tensor]
    snapshot: Snapshot
    autocast: Autocast

    def trains(self) -> bool:
        """Whether anything asks for a gradient."""
        return any(tensor.requires_grad for tensor in (*self.tensors, *self.root.parameters()))


# ---------------------------------------------------------------------- differences


@dataclass(frozen=True, slots=True)
class GuardFailure:
    """How a call differs from the one that a plan was made for.

    Args:
        code: Of the error that refuses it.
        message: What differs.
        help: What to do where it is refused.
        is_plannable: Whether a plan can be made for the call.
    """

    code: str
    message: str
    help: str
    is_plannable: bool = True

    def error(self) -> IrcError:
        """The refusal."""
        kind = UsageError if self.code in ("IRC501", "IRC507") else IrcError
        return kind(self.code, self.message, help=self.help)


def other_nesting(now: object, planned: object) -> GuardFailure:
    """The arguments nest in another way."""
    shown = [" ".join(str(tree).split()) for tree in (now, planned)]
    return GuardFailure(
        "IRC501",
        f"the arguments nest as {shown[0]}; the plan was made for {shown[1]}",
        "call the module as in the example arguments, or optimize it for this call",
    )


def other_constant(now: object, planned: object) -> GuardFailure:
    """An argument that is no tensor has another value, or one of the two is a tensor.

    No plan is made for what cannot be known again: an object that equals only itself, not a number.
    """
    is_known: bool = is_plain(now) and not isinstance(now, FunctionType) and bool(now == now)
    return GuardFailure(
        "IRC501",
        f"an argument is {_shown(now)}; the plan was made for {_shown(planned)}",
        "pass the very object that the plan was made for: the forward could tell another one from it"
        if is_openable(now)
        else "constants are part of the plan: optimize the module for this value",
        is_plannable=isinstance(now, Tensor) or is_known,
    )


def _shown(leaf: object) -> str:
    if is_openable(leaf):  # the text of dataclasses that refer to each other may have no end
        return f"an object of class {type(leaf).__qualname__} at {id(leaf):#x}"
    return "a tensor" if isinstance(leaf, (Tensor, Slot)) else repr(leaf)


def other_tensor(name: str, tensor: Tensor | None, static: Input) -> GuardFailure:
    """A tensor has another type than the plan was made for, or is none."""
    help = "call irc.optimize with example arguments of this type, or pad to the planned shape"
    if tensor is None:
        return GuardFailure("IRC501", f"{name} is gone; the plan was made with it", help)
    wanted = static.value.type
    same = (
        tuple(tensor.shape) == wanted.shape
        and tuple(tensor.stride()) == wanted.strides
        and str(tensor.dtype) == f"torch.{wanted.dtype.value}"
        and str(tensor.device) == wanted.device
    )
    if same:
        return GuardFailure(
            "IRC503",
            f"{name} has requires_grad={tensor.requires_grad}, "
            f"the plan was made for requires_grad={static.requires_grad}",
            "call irc.optimize again, with inputs and parameters that require gradients as they do "
            "in the training step",
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    now = _described(dtype, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.device))
    planned = _described(wanted.dtype.value, wanted.shape, wanted.strides, wanted.device)
    return GuardFailure("IRC501", f"{name} is {now}; the plan was made for {planned}", help)


def _described(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], device: str) -> str:
    rows = TensorType.contiguous(shape, DType.FLOAT32).strides
    layout = "" if strides == rows else f" with strides {list(strides)}"
    return f"{dtype}{list(shape)}{layout} on {device}"


def other_sharing(names: tuple[str, str], *, shares: bool) -> GuardFailure:
    """Two tensors share their memory and did not when the plan was made, or the other way round."""
    now, planned = ("share", "did not") if shares else ("do not share", "did")
    return GuardFailure(
        "IRC501",
        f"{names[0]} and {names[1]} {now} their memory; the plan was made when they {planned}",
        "call the module with tensors that share memory as in the example arguments",
    )


def other_state(now: Snapshot, planned: State, names: Names) -> GuardFailure:
    """Submodules are in other modes, or have other settings of those that count."""
    places = list(differences(now.state, planned, names))
    pairs = [(now.names[place], now.state[place], planned[place]) for place in places]
    modes = [
        (name, dict(mine)["training"])
        for name, (_, mine), (_, its) in pairs
        if dict(mine).get("training") != dict(its).get("training")
    ]
    if modes:
        name, training = modes[0]
        return GuardFailure(
            "IRC502",
            f"submodule {name or '(root)'!r} is in {'train' if training else 'eval'}() mode; "
            f"the plan was made for the other ({len(modes)} submodules differ)",
            "call irc.optimize with the modules in the modes that you train in",
        )
    name, (kind, mine), (planned_kind, its) = pairs[0]
    changed = (f"of class {planned_kind.__name__}", f"of class {kind.__name__}")
    if kind is planned_kind:
        read = names[places[0]] if names else None
        known, found = counting(its, read), counting(mine, read)
        changed = (_settings(known, found), _settings(found, known))
    return GuardFailure(
        "IRC507",
        f"a setting {f'of submodule {name!r}' if name else 'of the code'} has changed since the plan: "
        f"{changed[0]} is now {changed[1]}",
        "call irc.optimize again",
    )


def other_attribute(name: str, now: object, planned: object) -> GuardFailure:
    """An attribute of the root that the forward reads has changed."""
    return GuardFailure(
        "IRC507",
        f"attribute {name!r}, which the forward reads, has changed since the plan: "
        f"{differing(planned, now)} is now {differing(now, planned)}",
        "call irc.optimize again",
    )


def _settings(mine: dict[str, object], its: dict[str, object]) -> str:
    """The settings that are not among the others."""
    shown = (
        f"{k!r}: {differing(v, its.get(k, ABSENT))}"
        for k, v in mine.items()
        if its.get(k, ABSENT) is not v and its.get(k, ABSENT) != v
    )
    return f"{{{', '.join(shown)}}}"


def other_part(name: str | None) -> GuardFailure:
    """A module of the tree holds others than it did; it has no name where no plan is left to compare with."""
    changed = "has other submodules, parameters or buffers than at planning"
    if name is None:
        changed = "has changed since the plan"
    return GuardFailure(
        "IRC507",
        f"{f'submodule {name!r}' if name else 'the module'} {changed}",
        "call irc.optimize again",
    )


def other_autocast(now: Autocast, planned: Autocast) -> GuardFailure:
    """Automatic casting is in another state."""
    return GuardFailure(
        "IRC502",
        f"automatic casting is {_autocast_text(now)}; the plan was made with it {_autocast_text(planned)}",
        "call irc.optimize under the same torch.autocast as the training step",
    )


def _autocast_text(state: Autocast) -> str:
    texts = (f"on for {d} with {dtype}{'' if keeps else ', no casts kept'}" for d, dtype, keeps in state)
    return ", ".join(texts) or "off"
