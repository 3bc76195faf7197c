"""The arguments of a step of a pipeline: split into micro-batches, and held to what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...backends.torch.guards.module_state import is_equal
from ...frontends.torch import Captured
from ...ir import Graph, Input, InputRole, Slot, UsageError
from ...torch_support.autocast import autocast_state
from ...torch_support.pytree import flatten, flatten_arguments

__all__ = ["PlannedCall", "batch_of", "check_tensors", "micro_batches_of"]

_HELP = "call it as it was planned, or plan again"


def batch_of(args: Sequence[Any]) -> int:
    """The first dimension of the first tensor that has one; 0 if there is none."""
    leaves = flatten(tuple(args))[0]
    sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    return next(sizes, 0)


def micro_batches_of(args: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """The arguments of each micro-batch: tensors with the batch as their first dimension are split.

    Args:
        args: Of a whole batch. The first dimension of the first tensor is the batch; other arguments are the
            same for all micro-batches.
        count: How many micro-batches.

    Raises:
        UsageError: IRC487 when the batch does not divide, or there is none.
    """
    leaves, tree = flatten(tuple(args))
    batch = batch_of(args)
    if not batch or batch % count:
        raise UsageError(
            "IRC487",
            f"a batch of {batch or 'no size'} does not divide into {count} micro-batches",
            help="give a batch that is a multiple of the number of micro-batches (drop_last=True of a "
            "DataLoader)",
        )
    size = batch // count
    parts: list[Sequence[Any]] = [
        leaf.split(size)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
        else (leaf,) * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([part[k] for part in parts], tree) for k in range(count)]


@dataclass(frozen=True)
class PlannedCall:
    """The call that the pipeline was planned for.

    Args:
        model: What was planned.
        captured: One micro-batch of it.
    """

    model: nn.Module
    captured: Captured

    def check(self, micro_batch: tuple[Any, ...]) -> None:
        """Refuses a call that the stages do not compute.

        Raises:
            UsageError: IRC490.
        """
        signature = self.captured.signature
        leaves, tree = flatten_arguments((micro_batch, {}))
        if tree != signature.in_tree:
            raise UsageError(
                "IRC490",
                "the arguments nest otherwise than at planning",
                help=_HELP,
            )
        for leaf, wanted in zip(leaves, signature.leaves, strict=True):
            if isinstance(wanted, Slot) or isinstance(leaf, Tensor):
                same = isinstance(wanted, Slot) and isinstance(leaf, Tensor)
            else:
                same = leaf is wanted or (type(leaf) is type(wanted) and is_equal(leaf, wanted))
            if not same:
                shown = "a tensor" if isinstance(wanted, Slot) else repr(wanted)[:80]
                raise UsageError(
                    "IRC490",
                    f"an argument is {_shown(leaf)}; it was {shown} at planning",
                    help=_HELP,
                )
        if autocast_state() != signature.autocast:
            raise UsageError("IRC490", "autocast is not as it was when the pipeline was planned", help=_HELP)
        for name, is_training in signature.modes:
            if self.model.get_submodule(name).training != is_training:
                mode = "train()" if is_training else "eval()"
                raise UsageError("IRC490", f"module {name or 'itself'} is no longer in {mode}", help=_HELP)
        for entry in self.captured.graph.inputs:
            if entry.role is InputRole.PARAMETER:
                parameter = self.model.get_parameter(entry.target)
                if parameter.requires_grad != entry.requires_grad:
                    raise UsageError(
                        "IRC490", f"requires_grad of parameter {entry.target} has changed", help=_HELP
                    )


def check_tensors(tensors: Sequence[Tensor], graphs: Sequence[Graph], own: Sequence[int]) -> None:
    """Refuses tensors of other types than planned.

    Args:
        tensors: The tensor arguments of a micro-batch.
        graphs: Of all stages.
        own: The stages of this rank; what these do not read may be on another device.

    Raises:
        UsageError: IRC487.
    """
    for stage, graph in enumerate(graphs):
        for entry in graph.inputs:
            if entry.role is not InputRole.INPUT:
                continue
            index = int(entry.target)
            found = tensors[index] if index < len(tensors) else None
            if found is None or _type_of(found, stage in own) != _planned_type(entry, stage in own):
                shown = "missing" if found is None else _type_of(found, stage in own)
                raise UsageError(
                    "IRC487",
                    f"input {index} of a micro-batch is {shown}; the pipeline was planned for "
                    f"{_planned_type(entry, stage in own)}",
                    help="give batches of the planned size and type (drop_last=True of a DataLoader), or "
                    "plan again",
                )


def _type_of(tensor: Tensor, is_read: bool) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _text(dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type if is_read else None)


def _planned_type(entry: Input, is_read: bool) -> str:
    type = entry.value.type
    device = type.device.split(":")[0] if is_read else None
    return _text(type.dtype.value, type.shape, type.strides, device)


def _text(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], device: str | None) -> str:
    """A type; strides are shown if they are not those of a contiguous tensor, and matter."""
    steps = tuple(step for size, step in zip(shape, strides, strict=True) if size > 1)
    expected, plain = 1, list[int]()
    for size in reversed([size for size in shape if size > 1]):
        plain.insert(0, expected)
        expected *= size
    layout = "" if list(steps) == plain or 0 in shape else f" with strides {list(strides)}"
    return f"{dtype}{list(shape)}{layout}{'' if device is None else f' on {device}'}"


def _shown(leaf: object) -> str:
    return "a tensor" if isinstance(leaf, Tensor) else repr(leaf)[:80]
