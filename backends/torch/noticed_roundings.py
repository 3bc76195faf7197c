"""Notes what a backward shows to be rounded otherwise than in eager, and no plan can tell before."""

# The autograd engine has no public way to its state.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...ir import Rounding, tensor_names
from .program import Program

__all__ = ["notice_layouts", "notice_other_terms", "notice_terms_after"]


def notice_layouts(program: Program, gradients: Sequence[Tensor | None]) -> None:
    """Notes each gradient of an output that comes in another layout than was planned."""
    for index, (gradient, tangent) in enumerate(zip(gradients, program.tangents, strict=True)):
        if gradient is None or tangent is None:
            continue
        axes = zip(gradient.shape, gradient.stride(), tangent.value.type.strides, strict=True)
        if any(size > 1 and own != planned for size, own, planned in axes):
            rounding = Rounding(
                f"gradients through output {index}, whose own gradient came with strides "
                f"{list(gradient.stride())} and was planned with {list(tangent.value.type.strides)}: sums "
                "run in another order; pass loss= to irc.optimize, or make it contiguous",
                program.gradients_through(index),
            )
            program.noticed_roundings[rounding] = None


def notice_other_terms(
    program: Program, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> None:
    """Notes each sum of several uses that the engine adds to what came before, where eager adds each use.

    Args:
        program: The program.
        inputs: Its static inputs.
        gradients: Those of the differentiable ones, which go to the engine.
    """
    watches = [
        _watch(program, index, inputs[index], gradient)
        for index, gradient in zip(program.differentiable, gradients, strict=True)
        if gradient is not None and index in program.several_uses and _may_add_up(inputs[index])
    ]
    if watches:  # a backward for other leaves does not reach this one
        torch.autograd.Variable._execution_engine.queue_callback(partial(_remove, watches))


def notice_terms_after(program: Program, inputs: Sequence[Tensor]) -> None:
    """Notes each gradient to which a backward adds more, once the program has added its own to `.grad`.

    Eager adds up first what a backward computes for a parameter. One other term makes no difference where
    `.grad` was not there, and nobody knows whether it is one.

    Args:
        program: The program.
        inputs: Its static inputs.
    """
    released = {released.index for released in program.released.values()}
    totals = [
        (index, total, total._version) for index in released if (total := inputs[index].grad) is not None
    ]

    def check() -> None:
        for index, total, version in totals:
            if inputs[index].grad is not total or total._version != version:
                name = program.statics[index].target
                rounding = Rounding(
                    f"the gradient of parameter {name}: eager adds up what one backward computes for it (of "
                    "another forward, a penalty) before it adds to .grad, and the plan adds at once",
                    tensor_names(program.statics)[program.statics[index].value],
                )
                program.noticed_roundings[rounding] = None

    if totals:
        torch.autograd.Variable._execution_engine.queue_callback(check)


def _may_add_up(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad  # which may have been switched off since the forward


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _watch(program: Program, index: int, leaf: Tensor, gradient: Tensor) -> RemovableHandle:
    """Looks at the sum that a leaf gets: the gradient that comes first keeps its memory."""
    data, version, backward = gradient.data_ptr(), gradient._version, torch._C._current_graph_task_id()
    apart = program.statics[index].adds_apart  # what comes after it goes to `.grad` by itself, too

    def check(total: Tensor) -> None:
        handle.remove()
        is_same = backward == torch._C._current_graph_task_id()  # one that failed may have left its hook
        if is_same and (total.data_ptr() != data or (apart and total._version != version)):
            rounding = Rounding(
                f"the gradient of {program.several_uses[index]}: eager adds its uses one by one to what else "
                "the loop adds to it (another forward, a penalty)",
                tensor_names(program.statics)[program.statics[index].value],
            )
            program.noticed_roundings[rounding] = None

    handle = leaf.register_hook(check)
    hooks = cast("dict[int, Any]", leaf._backward_hooks)
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)  # behind this one, which looks at the sum as it came
    return handle
