# SPDX-License-Identifier: Apache-2.0
"""Draws results as PNG: the one door to matplotlib (Debian's, of the Makefile's BENCH_PACKAGES).

Rows that differ in a size are curves, others are bars; each with how the rounds vary. A target is
a red line.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.parts import Panel
from bench.report import Row
from bench.result import Result

WIDTH, CURVES, BAR, HEAD = 7.5, 2.6, 0.19, 0.75  # inches
DOTS = 90  # an inch
LOGARITHMIC = 20  # times the least bar
TARGET = "tab:red"


def draw(result: Result, panels: Sequence[Panel], path: Path) -> None:
    """One panel below the other. What is not in the result is left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(panel, found) for panel in panels if (found := _rows(result, panel))]
    if not drawn:
        return
    heights = [CURVES if found[0].axis else HEAD + BAR * len(found) for _, found in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), figsize=(WIDTH, sum(heights)), height_ratios=heights, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for place, (panel, found) in zip(axes[:, 0], drawn, strict=True):
        (_curves if found[0].axis else _bars)(place, found)
        place.set_title(_title(result, panel), fontsize=9, loc="left")
        place.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS, metadata={"Software": None}, pil_kwargs={"optimize": True})
    pyplot.close(figure)


def _rows(result: Result, panel: Panel) -> list[Row]:
    """Curves are a panel of their own where a heading has both."""
    found = [row for row in result.rows(panel.heading) if row.unit == panel.unit]
    return [row for row in found if row.axis] or found


def _title(result: Result, panel: Panel) -> str:
    headings = [line for line in result.lines if isinstance(line, str)]
    whole = next(line for line in headings if line.startswith(panel.heading))
    return f"{whole} ({panel.unit})"


def _bars(axes: Any, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        error = [[max(0.0, row.value - row.low)], [max(0.0, row.high - row.value)]]
        axes.barh(
            place, row.value, 0.7, color="tab:blue", xerr=error if row.rounds else None,
            error_kw={"elinewidth": 0.9, "capsize": 2},
        )  # fmt: skip
        if row.target is not None:
            axes.plot([row.target] * 2, [place - 0.45, place + 0.45], color=TARGET, linewidth=1.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    values = [row.value for row in rows]
    if min(values) > 0 and max(values) > LOGARITHMIC * min(values):
        axes.set_xscale("log")


def _curves(axes: Any, rows: list[Row]) -> None:
    """From 0 on, so that what is flat looks flat."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        lines[row.what].append(row)
    for what, points in lines.items():
        at = [row.at for row in points]
        axes.plot(at, [row.value for row in points], marker="o", markersize=3, label=what)
        varying = [row for row in points if row.rounds]
        axes.fill_between(
            [row.at for row in varying], [row.low for row in varying],
            [row.high for row in varying], alpha=0.2,
        )  # fmt: skip
    aims = [row for row in rows if row.target is not None]
    axes.plot([row.at for row in aims], [row.target for row in aims], TARGET, linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(rows[0].axis, fontsize=8)
    axes.legend(fontsize=8)
