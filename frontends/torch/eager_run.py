"""Runs a step of a model as it is written, on tensors without data, and follows the bytes that are alive."""

# The autograd engine and torch's tensors without data have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree

from ...ir import EagerMemory, OperandKind, OperationKind
from ...torch_support.allocated import dense_parts
from ...torch_support.autocast import without_autocast
from .alive_bytes import AliveBytes, following_states
from .dry_run import dry_run
from .fixups.fake_kernels import fake_kernels_of_eager
from .fixups.foreign_writes import ForeignWrites
from .fixups.recurrent import RecurrentLayers
from .fixups.sparse_bags import BAG_BACKWARD, bag_backward
from .fixups.value_checks import PassedChecks
from .loss import Loss
from .results import flattened

__all__ = ["eager_memory"]


class _Followed(AliveBytes):
    """Follows the bytes of a step, and the most of them that are alive at each kind of operation.

    Args:
        mode: The mode that makes tensors without data of all others.
        device_type: The type of the device whose bytes count.
    """

    def __init__(self, mode: FakeTensorMode, device_type: str) -> None:
        super().__init__()
        self.mode = mode
        self.device_type = device_type
        self.alive_at: dict[OperationKind, int] = {}
        self.alive_without_unused: dict[OperationKind, int] = {}
        """The same without what a caller drops before backward."""
        self._droppable = set[int]()
        self._dropped_bytes = 0
        """The bytes that a caller who holds all outputs still holds, and that are not alive any more."""
        self.reads_others = False
        """Whether it has read a tensor with data that requires a gradient, as a parameter of the loss."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the engine asks after each operation of backward
            return func(*args, **(kwargs or {}))
        with _answering(FakeTensor):  # torch's rules ask too
            return self._follow_operation(func, types, args, kwargs)

    def _follow_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is BAG_BACKWARD and args[9]:  # of a sparse gradient
            with self:
                return bag_backward(*args, in_place=True)
        if func is torch.ops.aten.clone.default and args[0].layout is torch.sparse_coo:
            with self:
                return _accumulated(args[0])
        read = list({id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values())
        read = [part for tensor in read for part in dense_parts(tensor)]
        for tensor in read:
            has_data = type(tensor) in (Tensor, nn.Parameter)
            self.reads_others |= has_data and tensor.requires_grad
            fake = self.mode.from_tensor(tensor) if has_data else tensor
            if not self.is_known(fake):
                self.ignore(fake)
        kind = str(func), tuple(map(_described, read))
        if not _writes_gradients(func):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self._note(kind)
            return result
        self._note(kind)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def follow(self, tensor: Tensor, least_bytes: int = 0) -> None:
        if tensor.device.type == self.device_type:
            super().follow(tensor, least_bytes)
        else:
            self.ignore(tensor)

    def expect_drops(self, tensors: Sequence[Tensor]) -> None:
        """Counts the storages of these tensors for a caller who holds them, also when they are not alive."""
        self._droppable = {tensor.untyped_storage()._cdata for tensor in tensors}

    def died(self, key: int, nbytes: int) -> None:
        super().died(key, nbytes)
        if key in self._droppable:  # a later storage may lie at the same address
            self._droppable.remove(key)
            self._dropped_bytes += nbytes

    def _note(self, kind: OperationKind) -> None:
        without = self.alive_without_unused
        without[kind] = max(without.get(kind, 0), self.alive_bytes)
        self.alive_at[kind] = max(self.alive_at.get(kind, 0), self.alive_bytes + self._dropped_bytes)


def _described(tensor: Tensor) -> OperandKind:
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    return shape, str(tensor.dtype).removeprefix("torch."), strides


def _accumulated(gradient: Tensor) -> Tensor:
    """A sparse `.grad`, of which torch's rule keeps no elements. Outside of modes it is a copy if strided."""
    parts = dense_parts(gradient)
    is_strided = not all(part.is_contiguous() for part in parts)
    indices, values = (part.clone() if is_strided else part for part in parts)
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False)


class _NoTensor:
    """The class of no tensor."""


@contextlib.contextmanager
def _answering(kind: type) -> Generator[None]:
    """Meanwhile, code that asks torch for the class of tensors without data is given this one.

    Libraries then run as they do on data, where they would avoid reading a value.
    """
    package: Any = torch._subclasses
    before = package.FakeTensor
    package.FakeTensor = kind
    try:
        yield
    finally:
        package.FakeTensor = before


_IN_PLACE = (torch.ops.aten.add.Tensor, torch.ops.aten.scatter.src, torch.ops.aten.index_put.default)


def _writes_gradients(func: Any) -> bool:
    """Whether autograd adds to a gradient that is there, or writes into zeros: in place if no mode is active.

    The forward that a checkpoint runs again has gradients enabled, and the backward of a function in Python
    is called by torch's own.
    """
    is_engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    if not is_engine or func not in _IN_PLACE:
        return False
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return False
        frame = frame.f_back
    return True


def eager_memory(
    call: Callable[..., Any],
    module: nn.Module,
    tensors: Sequence[Tensor],
    loss: Loss | None,
    *,
    unused: Set[int],
    static_bytes: int,
    loss_bytes: tuple[int, int],
    around: Callable[[], AbstractContextManager[None]],
) -> EagerMemory | None:
    """Returns the memory of a step of `module`; None if it does not run on tensors without data.

    Nothing is computed, and no gradient or buffer of the module changes.

    Args:
        call: The forward, from `tensors` to the result.
        module: The model.
        tensors: The tensors among its arguments.
        loss: The function from its result to the loss. None if it is not known: then its gradients are there
            until backward has ended.
        unused: The places of the tensors of the result that the loss does not use.
        static_bytes: Parameters, buffers, inputs and constants.
        loss_bytes: What a loss that is not known takes at its peak, and until backward has ended.
        around: Makes a context for forward and backward, in which a checkpoint runs parts of forward again.
    """
    for kind in (_NoTensor, FakeTensor):
        try:
            with _answering(kind):
                return _followed(call, module, tensors, loss, unused, static_bytes, loss_bytes, around)
        except Exception:  # what the capture traces in another way may not run in this one
            continue
    return None


def _followed(
    call: Callable[..., Any],
    module: nn.Module,
    tensors: Sequence[Tensor],
    loss: Loss | None,
    unused: Set[int],
    static_bytes: int,
    loss_bytes: tuple[int, int],
    around: Callable[[], AbstractContextManager[None]],
) -> EagerMemory:
    """Runs the step once."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    types = {tensor.device.type for tensor in (*module.parameters(), *module.buffers(), *tensors)}
    followed = _Followed(mode, next(iter(types - {"cpu"}), "cpu"))
    at_loss = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(
            torch.autograd.set_detect_anomaly(False)
        )  # it reads gradients, which have no data
        stack.enter_context(RecurrentLayers(writes_in_place=True))
        stack.enter_context(fake_kernels_of_eager())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        state = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        fakes: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in state}
        given = [mode.from_tensor(tensor) for tensor in tensors]
        leaves = list({id(t): t for t in (*fakes.values(), *given) if t.requires_grad and t.is_leaf}.values())
        for leaf in leaves:
            leaf.grad = None  # a step starts without: else it would add to what nothing counts
        stack.enter_context(stateless._reparametrize_module(module, fakes))
        stack.enter_context(mode)
        stack.enter_context(ForeignWrites(mode))
        stack.enter_context(PassedChecks())
        stack.enter_context(followed)
        stack.enter_context(following_states(followed))
        stack.enter_context(around())
        result = call(*given)
        outputs = [leaf for leaf in flattened(result)[0] if isinstance(leaf, Tensor)]
        if loss is None:
            roots = list({id(o): o for o in outputs if o.requires_grad}.values())
            gradients = [torch.empty_like(root) for root in roots]
            at_loss = followed.alive_bytes + loss_bytes[0]
            followed.alive_bytes += loss_bytes[1]
        else:
            stack.enter_context(dry_run(loss))  # until its hooks have run in backward
            roots, gradients = [loss(result)], None
        followed.expect_drops(outputs)
        used = [leaf for k, leaf in enumerate(outputs) if leaf.requires_grad and k not in unused]
        del result, outputs
        # as at the end of autocast, which is before backward
        torch.clear_autocast_cache()
        stack.enter_context(without_autocast())
        # a checkpoint with another backward takes no list of leaves; others must get no gradient without data
        torch.autograd.backward(roots, gradients, inputs=leaves if followed.reads_others else None)
        del used  # which the caller holds until here
    return EagerMemory(static_bytes, at_loss, followed.alive_at, followed.alive_without_unused)
