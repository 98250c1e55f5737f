# SPDX-License-Identifier: Apache-2.0
"""Writes results into the pages that show them, between markers; no figure is copied by hand.

    <!-- bench NAME -->
    ...
    <!-- end of bench -->

NAME is a part, with its plot and a table; ``summary``: a few figures of all parts.
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
PAGES = (ROOT / "docs/benchmarks.md", RESULTS / "README.md")
NOT_MEASURED = "It has not been measured yet."
_DAY = re.compile(r", (?=\d{4}-\d\d-\d\d; load )")  # a result's machine, and when it ran
_BLOCK = re.compile(r"(<!-- bench ([a-z-]+) -->\n).*?(<!-- end of bench -->)", re.S)

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
        "connect() through a ClusterIP vs. directly, 10,000 Services (1.0 = no overhead)",
        "connect", "TCP connect", "p50 ClusterIP / direct, 10,000 services",
    ),
    Compared(
        "TCP connections a second through a NodePort, netfilter",
        "nodeport", "TCP connections", "ebpflb by netfilter, local", "nftables, local",
    ),
    Compared(
        "the same, flow tables",
        "nodeport", "TCP connections", "ebpflb, local", "nftables, local",
    ),
    Compared(
        "UDP datagrams a second through a NodePort, netfilter",
        "nodeport", "UDP datagrams", "ebpflb by netfilter, local", "nftables, local",
    ),
    Compared(
        "the same, flow tables",
        "nodeport", "UDP datagrams", "ebpflb, local", "nftables, local",
    ),
    Compared(
        "the node's cost of a TCP packet to another node, netfilter",
        "nodeport", "the node's cost", "ebpflb by netfilter, remote, TCP", "nftables, remote, TCP",
    ),
    Compared(
        "the same, flow tables",
        "nodeport", "the node's cost", "ebpflb, remote, TCP", "nftables, remote, TCP",
    ),
    Compared(
        "a change sent to the first answer from the new endpoint, p99",
        "agent", "a change sent", "p99, 0 others a second",
    ),
    Compared(
        "agent's processor time for a change, at 100 changes a second",
        "agent", "agent", "CPU a change, 100 changes a second",
    ),
    Compared(
        "agent's memory, 10,000 Services, 100,000 endpoints",
        "agent", "agent", "memory after the changes",
    ),
    Compared(
        "the same, one Service",
        "connect", "agent", "memory, idle, 1 service",
    ),
    Compared(
        "cold start with 10,000 Services, 100,000 endpoints, from an API server",
        "agent", "agent", "cold start",
    ),
    Compared(
        "warm restart, the same",
        "agent", "agent", "warm restart",
    ),
)  # fmt: skip


def read_results(folder: Path) -> Results:
    """Return the results of all parts that have been measured."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    return {name: result.read(path) for name, path in files.items() if path.exists()}


def renew(folder: Path = RESULTS, pages: tuple[Path, ...] = PAGES) -> None:
    """Draw all results, and write all pages. Raises KeyError for a marker of no part."""
    results = read_results(folder)
    for name, each in results.items():
        plot.draw(each, PARTS[name].panels, folder / f"{name}.png")
    for path in pages:
        text = path.read_text()
        path.write_text(renewed(text, results, folder, path.parent))


def renewed(text: str, results: Results, folder: Path, at: Path) -> str:
    """Return a page in the folder ``at``, with new text between its markers."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{_content(found[2], results, folder, at)}\n{found[3]}"

    return _BLOCK.sub(block, text)


def _content(name: str, results: Results, folder: Path, at: Path) -> str:
    if name == "summary":
        return _summary(results)
    part = PARTS[name]
    return _part(part, results[name], folder, at) if name in results else NOT_MEASURED


def _part(part: Part, found: Result, folder: Path, at: Path) -> str:
    """Return the plot, how and when it was measured, and a table of missed targets."""
    plot = folder / f"{part.name}.png"
    shown = f"![{part.title}]({os.path.relpath(plot, at)})\n\n" if plot.exists() else ""
    file = os.path.relpath(folder / f"{part.name}.json", at)
    figures = f"[all {len(found.rows())} figures]({file})"
    when = _DAY.split(found.machine)[-1]
    return f"{shown}`{found.command}`, {when}; {figures}{_targets(found)}.{_table(found)}"


def _targets(*found: Result) -> str:
    judged = [row.judgement() for each in found for row in each.rows() if row.target is not None]
    return f", {judged.count('met')} of {len(judged)} targets met" if judged else ""


def _table(found: Result) -> str:
    """Return the figures that miss their target; the plot shows the others."""
    missed = [it for it in found.headed() if it[1].judgement().startswith("missed")]
    lines, last = list[str](), ""
    for heading, row in missed:
        if heading != last:
            lines.append(f"| **{heading}** | | |")
            last = heading
        lines.append(f"| {' | '.join(row.cells()[:3])} |")
    head = "\n\n| figure | measured | target |\n|---|---|---|\n"
    return head + "\n".join(lines) if lines else ""


def _summary(results: Results) -> str:
    rows = [
        f"| {each.what} | {ours} | {' | '.join(_of_peers(results, each))} |"
        for each in SUMMARY
        if (ours := _shown(results, each, each.ours))
    ]
    head = "| figure | ebpflb | kube-proxy, nftables | kube-proxy, iptables |"
    parts = f"{len(results)} parts{_targets(*results.values())}."
    return "\n".join([head, "|---|---|---|---|", *rows, "", f"{_machines(results)} {parts}"])


def _of_peers(results: Results, each: Compared) -> list[str]:
    names = (each.theirs.replace("nftables", peer) for peer in ("nftables", "iptables"))
    return [_shown(results, each, name) for name in names]


def _machines(results: Results) -> str:
    """Return each machine, and what was measured there if there are several."""
    parts: dict[str, list[str]] = {}
    for name, each in results.items():
        parts.setdefault(_DAY.split(each.machine)[0], []).append(name)
    if len(parts) == 1:
        return f"All on {min(parts)}."
    return "; ".join(f"{', '.join(names)}: {machine}" for machine, names in parts.items()) + "."


def _shown(results: Results, each: Compared, name: str) -> str:
    rows: list[Row] = results[each.part].rows(each.heading) if each.part in results else []
    return next((row.shown() for row in rows if row.name == name), "")
