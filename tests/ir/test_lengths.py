"""Numbers as polynomials of a length: what is fitted to some lengths holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irc.ir import DType, Storage, TensorType, Value
from irc.ir.lengths import DiffersByLength, Polynomial, fit, generalize, numbers_by_length, specialize

LENGTHS = 40, 8, 27

coefficients = st.lists(st.integers(-50, 50), min_size=2, max_size=3)


@given(coefficients, st.booleans(), st.integers(2, 5000))
def test_a_fitted_polynomial_is_that_of_every_length(c: list[int], is_float: bool, length: int) -> None:
    wanted = Polynomial(tuple(c), is_float=is_float)
    found = fit(LENGTHS, [wanted.at(each) for each in LENGTHS])
    assert found is not None and found.at(length) == wanted.at(length)
    assert type(found.at(length)) is type(wanted.at(length))
    assert eval(str(found), {"length": length, "float": float}) == wanted.at(length)


@pytest.mark.parametrize("numbers", [[5.5, 1.0, 2.0], [20, 4, 13], [40, 8, 32]])
def test_what_is_not_a_polynomial_is_not_fitted(numbers: list[float]) -> None:
    assert fit(LENGTHS, numbers) is None


@given(coefficients, st.integers(2, 30), st.integers(0, 30))
def test_the_largest_number_of_a_range_is_known(c: list[int], first: int, more: int) -> None:
    number = Polynomial(tuple(c))
    most = max(number.at(length) for length in range(first, first + more + 1))
    assert number.is_most_at(first, first + more) == (number.at(first + more) == most)


def values(length: int, device: str) -> tuple[Value, ...]:
    """A tensor of this length, a view of it, and one of another size, in blocks of the device's allocator."""
    block = 512 if device == "cuda:0" else 1
    storage = Storage("s0", -(-length * 12 // block) * block, device)
    fixed = Storage("s1", 512, device)
    rows = TensorType((length, 3), DType.FLOAT32, (3, 1), device)
    columns = TensorType((3, length), DType.FLOAT32, (1, 3), device)
    return (
        Value("a", rows, storage),
        Value("b", columns, storage),
        Value("c", TensorType((4,), DType.FLOAT32, (1,), device), fixed),
    )


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@given(length=st.integers(2, 3000))
def test_values_of_any_length_are_those_of_three(device: str, length: int) -> None:
    general = generalize([values(each, device) for each in LENGTHS], LENGTHS)
    found, wanted = specialize(general, length), values(length, device)
    assert [(each.name, each.type) for each in found] == [(each.name, each.type) for each in wanted]
    assert [each.storage.nbytes for each in found] == [each.storage.nbytes for each in wanted]
    assert found[0].storage is found[1].storage is not found[2].storage
    assert {str(each) for each in numbers_by_length(general)} == {"length", "12 * length"}


def test_what_differs_in_more_than_numbers_is_said() -> None:
    with pytest.raises(DiffersByLength, match="a and b and a"):
        generalize([("a", 1), ("b", 1), ("a", 1)], LENGTHS)
    with pytest.raises(DiffersByLength, match="2 and 3"):
        generalize([(1, 2), (1, 2), (1, 2, 3)], LENGTHS)
    with pytest.raises(DiffersByLength, match="7 and 8 and 9"):
        generalize([(7,), (8,), (9,)], LENGTHS)
    one, two = Storage("s", 4), Storage("s", 4)
    with pytest.raises(DiffersByLength, match="is two"):
        generalize([(one, one), (one, two), (one, one)], LENGTHS)
