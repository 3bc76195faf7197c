"""The ways in which a call differs from the one that a plan was made for, each with its error.

A plan is for one nesting of arguments, their constants and tensor types, which of them share memory, the
modules with their modes and settings, the attributes that the forward reads, and the state of autocast. Each
of these has a function here, which describes the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor

from ....ir import Autocast, DType, Input, IrcError, Slot, TensorType, UsageError
from ....torch_support.attribute_reads import Names
from ....torch_support.pytree import is_openable
from .module_state import HOOKS_MARK, SCRIPT_MARK, ModuleState, State, differing_modules, relevant_settings
from .settings import ABSENT, differing, is_plain

__all__ = [
    "FORWARD",
    "PAD",
    "RANGE",
    "GuardFailure",
    "attribute_failure",
    "autocast_failure",
    "constant_failure",
    "forward_failure",
    "nesting_failure",
    "packed_failure",
    "part_failure",
    "sharing_failure",
    "state_failure",
    "tensor_failure",
]


FORWARD = "the module's forward"
"""The name of what differs if a module has got another forward."""


@dataclass(frozen=True, slots=True)
class GuardFailure:
    """One difference between a call and the call that a plan was made for.

    Args:
        code: The code of the error that refuses the call.
        message: The difference, in words.
        help: The way out if the call is refused.
        is_plannable: Whether a plan can be made for the call.
        changing: The argument or attribute that differs; "" if it has no name.
        advice: The way to have one plan for all its values; "" if there is none.
    """

    code: str
    message: str
    help: str
    is_plannable: bool = True
    changing: str = ""
    advice: str = ""

    def error(self) -> IrcError:
        """Makes the error that refuses the call."""
        kind = UsageError if self.code in ("IRC501", "IRC507") else IrcError
        return kind(self.code, self.message, help=self.help)


def forward_failure(now: object, planned: object) -> GuardFailure:
    """Describes another forward than planned, which somebody has given to the module itself."""
    return GuardFailure(
        "IRC507",
        f"{FORWARD} is {_code_of(now)}; the plan was made for {_code_of(planned)}",
        "call irc.optimize once the module has the forward that it trains with",
        changing=FORWARD,
        advice="set one forward, once",
    )


def _code_of(forward: object) -> str:
    """Tells where the code of a forward stands."""
    if forward is None:
        return "that of its class"
    code: Any = getattr(forward, "__code__", None)
    if code is None:
        return differing(forward, ABSENT)
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def nesting_failure(now: Any, planned: Any) -> GuardFailure:
    """Describes arguments that nest in another way."""
    shown = [_given(tree) for tree in (now, planned)]
    if shown[0] == shown[1]:
        shown = [" ".join(str(tree).split()) for tree in (now, planned)]
    return GuardFailure(
        "IRC501",
        f"the arguments are {shown[0]}; the plan was made for {shown[1]}",
        "call the module as in the example arguments, or optimize it for this call",
    )


def _given(tree: Any) -> str:
    """Tells how many positional arguments a call has, and which keyword arguments."""
    positional, keywords = tree.children()
    names = ", ".join(f"{name}=" for name in keywords.context)
    return f"{positional.num_children} positional{f' and {names}' if names else ''}"


def constant_failure(name: str, now: object, planned: object) -> GuardFailure:
    """Describes an argument that has another value than planned, or that is a tensor on one side only.

    A call cannot be planned if its argument cannot be recognized again: an object that equals only itself, a
    function.
    """
    is_known = is_plain(now) and not isinstance(now, FunctionType)
    is_number = isinstance(now, int | float) and not isinstance(now, bool)
    advice = "pass it as a tensor" if is_number else ""
    return GuardFailure(
        "IRC501",
        f"{name} is {_shown(now)}; the plan was made for {_shown(planned)}",
        "pass the very object that the plan was made for: the forward could tell another one from it"
        if is_openable(now)
        else f"constants are part of the plan: {f'{advice}, or ' if advice else ''}"
        "optimize the module for this value",
        is_plannable=isinstance(now, Tensor) or is_known,
        changing=name,
        advice=advice,
    )


def _shown(leaf: object) -> str:
    if is_openable(leaf):  # the text of dataclasses that refer to each other may have no end
        return f"an object of class {type(leaf).__qualname__} at {id(leaf):#x}"
    return "a tensor" if isinstance(leaf, (Tensor, Slot)) else repr(leaf)


PAD = "pad it to few shapes"
RANGE = f"{PAD}, or plan for a range of them with dynamic= of irc.optimize"
"""The advice for a tensor of which one size differs, if no range is planned yet."""


def tensor_failure(name: str, tensor: Tensor | None, static: Input) -> GuardFailure:
    """Describes a tensor that has another type than planned, or that is gone."""
    help = "call irc.optimize with example arguments of this type, or pad to the planned shape"
    if tensor is None:
        return GuardFailure("IRC501", f"{name} is gone; the plan was made with it", help, changing=name)
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
    message = f"{name} is {now}; the plan was made for {planned}"
    sizes = list(zip(tensor.shape, wanted.shape, strict=False))
    differing_sizes = sum(size != other for size, other in sizes)
    if tensor.dim() != len(wanted.shape) or not differing_sizes:
        return GuardFailure("IRC501", message, help, changing=name)
    return GuardFailure("IRC501", message, help, changing=name, advice=RANGE if differing_sizes == 1 else PAD)


def packed_failure(name: str) -> GuardFailure:
    """Describes a packed weight that is packed in another way than planned, or not any more."""
    return GuardFailure(
        "IRC507",
        f"parameter {name} is packed in another way than at planning, or not packed any more",
        "call irc.optimize again",
    )


def _described(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], device: str) -> str:
    rows = TensorType.contiguous(shape, DType.FLOAT32).strides
    layout = "" if strides == rows else f" with strides {list(strides)}"
    return f"{dtype}{list(shape)}{layout} on {device}"


def sharing_failure(names: tuple[str, str], *, shares: bool) -> GuardFailure:
    """Describes two tensors that share their memory and did not at planning, or that no longer share it."""
    now, planned = ("share", "did not") if shares else ("do not share", "did")
    return GuardFailure(
        "IRC501",
        f"{names[0]} and {names[1]} {now} their memory; the plan was made when they {planned}",
        "call the module with tensors that share memory as in the example arguments",
    )


def generators_failure() -> GuardFailure:
    """Describes generators of the user's that are other ones, or no longer one where they were one."""
    return GuardFailure(
        "IRC507",
        "the generators that the forward draws from are missing, on other devices, or one where they were "
        "several at planning (or the reverse)",
        "give the module's attributes and the arguments generators as in the example",
    )


_MARKED = {
    HOOKS_MARK: "the hooks of submodule {} have changed since the plan, or what they hold",
    SCRIPT_MARK: "what submodule {}, made by torch.jit, holds has changed since the plan",
}


def state_failure(now: ModuleState, planned: State, names: Names) -> GuardFailure:
    """Describes submodules that are in other modes, or that have other settings of those that count."""
    indices = list(differing_modules(now.state, planned, names))
    pairs = [(now.names[index], now.state[index], planned[index]) for index in indices]
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
    for mark, what in _MARKED.items():
        if dict(mine).get(mark) != dict(its).get(mark):
            return GuardFailure("IRC507", what.format(repr(name)), "call irc.optimize again")
    changed = (f"of class {planned_kind.__name__}", f"of class {kind.__name__}")
    if kind is planned_kind:
        read = names[indices[0]] if names else None
        known, found = relevant_settings(its, read), relevant_settings(mine, read)
        changed = (_settings(known, found), _settings(found, known))
    return GuardFailure(
        "IRC507",
        f"a setting {f'of submodule {name!r}' if name else 'of the code'} has changed since the plan: "
        f"{changed[0]} is now {changed[1]}",
        "call irc.optimize again",
    )


def attribute_failure(
    name: str, now: object, planned: object, use: str = "the forward reads"
) -> GuardFailure:
    """Describes an attribute or a global of which the forward makes some use and that has changed."""
    return GuardFailure(
        "IRC507",
        f"{name}, which {use}, has changed since the plan: "
        f"{differing(planned, now)} is now {differing(now, planned)}",
        "call irc.optimize again",
        changing=name,
        advice="hold it in a buffer",
    )


def _settings(mine: dict[str, object], its: dict[str, object]) -> str:
    """Prints the settings that differ from the others."""
    shown = (
        f"{k!r}: {differing(v, its.get(k, ABSENT))}"
        for k, v in mine.items()
        if its.get(k, ABSENT) is not v and its.get(k, ABSENT) != v
    )
    return f"{{{', '.join(shown)}}}"


def part_failure(name: str | None) -> GuardFailure:
    """Describes a module that holds other submodules, parameters or buffers; None names no module."""
    changed = "has other submodules, parameters or buffers than at planning"
    if name is None:
        changed = "has changed since the plan"
    return GuardFailure(
        "IRC507",
        f"{f'submodule {name!r}' if name else 'the module'} {changed}",
        "call irc.optimize again",
    )


def autocast_failure(now: Autocast, planned: Autocast) -> GuardFailure:
    """Describes another state of automatic casting."""
    return GuardFailure(
        "IRC502",
        f"automatic casting is {_autocast_text(now)}; the plan was made with it {_autocast_text(planned)}",
        "call irc.optimize under the same torch.autocast as the training step",
    )


def _autocast_text(state: Autocast) -> str:
    texts = (f"on for {d} with {dtype}{'' if keeps else ', no casts kept'}" for d, dtype, keeps in state)
    return ", ".join(texts) or "off"
