"""Checks that a planned step is called as it was captured: modes, settings, hooks, autocast, arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ir import Input, IrcError, Signature, Slot, UnsupportedError, UsageError

__all__ = [
    "check_arguments",
    "check_autocast",
    "check_submodules",
    "check_tensor",
    "refuse_hooks",
    "settings",
]


def check_tensor(tensor: Tensor, static: Input) -> None:
    """Refuses a tensor of another type than the plan was made for.

    Raises:
        IrcError: IRC503 where it requires a gradient and the planned one did not, or the other way round.
        UsageError: IRC501 for another shape, layout, element type or device.
    """
    if tensor.requires_grad != static.requires_grad:
        raise IrcError(
            "IRC503",
            f"{static.role.value} {static.target} has requires_grad={tensor.requires_grad}, "
            f"the plan was made for requires_grad={static.requires_grad}",
            help="call irc.optimize again, with inputs and parameters that require gradients as they do "
            "in the training step",
        )
    wanted = static.value.type
    same = tuple(tensor.shape) == wanted.shape and tuple(tensor.stride()) == wanted.strides
    if not same or str(tensor.dtype) != f"torch.{wanted.dtype.value}" or str(tensor.device) != wanted.device:
        raise UsageError(
            "IRC501",
            f"{static.role.value} {static.target} is {_described(tensor)}; the plan was made for "
            f"{wanted.dtype.value}{list(wanted.shape)} with strides {list(wanted.strides)} "
            f"on {wanted.device}",
            help="call irc.optimize with example arguments of this type, or pad to the planned shape",
        )


def _described(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"


def settings(module: nn.Module) -> dict[str, object]:
    """The plain values among a module's attributes, such as a dropout's rate."""
    plain = (bool, int, float, str, tuple)
    return {k: v for k, v in module.__dict__.items() if k != "training" and isinstance(v, plain)}


def check_submodules(
    root: nn.Module, modules: list[nn.Module], planned_settings: list[dict[str, object]]
) -> None:
    """Refuses a step after a submodule or a setting of one was replaced: the plan has the old ones.

    Args:
        root: The fitted module.
        modules: The submodules at planning.
        planned_settings: Their settings at planning.

    Raises:
        UsageError: IRC507.
    """
    now = list(root.modules())[1:]
    if len(now) != len(modules) or any(a is not b for a, b in zip(now, modules, strict=True)):
        raise UsageError(
            "IRC507",
            "submodules were replaced, added or removed since the plan",
            help="call irc.optimize again",
        )
    for child, planned in zip(now, planned_settings, strict=True):
        if settings(child) != planned:
            name = next(name for name, module in root.named_modules() if module is child)
            raise UsageError(
                "IRC507",
                f"a setting of submodule {name!r} has changed since the plan: {planned} is now "
                f"{settings(child)}",
                help="call irc.optimize again",
            )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refuse_hooks(root: nn.Module) -> None:
    """Refuses hooks on submodules: a planned step does not call submodules, so their hooks would be lost.

    torch's own, such as those of weight and spectral norm, compute tensors and are part of the graph.

    Raises:
        UnsupportedError: IRC505.
    """
    for name, child in root.named_modules():
        if child is root or not any(child.__dict__[kind] for kind in _HOOKS):
            continue
        for kind in _HOOKS:
            for hook in child.__dict__[kind].values():
                home = getattr(hook, "__module__", None) or type(hook).__module__
                if not str(home).startswith("torch."):
                    raise UnsupportedError(
                        "IRC505",
                        f"submodule {name!r} has a hook ({kind.strip('_').replace('_', ' ')}: "
                        f"{hook!r}), which a planned step would not call",
                        help="remove it, or register it on the root module or on a parameter",
                    )


def check_autocast(signature: Signature) -> None:
    """Refuses another state of automatic casting than at capture.

    Raises:
        IrcError: IRC502.
    """
    now = tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )
    if now != signature.autocast:
        raise IrcError(
            "IRC502",
            f"automatic casting is {_autocast_text(now)}; the plan was made with it "
            f"{_autocast_text(signature.autocast)}",
            help="call irc.optimize under the same torch.autocast as the training step",
        )


def _autocast_text(state: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"on for {device} with {dtype}" for device, dtype in state) or "off"


def check_arguments(signature: Signature, leaves: list[Any], tree: Any) -> None:
    """Refuses arguments that nest in another way, or whose constants differ.

    Raises:
        UsageError: IRC501.
    """
    if tree != signature.in_tree:
        raise UsageError(
            "IRC501",
            f"the arguments nest as {tree}; the plan was made for {signature.in_tree}",
            help="call the module as in the example arguments, or optimize it for this call",
        )
    for leaf, wanted in zip(leaves, signature.leaves, strict=True):
        if isinstance(wanted, Slot):
            same = isinstance(leaf, Tensor)
        else:
            same = not isinstance(leaf, Tensor) and type(leaf) is type(wanted) and leaf == wanted
        if not same:
            raise UsageError(
                "IRC501",
                f"an argument is {_shown(leaf)}; the plan was made for {_shown(wanted)}",
                help="constants are part of the plan: optimize the module for this value",
            )


def _shown(leaf: object) -> str:
    return "a tensor" if isinstance(leaf, (Tensor, Slot)) else repr(leaf)
