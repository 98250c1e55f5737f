# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md says of every metric what it says of itself, and of no other."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.serve import subjects
from tests.serve.kube_proxy_table import OURS, TABLE

OF_A_LIBRARY = "process_", "python_"  # which says itself what they mean
PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()


class Row(NamedTuple):
    type: str
    labels: str
    meaning: str


def rows() -> dict[str, Row]:
    """Of the tables with four columns."""
    found = re.findall(r"(?m)^\| (\w+) \| (\w+) \| ([\w, -]+) \| (.+) \|$", PAGE)
    return {name: Row(*rest) for name, *rest in found if name != "name"}


def test_page_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, type, labels and meaning are those of an exposition, all of them and no more,
    but for those that prometheus_client has of itself.
    """
    made = subjects.everything(monkeypatch)
    bodies = made.exposition().body, made.slis_exposition().body
    every = {name: m for body in bodies for name, m in subjects.families(body).items()}
    shown = {name: m for name, m in every.items() if not name.startswith(OF_A_LIBRARY)}
    assert shown.keys() < every.keys()
    expected = {
        name: Row(
            metric.type,
            ", ".join(sorted({key for s in metric.samples for key in s.labels} - {"le"})) or "-",
            metric.documentation,
        )
        for name, metric in shown.items()
    }
    assert rows() == expected


def test_what_is_left_out_has_a_reason() -> None:
    """Every metric of section 14 that is not shown is named with why not."""
    reasons = re.findall(r"(?m)^\| ([\w*, ]+) \| ([^|]+) \|$", PAGE)
    named = {name for names, _ in reasons for name in names.split(", ")}
    assert TABLE.keys() - OURS.keys() <= named
    assert not named & OURS.keys()
