import pytest
from hypothesis import given
from hypothesis import strategies as st

from irc.ir import DType, TensorType, allocation_bytes

ITEMSIZE = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.COMPLEX128: 16,
    DType.COMPLEX64: 8,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT64: 8,
    DType.UINT32: 4,
    DType.UINT16: 2,
    DType.UINT8: 1,
    DType.BOOL: 1,
    DType.COMPLEX32: 4,
    DType.BITS16: 2,
}
"""Of the types of more than a byte, and others."""


@pytest.mark.parametrize("dtype", DType)
def test_itemsize_is_exact(dtype: DType) -> None:
    assert dtype.itemsize == ITEMSIZE.get(dtype, 1)


def test_gradients_flow_through_floats_only() -> None:
    kinds = {
        "".join(c for c in dtype.value.split("_")[0] if c.isalpha()) for dtype in DType if not dtype.is_float
    }
    assert kinds == {"int", "uint", "bool", "bits", "bitsx"}


@pytest.mark.parametrize(
    ("shape", "dtype", "strides", "nbytes"),
    [
        ((8, 3, 3, 3), DType.FLOAT32, (27, 9, 3, 1), 864),
        ((), DType.FLOAT64, (), 8),
        ((4, 0, 5), DType.INT64, (5, 5, 1), 0),
        ((7,), DType.BOOL, (1,), 7),
        ((3, 2), DType.BFLOAT16, (2, 1), 12),
    ],
)
def test_contiguous_type(shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...], nbytes: int) -> None:
    found = TensorType.contiguous(shape, dtype, "cuda:0")
    assert found == TensorType(shape, dtype, strides, "cuda:0")
    assert found.nbytes == nbytes


@given(st.integers(0, 1 << 40))
def test_cuda_rounds_up_to_its_block_and_the_cpu_does_not(payload_bytes: int) -> None:
    assert allocation_bytes(payload_bytes, "cpu") == payload_bytes
    taken = allocation_bytes(payload_bytes, "cuda:1")
    assert taken % 512 == 0 and payload_bytes <= taken < payload_bytes + 512
