# SPDX-License-Identifier: Apache-2.0
"""The kernel's lists of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.model.addresses import format_numbers, parse_numbers, parse_ranges


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0\n", [0]),
        ("0-3\n", [0, 1, 2, 3]),
        ("0-1,8-9,15\n", [0, 1, 8, 9, 15]),
        ("\n", []),
        ("", []),
    ],
)
def test_spans(text: str, numbers: list[int]) -> None:
    """Single numbers and ranges, with commas between; maybe none."""
    assert [number for span in parse_ranges(text) for number in span] == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-"])
def test_no_list(text: str) -> None:
    """Anything else is an error."""
    with pytest.raises(ValueError):
        parse_ranges(text)


@given(some.sets(some.integers(1, 300)))
def test_format_is_the_inverse(numbers: set[int]) -> None:
    """A written list reads back the same."""
    assert parse_numbers(format_numbers(numbers)) == numbers


def test_format() -> None:
    """Neighbours are one range, as the kernel writes it."""
    assert format_numbers({80, 20000, 20001, 20002, 443}) == "80,443,20000-20002"
    assert parse_numbers("\n") == set()
