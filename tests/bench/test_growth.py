# SPDX-License-Identifier: Apache-2.0
"""bench.growth runs with a few Services, endpoints and flows."""

import argparse
import os

import pytest

from bench import growth


@pytest.mark.extended
def test_it_measures_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size, from 1 to the largest, has a figure of each kind."""
    monkeypatch.setattr(growth, "PREFIX", f"ebpflb-test-{os.getpid()}-growth")
    monkeypatch.setattr(growth, "CALLS", 5)
    few = argparse.Namespace(services=12, endpoints=3, flows=20, rounds=1, changes=1)
    rows = [line for line in growth.measured_lines(few) if not isinstance(line, str)]
    sizes = {(row.axis, row.at) for row in rows}
    assert sizes == {
        *(("services", size) for size in (1, 10, 12)),
        *(("endpoints", size) for size in (1, 3)),
        *(("connections", size) for size in (1, 10, 20)),
    }
    assert {row.unit for row in rows} == {"ns", "ms", "MB"}


def test_sizes_are_powers_of_ten() -> None:
    """Sizes are powers of ten, and the largest size."""
    assert growth.sizes_up_to(1000) == [1, 10, 100, 1000]
    assert growth.sizes_up_to(50_000) == [1, 10, 100, 1000, 10_000, 50_000]
    assert growth.sizes_up_to(1) == [1]
