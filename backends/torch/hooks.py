"""Refuses hooks that a planned step would not call, or would call without a gradient."""

# torch keeps these hooks in private tables.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...ir import UnsupportedError
from ...torch_support.module_hooks import (
    has_hooks,
    hooks_of,
    is_of_distributed,
    modules_of_hook,
    name_of_hook,
)
from ...torch_support.recorders import is_recorder
from .guards.hook_state import HookState
from .program import Program
from .refuse_wrappers import refuse_wrapped_parts

__all__ = [
    "refuse_hooks",
    "refuse_hooks_of",
    "refuse_missing_for_hooks",
    "refuse_missing_gradients",
    "refuse_saved_tensor_hooks",
]

_PACKAGE = __name__.partition(".backends.")[0]
_TABLES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_WATCHERS = ("torch.utils.", f"{_PACKAGE}.frontends.")
"""Global hooks of these modules only record which module runs, such as those of `FlopCounterMode`."""


def refuse_hooks(root: nn.Module) -> None:
    """Refuses hooks and wrappers of submodules that no graph can hold: a planned step does not call them.

    Other hooks on submodules are traced with the forward, if they compute. Hooks that only record what
    submodules return (`torch_support/recorders.py`) are, unless a module around this one records.

    Raises:
        UnsupportedError: IRC505; IRC532 for hooks on all modules; IRC534 for wrappers.
    """
    named = dict(root.named_modules())
    names, submodules = tuple(named)[1:], tuple(named.values())[1:]
    refuse_hooks_of(root, names, submodules)
    HookState(root, names, submodules).refuse_uncompared()


def refuse_hooks_of(root: nn.Module, names: Sequence[str], submodules: Sequence[nn.Module]) -> None:
    """Does what `refuse_hooks` does, for submodules and names that are known already.

    Raises:
        UnsupportedError: As `refuse_hooks`.
    """
    _refuse_global_hooks(root)
    _refuse_root_hooks(root)
    refuse_wrapped_parts(root, names, submodules)
    for name, child in zip(names, submodules, strict=True):
        if has_hooks(child):
            _refuse_hooks_on(child, name)


def _refuse_hooks_on(child: nn.Module, name: str) -> None:
    for table, _, hook in hooks_of(child):
        if is_recorder(hook):
            raise UnsupportedError(
                "IRC505",
                f"submodule {name!r} records its outputs for a module around this one",
                help="call irc.optimize with that module",
            )
        if is_of_distributed(hook):
            raise UnsupportedError(
                "IRC505",
                f"submodule {name!r} has a hook of torch's ({name_of_hook(table, hook)}), which a planned "
                "step would not call",
                help="call irc.optimize with the plain module, and shard the fitted one",
            )
        if table == "_backward_hooks" and child._is_full_backward_hook is False:
            raise _legacy(f"submodule {name!r}")


def _refuse_global_hooks(root: nn.Module) -> None:
    """Refuses hooks on all modules if there are submodules, which a planned step does not call.

    Raises:
        UnsupportedError: IRC532.
    """
    tables = vars(torch.nn.modules.module)
    if tables["_global_backward_hooks"] and tables["_global_is_full_backward_hook"] is False:
        raise _legacy("all modules")
    if not any(tables[table] for table in _TABLES) or not root._modules:
        return
    for table in _TABLES:
        for hook in tables[table].values():
            if not modules_of_hook(hook)[0].startswith(_WATCHERS):
                kind = table.removeprefix("_global_").replace("_", " ")
                raise UnsupportedError(
                    "IRC532",
                    f"there is a hook on all modules ({kind}: {hook!r}), which a planned step would not call "
                    "for submodules",
                    help="remove it while the fitted module trains, or register it on the root module",
                )


def _refuse_root_hooks(root: nn.Module) -> None:
    """Refuses hooks on the root that depend on the operations of its forward.

    Raises:
        UnsupportedError: IRC532 for a hook that computes weights before each forward, as a plan begins after
            it; and for a hook on the last operation, as a planned step has one operation.
    """
    if root._backward_hooks and root._is_full_backward_hook is False:
        raise _legacy("the root module")
    for hook in root._forward_pre_hooks.values():
        if any(module.startswith("torch.nn.utils.") for module in modules_of_hook(hook)):
            raise UnsupportedError(
                "IRC532",
                f"a hook of the root module computes its weights before each forward ({type(hook).__name__})",
                help="use torch.nn.utils.parametrizations, or wrap the module: torch.nn.Sequential(module)",
            )


def _legacy(owner: str) -> UnsupportedError:
    return UnsupportedError(
        "IRC532",
        f"register_backward_hook() put a hook on {owner}; it sees only the last operation of the forward, "
        "which in a planned step is the whole forward",
        help="use register_full_backward_hook()",
    )


def refuse_missing_gradients(
    node: Any, program: Program, inputs: Sequence[Tensor], given: frozenset[int]
) -> None:
    """Refuses a backward that would call a hook of a tensor without a gradient.

    The node of a planned step leads to all parameters. A parameter whose gradient comes only from outputs
    that the loss does not use gets no gradient, and eager does not call its hooks.

    Args:
        node: The autograd node that runs.
        program: The program whose backward it runs.
        inputs: The static inputs of that step.
        given: The outputs that the loss uses.

    Raises:
        UnsupportedError: IRC537.
    """
    missing = dict[int, int]()
    for position, index in enumerate(program.differentiable):
        gradient = program.gradients[index]
        depends = program.depends[gradient] if gradient is not None else frozenset[int]()
        if depends and not depends & given:
            missing[index] = position
    arriving = {id(inputs[index]) for index in program.differentiable if index not in missing}
    for index, position in missing.items():
        tensor = inputs[index]
        hooks = [*(tensor._backward_hooks or {}).values(), *_accumulate_hooks(tensor)]
        if hooks and id(tensor) not in arriving and _is_asked(node.next_functions[position][0]):
            static = program.statics[index]
            raise UnsupportedError(
                "IRC537",
                f"{static.role.value} {static.target} has a hook ({hooks[0]!r}), and no gradient: the loss "
                "uses none of the outputs that it comes from",
                help="remove the hook, or let the module return only what the loss uses",
            )


def refuse_missing_for_hooks(reaching_hooks: Iterable[frozenset[int]], given: frozenset[int]) -> None:
    """Refuses a backward in which a hook within the forward would be given zeros, and by eager nothing.

    Args:
        reaching_hooks: For each gradient that such a hook sees, the outputs that it comes from.
        given: The outputs that the loss uses.

    Raises:
        UnsupportedError: IRC537.
    """
    for outputs in reaching_hooks:
        if not outputs & given:
            raise UnsupportedError(
                "IRC537",
                "the forward has a hook on gradients, and the loss uses none of the outputs that one of them "
                f"comes from ({', '.join(map(str, sorted(outputs)))}): eager has none there",
                help="give irc.optimize loss= the function by which the training loop computes its loss from "
                "the result, or let the module return only what the loss uses",
            )


def _accumulate_hooks(tensor: Tensor) -> list[Any]:
    found: Any = tensor._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    return list((found or {}).values())


def _is_asked(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() asks for this very gradient
        return True


def refuse_saved_tensor_hooks() -> None:
    """Refuses hooks on saved tensors: autograd does not see the tensors that a planned step saves.

    Raises:
        UnsupportedError: IRC535.
    """
    found: Any = vars(torch._C)["_autograd"]._top_saved_tensors_default_hooks(True)
    if found is not None:
        raise UnsupportedError(
            "IRC535",
            f"a planned step runs under hooks on saved tensors ({found[0]!r}), which would see nothing of it",
            help="call the fitted module outside of torch.utils.checkpoint, save_on_cpu and "
            "saved_tensors_hooks; its plan decides which tensors are kept",
        )
