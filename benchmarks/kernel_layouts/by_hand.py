"""Calls of operations of which torch has no sample, and that need arguments which fit together."""

# Operations that nobody calls by themselves have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["run_all"]

_aten = torch.ops.aten


def _image() -> Tensor:
    return torch.rand(2, 3, 6, 6)


def _two_images() -> tuple[Tensor, Tensor]:
    return _image() - 0.5, _image()


def _kernel() -> Tensor:
    return torch.rand(4, 3, 3, 3)


def _sparse() -> Tensor:
    return torch.rand(3, 4).round().to_sparse().coalesce()


def _trained(layer: nn.Module, x: Tensor) -> None:
    result = layer(x.requires_grad_())
    (result[0] if isinstance(result, tuple) else result).square().sum().backward()


def _without_onednn(call: Callable[[], object]) -> Callable[[], object]:
    def called() -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            call()

    return called


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)])


_CALLS: tuple[Callable[[], object], ...] = (
    lambda: torch.sparse.addmm(torch.rand(3, 3), _sparse(), torch.rand(4, 3)),
    lambda: _aten.affine_grid_generator(torch.rand(2, 2, 3), [2, 3, 4, 4], False),
    lambda: _aten._is_all_true(torch.rand(3, 4) > 0.5),
    lambda: _aten._is_any_true(torch.rand(3, 4) > 0.5),
    lambda: torch.conv_tbc(torch.rand(6, 2, 3), torch.rand(3, 3, 4), torch.rand(4)),
    lambda: _aten.div.Scalar_mode(torch.rand(2, 3, 4), 2.0, rounding_mode="floor"),
    lambda: (_sparse().indices(), _sparse().values()),
    lambda: (_sparse()._indices(), _sparse()._values(), torch.rand(3, 4).to_sparse().coalesce()),
    lambda: _sparse().to_dense(),
    lambda: (torch.rand(3, 4).to_sparse_csr().crow_indices(), torch.rand(3, 4).to_sparse_csr().col_indices()),
    lambda: (torch.rand(3, 4).to_sparse_csc().ccol_indices(), torch.rand(3, 4).to_sparse_csc().row_indices()),
    lambda: torch.rand(3, 4).to_sparse_csr().values(),
    lambda: torch.sparse_csr_tensor([0, 1, 2], [0, 1], torch.rand(2), (2, 2)),
    lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.rand(2), (2, 2)),
    lambda: torch.sparse.sum(_sparse(), 0),
    lambda: torch.sparse.softmax(_sparse(), 0),
    lambda: torch.sparse.log_softmax(_sparse(), 0),
    lambda: torch.sparse.mm(_sparse(), _sparse().t()),
    lambda: _aten._unsafe_index(torch.rand(3, 4, 5), [torch.tensor([[0, 1]]), None]),
    lambda: _aten._unsafe_index_put(torch.rand(3, 4), [torch.tensor([0, 1])], torch.rand(2, 4)),
    lambda: _aten._index_put_impl_(torch.rand(3, 4), [torch.tensor([0, 1])], torch.rand(2, 4)),
    lambda: functional.grouped_mm(
        torch.rand(8, 16).bfloat16(),
        torch.rand(2, 16, 8).bfloat16(),
        offs=torch.tensor([3, 8], dtype=torch.int32),
    ),
    lambda: _aten._native_batch_norm_legit_no_training(_image(), None, None, *torch.rand(2, 3), 0.1, 1e-5),
    lambda: _aten._batch_norm_no_update(_image(), *torch.rand(4, 3), 0.1, 1e-5),
    lambda: _aten._batch_norm_with_update_functional(_image(), *torch.rand(4, 3), 0.1, 1e-5),
    lambda: _trained(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), _image()),
    lambda: _aten._embedding_bag_dense_backward(
        torch.rand(2, 3),
        *torch.tensor([[0, 1, 3], [0, 0, 1]]),
        *torch.tensor([[2, 1], [0, 0]]),
        4,
        False,
        0,
        None,
    ),
    lambda: _aten.norm.ScalarOpt_dtype(torch.rand(2, 3, 4), 2, dtype=torch.float64),
    lambda: _aten.norm.ScalarOpt_dim_dtype(torch.rand(2, 3, 4), 2, [1], False, dtype=torch.float64),
    lambda: _aten.embedding_renorm_(torch.rand(4, 3), torch.tensor([0, 2]), 0.1, 2.0),
    lambda: _aten._masked_softmax(torch.rand(2, 3, 4), torch.rand(2, 3, 4) > 0.5, 2),
    lambda: torch._convolution(
        _image(), _kernel(), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, False
    ),
    _without_onednn(lambda: functional.conv2d(_image(), _kernel())),
    _without_onednn(lambda: functional.conv3d(torch.rand(2, 3, 4, 4, 4), torch.rand(4, 3, 2, 2, 2))),
    _without_onednn(lambda: functional.conv2d(_image(), _kernel(), dilation=2)),
    _without_onednn(
        lambda: functional.conv3d(torch.rand(2, 3, 5, 5, 5), torch.rand(4, 3, 2, 2, 2), dilation=2)
    ),
    _without_onednn(lambda: functional.conv_transpose2d(_image(), torch.rand(3, 4, 3, 3))),
    _without_onednn(
        lambda: functional.conv_transpose3d(torch.rand(2, 3, 4, 4, 4), torch.rand(3, 4, 2, 2, 2))
    ),
    lambda: _aten._slow_conv2d_forward(_image(), _kernel(), [3, 3], None, [1, 1], [0, 0]),
    lambda: _aten.slow_conv3d_forward(
        torch.rand(2, 3, 4, 4, 4), torch.rand(4, 3, 2, 2, 2), [2, 2, 2], None, [1, 1, 1], [0, 0, 0]
    ),
    lambda: _aten.slow_conv_dilated2d(_image(), _kernel(), [3, 3]),
    lambda: _aten.slow_conv_dilated3d(torch.rand(2, 3, 4, 4, 4), torch.rand(4, 3, 2, 2, 2), [2, 2, 2]),
    lambda: _aten.slow_conv_transpose2d(_image(), torch.rand(3, 4, 3, 3), [3, 3]),
    lambda: _aten.slow_conv_transpose3d(torch.rand(2, 3, 4, 4, 4), torch.rand(3, 4, 2, 2, 2), [2, 2, 2]),
    lambda: _aten._upsample_bicubic2d_aa_backward(_image(), [6, 6], [2, 3, 4, 4], False),
    lambda: _aten._upsample_lanczos2d_aa_backward(_image(), [6, 6], [2, 3, 4, 4], False),
    lambda: _aten._upsample_nearest_exact3d_backward(torch.rand(2, 3, 6, 6, 6), [6, 6, 6], [2, 3, 3, 3, 3]),
    lambda: _trained(nn.LSTM(4, 5), torch.rand(3, 2, 4)),
    lambda: _trained(nn.LayerNorm(5), torch.rand(2, 3, 4, 5)),
    lambda: _trained(nn.GroupNorm(2, 4), torch.rand(2, 4, 5, 6)),
    lambda: _aten._native_batch_norm_legit_functional(
        _image(), *torch.rand(4, 3), training=True, momentum=0.1, eps=1e-5
    ),
    lambda: [_aten.rrelu_with_noise_functional(*_two_images(), training=each) for each in (False, True)],
    lambda: [
        _aten.rrelu_with_noise_backward(_image(), *_two_images(), 0.1, 0.3, each, False)
        for each in (False, True)
    ],
    lambda: _aten.mkldnn_convolution(_image(), _kernel(), None, [0, 0], [1, 1], [1, 1], 1),
    lambda: functional.linear(torch.rand(3, 4).to_mkldnn(), torch.rand(5, 4).to_mkldnn()),
    lambda: functional.max_pool2d(_image().to_mkldnn(), 2),
    lambda: functional.max_pool3d(torch.rand(2, 3, 4, 4, 4).to_mkldnn(), 2),
    lambda: functional.adaptive_avg_pool2d(_image().to_mkldnn(), (3, 3)),
    lambda: _image().to_mkldnn().reshape(2, 108),
    lambda: torch._nested_tensor_from_mask(torch.rand(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()),
    lambda: torch.nested.to_padded_tensor(_nested(), 0.0),
    lambda: torch._nested_from_padded(torch.rand(2, 3, 4), torch.tensor([[2, 4], [3, 4]])),
    lambda: torch._nested_view_from_buffer(
        torch.rand(20), torch.tensor([[2, 4], [3, 4]]), torch.tensor([[4, 1], [4, 1]]), torch.tensor([0, 8])
    ),
    lambda: _aten._pack_padded_sequence(torch.rand(3, 2, 4), torch.tensor([3, 2]), False),
    lambda: torch._foreach_mm([torch.rand(2, 3)], [torch.rand(3, 2)]),
)


def run_all() -> None:
    """Runs them, those that this build of torch can."""
    for call in _CALLS:
        with contextlib.suppress(Exception):
            call()
