# SPDX-License-Identifier: Apache-2.0
"""The kernel's lists of numbers, "0-3,5" (bitmap_parselist): CPUs, ports."""


def parse_ranges(text: str) -> list[range]:
    """Return the ranges; empty for an empty list. Raises ValueError for an invalid list."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return [range(int(end[0]), int(end[-1]) + 1) for end in ends]


def parse_numbers(text: str) -> set[int]:
    """Return the numbers of such a list."""
    return {number for numbers in parse_ranges(text) for number in numbers}


def format_numbers(numbers: set[int]) -> str:
    """The inverse of parse_numbers."""
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    pairs = zip(firsts, lasts, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
