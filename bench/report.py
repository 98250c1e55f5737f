# SPDX-License-Identifier: Apache-2.0
"""Figures beside their targets, as text; and the machine that they are from."""

import os
import platform
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure. ``target`` is the most that it may be, or the ``least``; None: no target."""

    what: str
    value: float
    unit: str
    target: float | None = None
    note: str = ""
    least: bool = False

    def cells(self) -> tuple[str, ...]:
        sign = ">=" if self.least else "<="
        target = "" if self.target is None else f"{sign} {_number(self.target)} {self.unit}"
        value = f"{_number(self.value)} {self.unit}".strip()
        return self.what, value, target.strip(), self.judgement(), self.note

    def judgement(self) -> str:
        if self.target is None:
            return ""
        if self.value >= self.target if self.least else self.value <= self.target:
            return "met"
        if not self.target:
            return "missed"
        return f"missed by {abs(self.value / self.target - 1):.0%}"


Line = Row | str
Lines = Iterator[Line]


def _number(value: float) -> str:
    """Three digits at least: 12345, 123, 12.3, 1.230, 0."""
    if value == int(value) or value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all are not above; 0.5 is the median."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The middle half, for the reader to judge the median by."""
    if len(values) < 4:
        return f"of {len(values)}: {min(values):.{digits}f} to {max(values):.{digits}f}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"middle half {low:.{digits}f} to {high:.{digits}f}"


def table(rows: Sequence[Line]) -> str:
    """A heading for each plain string."""
    cells = [row.cells() for row in rows if isinstance(row, Row)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(f"\n{row}" if isinstance(row, str) else _line(row, widths) for row in rows)


def _line(row: Row, widths: list[int]) -> str:
    what, value, target, judgement, note = row.cells()
    return (
        f"  {what:{widths[0]}}  {value:>{widths[1]}}  {target:>{widths[2]}}"
        f"  {judgement:{widths[3]}}  {note}"
    ).rstrip()


def machine() -> str:
    """Kernel, processor, Python, day, and how busy the machine was."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    load = " ".join(f"{part:.1f}" for part in os.getloadavg())
    return (
        f"Linux {platform.release()} {platform.machine()}, "
        f"{found[1] if found else 'unknown CPU'}, {os.cpu_count()} CPUs, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}; load {load}"
    )
