"""Sizes in the words of people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.spec import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("123456", 123456),
        ("64K", 65536),
        ("100M", 100 * 2**20),
        ("1g", 2**30),
        ("2T", 2**41),
        ("8KiB", 8192),
        ("8 MB", 8 * 2**20),
        (" 10b ", 10),
    ],
)
def test_size_is_understood(text: str, size_bytes: int) -> None:
    assert parse_size("--log_max_bytes", text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "M", "-1", "1.5G", "10X", "1M2", "100 M B", "0x10", "1e6", "inf", "\N{ARABIC-INDIC DIGIT ONE}K"]
)
def test_what_is_no_size_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError, match=r"--log_max_bytes .*: not a size; give .* such as 100M"):
        parse_size("--log_max_bytes", text)


@given(st.integers(0, 2**50))
def test_size_survives_its_words(size_bytes: int) -> None:
    assert parse_size("--x", format_size(size_bytes).removesuffix("ytes")) == size_bytes
