# SPDX-License-Identifier: Apache-2.0
"""The maps take as much of the kernel's memory as the pages say where a limit is sized."""

import os
import re
from pathlib import Path

import pytest

from ebpflb.kernel.maps.bpf_map import Map, counter_parts
from tests.docs.pages import ROOT

PAGES = ("docs/scale.md", "docs/install.md", "deploy/chart/ebpflb/values.yaml")
FIGURES = re.compile(r"(\d+) MB,? and ([\d.]+) MB for each possible CPU")
ACCURATE = (6, 3)  # since then the kernel counts what a map really takes


def figures(page: str) -> list[tuple[float, float]]:
    """Return figures in MB: of all CPUs together, and of each."""
    return [(float(a), float(b)) for a, b in FIGURES.findall((ROOT / page).read_text())]


def memory_of(opened: Map) -> int:
    """Return the memory in bytes, from /proc."""
    text = Path(f"/proc/self/fdinfo/{opened.fd}").read_text()
    return int(text.partition("memlock:")[2].split()[0])


def test_pages_agree() -> None:
    """Each says it once, with the same figures."""
    (said,) = figures(PAGES[0])
    assert [figures(page) for page in PAGES] == [[said]] * len(PAGES)


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < ACCURATE,
    reason="this kernel does not count all memory of a map",
)
def test_as_measured(all_maps: dict[str, Map]) -> None:
    """The pages are right within 2 %; CPUs that may be added count."""
    ((of_all, of_each),) = figures(PAGES[0])
    measured = sum(map(memory_of, all_maps.values())) / 1e6
    assert measured == pytest.approx(of_all + of_each * counter_parts(), rel=0.02)
