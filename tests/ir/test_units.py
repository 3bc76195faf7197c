from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irc.ir import UsageError, format_bytes, parse_budget


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        (1, 1),
        ("1", 1),
        ("4096", 4096),
        ("9007199254740993", 9007199254740993),
        ("12B", 12),
        ("2kB", 2000),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("3MB", 3_000_000),
        ("3MiB", 3 << 20),
        ("4GB", 4_000_000_000),
        ("4GiB", 4 << 30),
        (" 4 GiB ", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("2.3GB", 2_300_000_000),
        ("0.0003GB", 300_000),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
        ((1 << 62) - 1, (1 << 62) - 1),
        ("60%", 600),
        ("100%", 1000),
        (" 12.34 % ", 123),
        ("150%", 1500),
    ],
)
def test_a_budget_is_read(budget: int | str, nbytes: int) -> None:
    assert parse_budget(budget, 1000) == nbytes


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0, "the budget is 0 bytes; it must be positive"),
        (-1, "the budget is -1 bytes; it must be positive"),
        ("0", "the budget is '0'; it must be positive"),
        ("0GiB", "the budget is '0GiB'; it must be positive"),
        ("0.4B", "the budget is '0.4B'; it must be positive"),
        ("0%", "the budget is 0%; it must be positive"),
        ("-4GiB", "'-4GiB' is not an amount of memory"),
        ("-5%", "'-5%' is not an amount of memory"),
        ("", "'' is not an amount of memory"),
        ("GiB", "'GiB' is not an amount of memory"),
        ("4 5GiB", "'4 5GiB' is not an amount of memory"),
        ("1e9", "'1e9' is not an amount of memory"),
        ("4,5GB", "'4,5GB' is not an amount of memory"),
        ("nan", "'nan' is not an amount of memory"),
        ("\u0664GiB", "'\u0664GiB' is not an amount of memory"),
        ("4Gb", "'4Gb': there is no unit 'Gb' (a small b is for bits)"),
        ("4b", "'4b': there is no unit 'b' (a small b is for bits)"),
        ("4Gib", "'4Gib': there is no unit 'Gib' (a small b is for bits)"),
        ("4gib", "'4gib': there is no unit 'gib' (a small b is for bits)"),
        ("4g", "'4g': there is no unit 'g'"),
        (".7", "'.7' is less than a byte"),
        ("0.50", "'0.50' is less than a byte"),
        ("4PiB", "'4PiB': there is no unit 'PiB'"),
        (1 << 62, "the budget is out of all proportion"),
        ("99999999999GiB", "the budget is out of all proportion"),
        (True, "a budget is a number of bytes or a text, not bool"),
        (4e9, "a budget is a number of bytes or a text, not float"),
        (None, "a budget is a number of bytes or a text, not NoneType"),
    ],
)
def test_what_is_no_budget_is_refused(budget: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_budget(budget, 1000)
    assert (caught.value.code, caught.value.message) == ("IRC401", message)
    assert caught.value.help is not None and '"4GiB" (4 x 2^30)' in caught.value.help


@given(st.integers(1, 1 << 60))
def test_bytes_in_any_form_are_exact(nbytes: int) -> None:
    assert parse_budget(nbytes) == parse_budget(str(nbytes)) == parse_budget(f"{nbytes}B") == nbytes
    assert parse_budget("100%", nbytes) == nbytes
    assert parse_budget("60%", nbytes) == nbytes * 60 // 100


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        ((1 << 20) - 1, "1024 KiB"),
        (int(999.7 * 1024), "1000 KiB"),
        (1010 << 20, "1010 MiB"),
        (381 << 20, "381 MiB"),
        (4 << 30, "4 GiB"),
        (int(4.564 * (1 << 30)), "4.56 GiB"),
        (1 << 40, "1 TiB"),
        (5000 << 40, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_bytes_are_written(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_what_is_written_is_near(nbytes: int) -> None:
    text = format_bytes(nbytes)
    assert "e" not in text
    assert (nbytes == 0) or abs(parse_budget(text.replace(" ", "")) - nbytes) <= nbytes * 0.006
