# SPDX-License-Identifier: Apache-2.0
"""Writes results into the pages that show them, between markers; no figure is copied by hand.

    <!-- bench NAME -->
    ...
    <!-- end of bench -->

NAME is a part, with its plot and text; ``missed``: all that misses its target; ``summary``: the
few figures of README.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from bench import plot, result
from bench.parts import PARTS, Part
from bench.report import Row
from bench.result import Result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
PAGES = tuple(
    ROOT / name
    for name in ("README.md", "docs/benchmarks.md", "docs/scale.md", "docs/scheduling.md")
)
NOT_MEASURED = "It has not been measured yet."
_BLOCK = re.compile(r"(<!-- bench ([a-z]+) -->\n).*?(<!-- end of bench -->)", re.S)

Results = dict[str, Result]


class Compared(NamedTuple):
    """A line of the summary: what, of which part and heading, our row's name, and nftables'."""

    what: str
    part: str
    heading: str
    ours: str
    theirs: str = ""


SUMMARY = (
    Compared(
        "connect time by ClusterIP, 10,000 services, times a direct one",
        "connect", "TCP connect", "p50 ClusterIP / direct, 10,000 services",
    ),
    Compared(
        "NodePort, TCP connections a second, flow tables",
        "nodeport", "TCP connections", "ebpflb, local", "nftables, local",
    ),
    Compared(
        "NodePort, TCP connections a second, netfilter",
        "nodeport", "TCP connections", "ebpflb by netfilter, local", "nftables, local",
    ),
    Compared(
        "the node's cost of a TCP packet to another node, flow tables",
        "nodeport", "the node's cost", "ebpflb, remote, TCP", "nftables, remote, TCP",
    ),
    Compared(
        "agent's memory, 10,000 services, 100,000 endpoints",
        "agent", "agent", "memory after the changes",
    ),
)  # fmt: skip


def read_results(folder: Path) -> Results:
    """Of all parts that have been measured."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    return {name: result.read(path) for name, path in files.items() if path.exists()}


def renew(folder: Path = RESULTS, pages: tuple[Path, ...] = PAGES) -> None:
    """Draws all results, and writes all pages. Raises KeyError for a marker of no part."""
    results = read_results(folder)
    for name, each in results.items():
        plot.draw(each, PARTS[name].panels, folder / f"{name}.png")
    for path in pages:
        text = path.read_text()
        path.write_text(renewed(text, results, folder, path.parent))


def renewed(text: str, results: Results, folder: Path, at: Path) -> str:
    """A page in the folder ``at``, with what stands between its markers made anew."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{_content(found[2], results, folder, at)}\n{found[3]}"

    return _BLOCK.sub(block, text)


def _content(name: str, results: Results, folder: Path, at: Path) -> str:
    if name == "missed":
        return _missed(results)
    if name == "summary":
        return _summary(results)
    part = PARTS[name]
    return _part(part, results[name], folder, at) if name in results else NOT_MEASURED


def _part(part: Part, found: Result, folder: Path, at: Path) -> str:
    plot = folder / f"{part.name}.png"
    shown = f"![{part.title}]({os.path.relpath(plot, at)})\n\n" if plot.exists() else ""
    return f"{shown}```\n{found.text()}\n```"


def _missed(results: Results) -> str:
    rows = [
        f"| `{name}` | {heading} | {row.name} | {' | '.join(row.cells()[i] for i in (2, 1, 3))} |"
        for name, each in results.items()
        for heading, row in each.headed()
        if row.judgement().startswith("missed")
    ]
    head = "| part | below | figure | target | measured | |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def _summary(results: Results) -> str:
    rows = [
        f"| {each.what} | {ours} | {_shown(results, each, each.theirs)} |"
        for each in SUMMARY
        if (ours := _shown(results, each, each.ours))
    ]
    head = "| measured by [make bench](docs/benchmarks.md) | ebpflb | kube-proxy's nftables |"
    return "\n".join([head, "|---|---|---|", *rows])


def _shown(results: Results, each: Compared, name: str) -> str:
    rows: list[Row] = results[each.part].rows(each.heading) if each.part in results else []
    return next((row.shown() for row in rows if row.name == name), "")
