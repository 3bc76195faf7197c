"""Runs a caller's loss and its backward once, on made-up outputs, and measures the memory that they take."""

# The schemas of operations, and the numbers of storages, have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ...ir import allocation_bytes
from ...torch_support.allocated import allocated_bytes
from ...torch_support.autocast import without_autocast
from ...torch_support.autograd_graph import leaf_of, nodes_behind
from .alive_bytes import AliveBytes
from .dry_run import dry_run
from .fixups.tangent_layouts import is_expanded
from .loss_terms import number_bytes

__all__ = ["Arriving", "LossTrace", "Measure", "as_result", "gradients_of", "measured_bytes"]


class _Level(Protocol):
    """The allocator's level in one run, above the one before: the highest, and the one that is left."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def left_bytes(self) -> int: ...


Measure = Callable[[Iterable[Callable[[], Any]], str, int], Sequence[_Level] | None]
"""Finds the levels of a device's allocator in each of some runs, the results of which are held until it ends.

It is also given the bytes that the largest run touches; it returns None if there is no room for them."""


_SIZED_BY_VALUES = {torch.ops.aten._ctc_loss}
"""Operations whose results are as large as values ask for: traced, they have the largest size."""


_WRITING_UNSAID = {
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.miopen_batch_norm,
}
"""Operations that write running statistics in training, which their schemas do not say."""


class LossTrace(AliveBytes):
    """Follows the bytes of a loss, and whether it can run on data beside the steps without a trace.

    It cannot if it writes into tensors that it did not make, draws from a generator of the user's, or
    exchanges tensors with other processes. What it takes must not depend on values either.

    Args:
        mode: The mode that makes tensors without data of those that have data.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.can_run = True
        self.foreign: dict[int, Tensor] = {}
        """The stand-ins of tensors that have data, by their storages: views of them have the same."""
        self.number_bytes = 0
        """The bytes of the numbers that functions may keep for backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if type(tensor) in (Tensor, nn.Parameter):
                self._note_foreign(self.mode.from_tensor(tensor))
        if isinstance(func, OpOverload) and self._is_for_steps_alone(func, args, kwargs or {}):
            self.can_run = False
        self.number_bytes += number_bytes(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_foreign(self, stand_in: Tensor) -> None:
        if not self.is_known(stand_in):
            self.ignore(stand_in)
            self.foreign[stand_in.untyped_storage()._cdata] = stand_in

    def _is_foreign(self, tensor: object) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        if type(tensor) in (Tensor, nn.Parameter):
            return True
        return tensor.untyped_storage()._cdata in self.foreign

    def _is_for_steps_alone(self, func: OpOverload, args: Any, kwargs: Any) -> bool:
        if "c10d" in func.namespace or func.overloadpacket in _SIZED_BY_VALUES:
            return True
        given = {a.name: arg for a, arg in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = [
            given.get(a.name)
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if func.overloadpacket in _WRITING_UNSAID and given["training"]:
            written.append(given["running_mean"])
        writes = any(map(self._is_foreign, pytree.tree_leaves(written)))
        return writes or any(isinstance(arg, torch.Generator) for arg in given.values())


def measured_bytes(
    loss: Callable[[Any], Tensor], leaves: list[Any], tree: Any, measure: Measure, touched_bytes: int
) -> tuple[int, int, int] | None:
    """Measures what `loss_bytes` returns. None if the loss does not run on made-up outputs.

    Numbers between 0.1 and 1 stand for those of floating-point outputs, and 0 for all others.

    Args:
        loss: The loss.
        leaves: The leaves of the module's result as traced; only the tensors' types are looked at.
        tree: The nesting of the leaves.
        measure: Measures runs.
        touched_bytes: The bytes of the outputs, their gradients and the loss, about.
    """
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    if len(devices) != 1 or (device := devices.pop()).type not in ("cpu", "cuda"):
        return None
    steps = _Steps(loss, leaves, tree)
    drawn_on = [device] if device.type == "cuda" else []
    try:
        with dry_run(loss), torch.enable_grad(), torch.random.fork_rng(devices=drawn_on):
            levels = measure(steps.runs(), str(device), touched_bytes)
    except Exception:  # values that were made up may be none that the loss takes
        return None
    if levels is None:
        return None
    step, forward = levels
    return *steps.arriving.beyond(step.peak_bytes, step.left_bytes), forward.left_bytes


class _Steps:
    """Runs a loss, with and without its backward.

    Attributes:
        arriving: The gradients of the outputs, once a run has begun.
    """

    def __init__(self, loss: Callable[[Any], Tensor], leaves: list[Any], tree: Any) -> None:
        self.loss = loss
        self.leaves = leaves
        self.tree = tree
        self.arriving = Arriving()

    def runs(self) -> Iterator[Callable[[], Any]]:
        """Yields a run with the backward and one without; kernels are chosen before, in one more run."""
        made = {id(leaf): _made_up(leaf) for leaf in self.leaves if isinstance(leaf, Tensor)}
        outputs = [output for output in made.values() if output.requires_grad]

        def forward() -> tuple[Tensor, Tensor]:
            torch.clear_autocast_cache()  # a region of autocast begins and ends with none
            scalar = self.loss(as_result([made.get(id(x), x) for x in self.leaves], self.tree))
            torch.clear_autocast_cache()
            return scalar, torch.ones_like(scalar)

        def step() -> Any:
            scalar, seed = forward()
            return scalar, seed, gradients_of(scalar, outputs, seed)

        self.arriving = Arriving.of(step()[2], outputs)
        yield step
        yield forward


@dataclass(frozen=True)
class Arriving:
    """The gradients of outputs, as a loss makes them and as a graph counts them.

    Args:
        counted_bytes: The bytes that the graph counts for them.
        taken_bytes: The bytes of those that are handed on as they are, perhaps as parts of a larger storage.
            An expanded one is copied after the loss, and stays with the caller.
    """

    counted_bytes: int = 0
    taken_bytes: int = 0

    @staticmethod
    def of(gradients: Iterable[Tensor | None], outputs: Iterable[Tensor]) -> Arriving:
        """Looks at the gradients of outputs, and not at others after them.

        None is that of an output that the loss does not use.
        """
        counted_bytes, parts_of = 0, dict[int, tuple[int, int]]()
        for gradient, output in zip(gradients, outputs, strict=False):
            if gradient is None:
                continue
            dense_bytes = allocation_bytes(output.numel() * output.element_size(), str(output.device))
            nbytes = min(dense_bytes, allocated_bytes(output))
            counted_bytes += nbytes
            if not is_expanded(gradient.shape, gradient.stride()):
                storage = gradient.untyped_storage()._cdata
                others_bytes = parts_of.get(storage, (0, 0))[1]
                parts_of[storage] = allocated_bytes(gradient), others_bytes + nbytes
        return Arriving(counted_bytes, sum(map(min, parts_of.values())))

    def beyond(self, peak_bytes: int, left_bytes: int) -> tuple[int, int]:
        """Returns what a loss takes beyond them.

        Args:
            peak_bytes: The most that is alive during the loss and its backward.
            left_bytes: The bytes that are alive after them, with the gradients.

        Returns:
            Bytes at its peak, and bytes that stay.
        """
        held_bytes = max(left_bytes - self.taken_bytes, 0)
        return max(peak_bytes - self.counted_bytes, held_bytes), held_bytes


def as_result(leaves: list[Any], tree: Any) -> Any:
    """A result as a module returns it: its tensors are not leaves of autograd, whose casts autocast keeps."""
    views = {id(leaf): leaf.view_as(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    return pytree.tree_unflatten([views.get(id(leaf), leaf) for leaf in leaves], tree)


def gradients_of(scalar: Tensor, outputs: Sequence[Tensor], seed: Tensor) -> Sequence[Tensor | None]:
    """The gradients that the backward of a loss makes: of outputs, and then of parameters of the loss."""
    known = set(map(id, outputs))
    leaves = map(leaf_of, nodes_behind([scalar.grad_fn]))
    parameters = [leaf for leaf in leaves if leaf is not None and id(leaf) not in known]
    with without_autocast():  # which ends before backward
        return torch.autograd.grad(scalar, [*outputs, *parameters], seed, allow_unused=True)


def _made_up(leaf: Tensor) -> Tensor:
    reach = 1 + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
    flat = torch.zeros(int(reach) if leaf.numel() else 0, dtype=leaf.dtype, device=leaf.device)
    if leaf.dtype.is_floating_point and leaf.dtype.itemsize > 1:
        flat.uniform_(0.1, 1.0, generator=torch.Generator(leaf.device).manual_seed(0))
    made = flat.as_strided(tuple(leaf.shape), tuple(leaf.stride()))
    return made.requires_grad_(leaf.dtype.is_floating_point)
