"""Element types: what torch computes or only stores is planned, and what irc has no name for is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.frontends.torch import capture
from irc.ir import DType, UnsupportedError
from irc.torch_support.element_types import element_type

_QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
_STRIDED = {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - _QUANTIZED


class Passed(nn.Module):
    """Numbers that are converted to a type and back, or whose bytes are viewed as elements of it."""

    def __init__(self, dtype: torch.dtype, *, is_converted: bool) -> None:
        super().__init__()
        self.layer, self.dtype, self.is_converted = nn.Linear(8, 8), dtype, is_converted
        self.stored: Tensor
        self.register_buffer("stored", torch.arange(32, dtype=torch.uint8).view(dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not self.is_converted:
            return y * self.stored.view(torch.uint8).view(4, 8).float()
        passed = y.detach().abs().to(self.dtype)
        return y * (passed.to(torch.complex64).real if self.dtype.is_complex else passed.float())


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("part", range(3))
def test_a_model_that_holds_elements_of_any_type_trains_as_in_eager(part: int, is_converted: bool) -> None:
    x = torch.randn(4, 8)
    for dtype in sorted(_STRIDED, key=str)[part::3]:
        model = Passed(dtype, is_converted=is_converted)
        try:
            expected = model(x)
        except (RuntimeError, NotImplementedError):
            assert is_converted and dtype.itemsize <= 2, "types that torch only stores"
            continue
        fitted = irc.optimize(model, (x,), "1MiB", costs="analytic")
        result = fitted(x)
        result.sum().backward()
        assert torch.equal(result, expected), dtype


def test_all_types_have_the_size_of_torchs() -> None:
    assert {str(d).removeprefix("torch."): d.itemsize for d in _STRIDED} == {
        d.value: d.itemsize for d in DType
    }


def test_a_type_without_a_name_is_refused_by_its_own() -> None:
    tensor: Any = SimpleNamespace(dtype="torch.float3")
    with pytest.raises(UnsupportedError, match=r"IRC350.*elements of type float3"):
        element_type(tensor)


class _Sparse(nn.Module):
    def __init__(self, compressed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.compressed = nn.Linear(4, 4), compressed

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        return self.compressed(y) @ y


@pytest.mark.parametrize(
    "compressed",
    [
        lambda y: y.to_sparse(layout=torch.sparse_csr),
        lambda y: y.to_sparse_csr(),
        lambda y: y.to_sparse_csc(),
        lambda y: y.to_sparse_bsr((2, 2)),
        lambda y: y.to_sparse_bsc((2, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_compressed_sparse_tensors_are_refused_before_the_tracer_ends_the_process(
    compressed: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        capture(_Sparse(compressed), (torch.randn(4, 4),))
    assert caught.value.code == "IRC334" and "tensor" in caught.value.message
    assert caught.value.at is not None and "test_torch_element_types" in str(caught.value.at)
