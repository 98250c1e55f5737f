# SPDX-License-Identifier: Apache-2.0
"""The table of metrics in kube-proxy.md 14."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    name: str
    type: str
    labels: frozenset[str]
    buckets: list[float]


def section(number: int) -> str:
    text = (ROOT / "docs/kube-proxy.md").read_text()
    return text.split(f"\n## {number}. ", 1)[1].split("\n## ", 1)[0]


def bounds(text: str) -> list[float]:
    """Parse bounds such as "0.001*2^n, 15 buckets" or "0.25, 1..59 by 1"."""
    if powers := re.match(r"([\d.]+)\*2\^n, (\d+)", text):
        return [float(powers[1]) * 2**n for n in range(int(powers[2]))]
    found: list[float] = []
    for part in text.split(", "):
        steps = re.fullmatch(r"(\d+)\.\.(\d+) by (\d+)", part)
        found += range(int(steps[1]), int(steps[2]) + 1, int(steps[3])) if steps else [float(part)]
    return found


def read_table() -> dict[str, Row]:
    """Read the table; a row may name several metrics; "same" means the buckets of the previous
    row.
    """
    found: dict[str, Row] = {}
    buckets: list[float] = []
    for line in re.findall(r"(?m)^\| (kubeproxy_.*) \|$", section(14)):
        names, type, labels, _ = line.split(" | ", 3)
        kind, _, detail = re.sub("[:,()]", "", type.replace(", ", "; ")).partition(" ")
        kind = kind.rstrip(";")
        if kind == "histogram" and detail != "same":
            buckets = bounds(detail.replace("; ", ", "))
        words = re.sub(r"\(.*?\)|=[^,]*|-", "", labels)
        for name in names.split(", "):
            keys = frozenset(re.findall(r"\w+", words))
            found[name] = Row(name, kind, keys, buckets if kind == "histogram" else [])
    return found


TABLE = read_table()
OURS = TABLE
# Of rules, tables and counters that ebpflb does not have: named below the table.
OF_OTHER_MODES = set(re.findall(r"`(kubeproxy_\w+)`", section(14))) - TABLE.keys()
