# SPDX-License-Identifier: Apache-2.0
"""Figures beside their targets, as values and as text; and the machine that measured them."""

import os
import platform
import re
import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure. ``target`` is the most that it may be, or the ``least``; None: no target.

    Of so many ``rounds`` the middle half lies between ``low`` and ``high``, or all of fewer than
    four. ``at`` is the size that it was measured at, counted in ``axis``: rows of one name that
    differ in it are a curve.
    """

    what: str
    value: float
    unit: str
    target: float | None = None
    note: str = ""
    least: bool = False
    low: float = 0
    high: float = 0
    rounds: int = 0
    at: float | None = None
    axis: str = ""

    @property
    def name(self) -> str:
        return self.what if self.at is None else f"{self.what}, {self.at:,.0f} {self.axis}"

    def cells(self) -> tuple[str, ...]:
        sign = ">=" if self.least else "<="
        target = "" if self.target is None else f"{sign} {number(self.target)} {self.unit}"
        note = "; ".join(filter(None, (self._spread(), self.note)))
        return self.name, self.shown(), target.strip(), self.judgement(), note

    def shown(self) -> str:
        return f"{number(self.value)} {self.unit}".strip()

    def judgement(self) -> str:
        if self.target is None:
            return ""
        if self.value >= self.target if self.least else self.value <= self.target:
            return "met"
        if not self.target:
            return "missed"
        return f"missed by {abs(self.value / self.target - 1):.0%}"

    def _spread(self) -> str:
        """Return the variation, to judge the figure."""
        if self.rounds < 2:
            return ""
        what = f"of {self.rounds}:" if self.rounds < 4 else "middle half"
        return f"{what} {number(self.low)} to {number(self.high)}"


Line = Row | str
Lines = Iterator[Line]


def row_of(
    what: str,
    values: Sequence[float],
    unit: str,
    target: float | None = None,
    note: str = "",
    *,
    value: float | None = None,
    least: bool = False,
    at: float | None = None,
    axis: str = "",
) -> Row:
    """The median of all rounds' values, or another ``value`` of them, with how they vary."""
    low, high = min(values), max(values)
    if len(values) >= 4:
        low, _, high = statistics.quantiles(values, n=4)
    middle = statistics.median(values) if value is None else value
    return Row(what, middle, unit, target, note, least, low, high, len(values), at, axis)


def number(value: float) -> str:
    """Format with at least three digits: 12345, 123, 12.3, 1.230, 0."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of all do not exceed; 0.5 is the median."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(rows: Sequence[Line]) -> str:
    """Format rows as a table; plain strings are headings."""
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
