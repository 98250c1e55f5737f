# SPDX-License-Identifier: Apache-2.0
"""The kernel's lists of numbers, "0-3,5" (bitmap_parselist): CPUs, ports."""


def parse_ranges(text: str) -> list[range]:
    """Empty where it says nothing. Raises ValueError for what is no such list."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return [range(int(end[0]), int(end[-1]) + 1) for end in ends]
