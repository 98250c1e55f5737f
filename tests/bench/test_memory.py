# SPDX-License-Identifier: Apache-2.0
"""The formula for a memory limit matches the measurements, wherever it is printed."""

import re
from pathlib import Path
from statistics import median

import pytest

from bench import endurance, memory, page, plot, result

ROOT = Path(__file__).parents[2]
SCALE, VALUES = ROOT / "docs/scale.md", ROOT / "deploy/chart/ebpflb/values.yaml"
MEASURED = [*memory.sums(result.read(page.RESULTS / "memory.json"))]
FORMULA = memory.fit(MEASURED)
SIZES = (100, 1000, 10_000)


def words(path: Path) -> str:
    """Return the text of a page without comment signs and line breaks."""
    return re.sub(r"\s+#? *", " ", path.read_text())


@pytest.mark.parametrize("path", [SCALE, VALUES], ids=["scale.md", "values.yaml"])
def test_pages_have_the_formula(path: Path) -> None:
    """The formula on both pages is fitted to the results, and so are the limits of ten endpoints
    for each Service.
    """
    said = words(path)
    assert str(FORMULA) in said
    for services in SIZES:
        limit = re.escape(FORMULA.limit(services, 10 * services, 32))
        assert re.search(rf"\b{services:,} Services?[^,]*\b{limit}", said), (services, limit)


def test_the_formula_holds_what_was_measured() -> None:
    """No measured sum is above the formula, or on netfilter, which takes more, a tenth below it."""
    assert {(it.engine, it.services) for it in MEASURED} == {
        (engine, services) for engine in ("netfilter", "flows") for services in SIZES
    }
    for it in MEASURED:
        size = FORMULA.size(it.services, it.endpoints, memory.MEASURED_CPUS)
        assert it.size <= size, it
        assert it.engine != "netfilter" or size <= 1.1 * it.size, it


def test_the_page_has_what_the_soak_measured() -> None:
    """It has the slope, its bounds and the pauses of the samples, and the least blocks in use."""
    samples, said = endurance.read(), words(SCALE)
    times, pauses = [it["at"] for it in samples], [it["pause"] for it in samples]
    found = plot.trend(times, [it["rss"] for it in samples])
    assert f"grew by {found.slope:.1f} MB (95 %: {found.low:.1f} to {found.high:.1f})" in said
    assert f"{median(pauses):.2f} s in the median, and {max(pauses):.1f} s at most" in said
    parts = [samples[at : at + 15] for at in range(0, len(samples) - 14, 15)]
    least = [min(it["blocks"] for it in part) for part in parts]
    assert f"between {min(least):,.0f} and {max(least):,.0f}" in said
