# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md describes every metric of ebpflb with the metric's own help text, and no other.
kube-proxy's metrics are in docs/kube-proxy.md, and tests/serve/test_metrics_kube_proxy.py compares
them.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.serve import subjects
from tests.serve.kube_proxy_table import OF_OTHER_MODES, OURS

OF_A_LIBRARY = "process_", "python_"  # which says itself what they mean
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text()
KUBE_PROXY = (DOCS / "kube-proxy.md").read_text()


HISTOGRAMS = {"rest_client_request_duration_seconds"}  # of the metrics on this page


class Row(NamedTuple):
    type: str
    labels: str
    meaning: str


def rows() -> dict[str, Row]:
    """Return the rows of the tables; the page says which names have which type."""
    found = re.findall(r"(?m)^\| `(\w+)(?:\{([\w,]+)\})?` \| (.+) \|$", PAGE)
    return {name: Row(type_of(name), labels, meaning) for name, labels, meaning in found}


def type_of(name: str) -> str:
    if name in HISTOGRAMS:
        return "histogram"
    return "counter" if name.endswith("_total") else "gauge"


def test_page_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, types, labels and meanings equal an exposition's, except for kube-proxy's metrics, and
    those of prometheus_client about itself.
    """
    made = subjects.everything(monkeypatch)
    bodies = made.exposition().body, made.slis_exposition().body
    every = {name: m for body in bodies for name, m in subjects.families(body).items()}
    assert {*OURS, "process_cpu_seconds_total"} < every.keys()
    shown = {
        name: m
        for name, m in every.items()
        if not name.startswith(OF_A_LIBRARY) and name not in OURS
    }
    expected = {
        name: Row(
            metric.type,
            ",".join(sorted({key for s in metric.samples for key in s.labels} - {"le"})),
            metric.documentation,
        )
        for name, metric in shown.items()
    }
    assert rows() == expected


def test_what_is_left_out_has_a_reason() -> None:
    """kube-proxy.md says why each missing metric of section 14 has no meaning here."""
    rows = re.findall(r"(?m)^- (`kubeproxy_.+): \*\*ebpflb:\*\* none: ", KUBE_PROXY)
    assert set(re.findall(r"\w+", " ".join(rows))) == OF_OTHER_MODES
