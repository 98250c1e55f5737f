# SPDX-License-Identifier: Apache-2.0
"""Draws results: the one door to matplotlib (Debian's, of the Makefile's BENCH_PACKAGES).

Rows that differ in a size are curves, others are bars; each with how the rounds vary. A target is
a red line.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.parts import Panel
from bench.report import Row
from bench.result import Result

WIDTH, CURVES, BAR, HEAD = 7.5, 2.6, 0.19, 0.75  # inches
DOTS = 90  # an inch
LOGARITHMIC = 20  # times the least bar
TARGET = "tab:red"


def draw(result: Result, panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels one below the other; what the result lacks is left out."""
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
    """Return the rows of panels; curves get one of their own if a heading has both."""
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
    """Draw curves from 0 on, so that flat ones look flat."""
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


class Trend(NamedTuple):
    """A line through a series: its value at 0, and its slope an hour between two bounds."""

    at_zero: float
    slope: float
    low: float
    high: float


BLOCKS, T = 10, 2.306  # Student's, 95 %, of ten points: neighbours depend on each other
HOUR = 3600.0  # seconds


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Fit a line to the medians of ten blocks; the bounds hold its slope in 95 % of cases."""
    size = len(times) // BLOCKS
    x = [median(times[i * size : (i + 1) * size]) / HOUR for i in range(BLOCKS)]
    y = [median(values[i * size : (i + 1) * size]) for i in range(BLOCKS)]
    middle_x, middle_y = sum(x) / BLOCKS, sum(y) / BLOCKS
    spread = sum((a - middle_x) ** 2 for a in x)
    slope = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread
    at_zero = middle_y - slope * middle_x
    rest = sum((b - at_zero - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    bound = T * (rest / (BLOCKS - 2) / spread) ** 0.5
    return Trend(at_zero, slope, slope - bound, slope + bound)


def draw_trends(panels: dict[str, tuple[list[dict[str, float]], str]], path: Path) -> None:
    """Draw series over minutes as SVG, each with its line, slope and bounds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = path.name
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(panels), figsize=(WIDTH, 5), layout="constrained")
    for place, (name, (samples, field)) in zip(axes, panels.items(), strict=True):
        times, values = [it["at"] for it in samples], [it[field] for it in samples]
        line = trend(times, values)
        ends = times[0], times[-1]
        said = f"{line.slope:+.2f} an hour ({line.low:+.2f} to {line.high:+.2f})"
        place.plot([each / 60 for each in times], values, linewidth=0.8)
        place.plot(
            [each / 60 for each in ends], [line.at_zero + line.slope * t / HOUR for t in ends],
            TARGET, label=said,
        )  # fmt: skip
        place.set_title(name, fontsize=9, loc="left")
        place.set_ylim(bottom=0)
        place.legend(fontsize=8)
        place.tick_params(labelsize=8)
    axes[-1].set_xlabel("minutes", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_spread(panels: dict[str, list[Counter[str]]], path: Path) -> None:
    """Draw the connections of each endpoint over seconds as SVG, a panel for each way."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = path.name
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(WIDTH, CURVES), layout="constrained", sharey=True
    )
    for place, (name, seconds) in zip(axes, panels.items(), strict=True):
        for endpoint in sorted(seconds[0] | seconds[-1]):
            place.plot([each[endpoint] for each in seconds], linewidth=0.9, label=endpoint)
        place.set_title(name, fontsize=9, loc="left")
        place.set_xlabel("seconds", fontsize=8)
        place.tick_params(labelsize=8)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("connections", fontsize=8)
    axes[-1].legend(fontsize=7, ncols=2, loc="upper right")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
