"""Defines fake kernels, which say what an operation returns without data, if torch's are missing or wrong."""

# The rules for tensors without data have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._functorch.vmap import lazy_load_decompositions
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses import FakeTensorMode, fake_impls
from torch._subclasses.fake_tensor import _BypassDispatchCache
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch

from ....torch_support.layouts import same_layout
from ....torch_support.pytree import tensors_of
from ....torch_support.recurrent_kernels import lstm_workspace_bytes
from .kernel_layouts import Laws, kernel_layouts

__all__ = ["fake_kernels_of_eager"]


def _ctc_loss(
    mode: Any, operation: Any, log_probs: Tensor, targets: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Losses [batch], and the table [batch, time, 2 * longest + 1] for the longest label there can be.

    Labels side by side [batch, longest] bound it by their width, labels in a row by their number. The kernel
    makes a table of the size that the labels ask for: this one or a smaller one.
    """
    with mode:
        times, batch = log_probs.shape[0], (log_probs.shape[1] if log_probs.dim() == 3 else 1)
        longest = targets.shape[-1] if targets.dim() else 0
        return log_probs.new_empty(batch), log_probs.new_empty(batch, times, 2 * longest + 1)


def _ctc_loss_backward(
    mode: Any, operation: Any, gradient: Tensor, log_probs: Tensor, *_: Any, **__: Any
) -> Tensor:
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _dropout(
    mode: Any, operation: Any, data: Tensor, rate: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    """The kernels make a result also if nothing is dropped, where torch's rule returns the operand."""
    with mode:
        return torch.empty_like(data), torch.empty_like(data, dtype=torch.bool)


def _lstm_kernel(
    mode: Any, operation: Any, x: Tensor, w: Tensor, r: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """The output [time, batch, hidden], the final states, and the workspace that backward reads."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        nbytes = lstm_workspace_bytes(*x.shape, r.shape[1], x.dtype)
    with mode:
        state = x.new_empty(x.shape[1], r.shape[1])
        output = x.new_empty(*x.shape[:2], r.shape[1])
        return output, state, torch.empty_like(state), x.new_empty(nbytes, dtype=torch.uint8)


def _lstm_kernel_backward(
    mode: Any, operation: Any, x: Tensor, w: Tensor, r: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """The gradients of the input, the weights, both biases (equal, apart), and the initial states.

    They are float32, also of numbers in half precision.
    """
    with mode:
        shapes = x.shape, w.shape, r.shape, r.shape[:1], r.shape[:1], others[2].shape, others[3].shape
        return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _grouped_mm(
    mode: Any,
    operation: Any,
    first: Tensor,
    second: Tensor,
    offsets: Tensor | None = None,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product of groups of rows and matrices, of any type, where torch's rule takes bfloat16 alone.

    The kernels begin each row at a multiple of 16 bytes.
    """
    with mode:
        groups = first.shape[:-2] if offsets is None else offsets.shape
        groups = groups if first.dim() == second.dim() else ()
        shape = (*groups, first.shape[-2], second.shape[-1])
        dtype = out_dtype or first.dtype
        step = 16 // dtype.itemsize
        row = (shape[-1] + step - 1) // step * step
        strides = (shape[-2] * row, row, 1)[-len(shape) :]
        return first.new_empty_strided(shape, strides, dtype=dtype)


_COL2IM = torch.ops.aten.col2im.default
_torch_col2im = decomposition_table[_COL2IM]


def _col2im(mode: Any, operation: Any, columns: Tensor, *sizes: Any) -> Tensor:
    """The CPU's kernel makes its result out of memory of the columns' size, which is larger."""
    with mode:
        image = _torch_col2im(columns, *sizes)
        if columns.device.type != "cpu" or columns.numel() <= image.numel():
            return image
        return columns.new_empty(columns.numel()).as_strided(image.shape, image.contiguous().stride())


_aten = torch.ops.aten
_NORMS = (
    _aten.native_layer_norm.default,
    _aten.native_group_norm.default,
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_functional.default,
)


def _mixed(operation: Any) -> Callable[..., Any]:
    """The statistics that the CPU's kernel saves of an input in half precision are of its operands' type.

    These are weight, bias and running statistics, as far as it has them.
    """
    rule = decomposition_table[operation]

    def mixed(mode: Any, _: Any, data: Tensor, *args: Any, **kwargs: Any) -> Any:
        with mode:
            results = rule(data, *args, **kwargs)
        dtype = next((each.dtype for each in args if isinstance(each, Tensor)), data.dtype)
        if data.device.type != "cpu" or dtype == data.dtype:
            return results
        with mode:
            saved = (torch.empty_like(result, dtype=dtype) for result in results[1:3])
            return (results[0], *saved, *results[3:])

    return mixed


def _bags(operation: Any) -> Callable[..., Any]:
    """The CPU's kernel makes the bags of indices, and the sizes of bags, one longer than what it returns.

    Whether it makes the bags depends on the dtype, and torch's rule forgets one that is as half precision.
    """
    rule = operation.py_kernels[torch._C.DispatchKey.Meta]

    def as_half(argument: Any) -> Any:
        if not isinstance(argument, Tensor) or argument.dtype is not torch.bfloat16:
            return argument
        half = argument.new_empty(0, dtype=torch.half)
        return half.new_empty_strided(argument.shape, argument.stride())

    def bags(mode: Any, _: Any, weight: Tensor, indices: Tensor, offsets: Tensor, *args: Any) -> Any:
        with mode:
            operands = map(as_half, (weight, indices, offsets, *args))
            result, bag_of_index, sizes, maxima = rule(*operands)
            result = result.to(weight.dtype)
            if weight.device.type == "cpu":
                if bag_of_index.numel():
                    bag_of_index = bag_of_index.new_empty(indices.numel() + 1)[:-1]
                sizes = sizes.new_empty(offsets.numel())[: sizes.numel()]
            return result, bag_of_index, sizes, maxima

    return bags


_torch_index = fake_impls.op_implementations_dict[_aten.index.Tensor]


def _index(mode: Any, operation: Any, data: Tensor, indices: list[Tensor | None]) -> Tensor:
    """The CPU's kernel lays its result out by the strides of the indices too, where torch's rule does not.

    It broadcasts indices of no axes with the others, where torch's rule leaves them out.
    """
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    is_mask = [index.dtype in (torch.bool, torch.uint8) for index in tensors]
    if not tensors or any(is_mask):  # the number of elements depends on the data of masks
        return _torch_index(mode, operation, data, indices)
    with mode:
        spread = [index.long() for index in torch.broadcast_tensors(*tensors)]
        places = dict(zip(axes, spread, strict=True))
        result: Tensor = _torch_index(mode, operation, data, [places.get(k) for k in range(len(indices))])
        if result.device.type != "cpu":
            return result
        before = axes[0] if axes[-1] - axes[0] < len(axes) else 0
        others = [step for axis, step in enumerate(data.stride()) if axis not in axes]
        steps = (*others[:before], *[0] * spread[0].dim(), *others[before:])
        shape = (*[1] * before, *spread[0].shape, *[1] * (len(others) - before))
        operands = [torch.empty_strided(result.shape, steps, dtype=torch.long, device=result.device)]
        operands += [index.reshape(shape).expand(result.shape) for index in spread]
        strides = compute_elementwise_output_strides(*operands)
        is_laid_out = same_layout(result, strides)
        return result if is_laid_out else result.new_empty_strided(tuple(result.shape), strides)


def _attention(operation: Any) -> Callable[..., Any]:
    """The rule of torch for attention on a GPU, with the results on the devices where the kernel leaves them.

    Some kernels return the seed and offset of their dropout on the CPU, and read them there in backward.
    """
    rule = operation.py_kernels[torch._C.DispatchKey.Meta]

    def attention(mode: Any, _: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        devices = _devices_of_results(operation, query.device, query.dtype, int(query.shape[-1]))
        with mode:
            results: list[Any] = list(rule(query, *args, **kwargs))
            for place, result in enumerate(results):
                device = devices.get(place, query.device)
                if isinstance(result, Tensor) and result.device != device:
                    results[place] = torch.empty_strided(
                        result.shape, result.stride(), dtype=result.dtype, device=device
                    )
            return tuple(results)

    return attention


@functools.cache
def _devices_of_results(
    operation: Any, device: torch.device, dtype: torch.dtype, width: int
) -> dict[int, torch.device]:
    """The devices of an attention's results, by their places, as a run on a few numbers shows them."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return {}
    extra = [] if operation is _aten._scaled_dot_product_flash_attention.default else [None, True]
    with no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        data = torch.zeros(1, 1, 8, width, dtype=dtype, device=device)
        try:
            results = operation(data, data, data, *extra)
        except RuntimeError:
            return {}
    return {place: result.device for place, result in enumerate(results) if isinstance(result, Tensor)}


_ATTENTIONS = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)

_BAGS = (_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)

_RULES: dict[Any, Callable[..., Any]] = {
    **{operation: _attention(operation) for operation in _ATTENTIONS},
    **{operation: _mixed(operation) for operation in _NORMS},
    **{operation: _bags(operation) for operation in _BAGS},
    _COL2IM: _col2im,
    _aten.index.Tensor: _index,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    torch.ops.aten._ctc_loss_backward.default: _ctc_loss_backward,
    torch.ops.aten.native_dropout.default: _dropout,
    _aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten.mkldnn_rnn_layer.default: _lstm_kernel,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _lstm_kernel_backward,
}


class _LengthsAsTensors(TorchFunctionMode):
    """Gives the CTC loss its lengths as tensors: torch's tracer fails on lists of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.ctc_loss, torch.ctc_loss):
            lengths = (torch.tensor(n) if isinstance(n, (list, tuple)) else n for n in args[2:4])
            args = (*args[:2], *lengths, *args[4:])
        return func(*args, **(kwargs or {}))


_NOTED: Any = {}
"""Torch's notes of results under these rules, apart from those under its own."""


@contextlib.contextmanager
def fake_kernels_of_eager(laws: Laws | None = None) -> Generator[None]:
    """Puts these fake kernels before torch's own.

    Args:
        laws: As of `kernel_layouts`.
    """
    _read_by_torch()
    rules = fake_impls.op_implementations_dict
    with (
        patch.object(FakeTensorMode, "cache", _NOTED if laws is None else {}),
        _without(rules, _RULES),
        _without(decomposition_table, _RULES),
        kernel_layouts(laws),
        _caching_whole_storages_alone(),
        _LengthsAsTensors(),
    ):
        rules.update(_RULES)
        yield


def _caching_whole_storages_alone() -> contextlib.AbstractContextManager[Any]:
    """Keeps results in larger storages than their own numbers need out of torch's cache of fake results.

    Torch makes a result that it takes from there anew, by its strides alone.
    """
    modes: Any = FakeTensorMode
    before: Callable[..., Any] = modes._make_cache_entry

    def make_entry(mode: Any, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if not getattr(func, "is_view", False):
            results = [t for t in tensors_of(output) if all(t is not operand for operand in args)]
            if any(map(_has_room, results)):
                raise _BypassDispatchCache("a storage larger than its tensor")
        return before(mode, state, key, func, args, kwargs, output)

    return patch.object(modes, "_make_cache_entry", make_entry)


def _has_room(tensor: Tensor) -> bool:
    """Whether a tensor's storage is larger than the strides ask for; no symbol is decided for that."""
    if tensor.layout is not torch.strided or type(nbytes := tensor.untyped_storage().nbytes()) is not int:
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
    return nbytes > reach * tensor.element_size()


def _read_by_torch() -> None:
    """Lets torch's transforms read the table of rules, which they do once, while it is whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._decomp.decompositions_for_jvp")
        lazy_load_decompositions()


@contextlib.contextmanager
def _without(table: dict[Any, Any], keys: Iterable[Any]) -> Generator[None]:
    """Hides the entries of these keys in a table."""
    before = {key: table.pop(key) for key in keys if key in table}
    try:
        yield
    finally:
        for key in keys:
            table.pop(key, None)
        table.update(before)
