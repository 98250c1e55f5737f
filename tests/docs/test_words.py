# SPDX-License-Identifier: Apache-2.0
"""README, docs, alerts and the dashboard use the field's words (docs/architecture.md, Glossary)."""

import re
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

TEXTS = [
    *pages.PAGES,
    ROOT / "deploy/chart/ebpflb/values.yaml",
    ROOT / "deploy/chart/ebpflb/templates/NOTES.txt",
    ROOT / "deploy/grafana/ebpflb.json",
    ROOT / "deploy/prometheus/alerts.yaml",
    ROOT / "deploy/systemd/ebpflb.service",
    ROOT / "deploy/systemd/config.conf",
]
every_text = pytest.mark.parametrize("text", TEXTS, ids=map(pages.name, TEXTS))

# Metaphors and private words for what the field has a name for.
UNWANTED = re.compile(
    r"\b(askers?|astray|beside us|cannot be meant|census|corridors?|cur(e|es|ed)|doors?|fates?"
    r"|floors?|guests?|heirs?|houses?|keeps? up|last words|one's own words?|patience|pictures?"
    r"|remarks?|rooms?|sightings?|story|stories|suspects?|take offence|testif(y|ies)|troubles?"
    r"|what is (said|told|heard)|whoever|whom|witness(es)?)\b",
    re.I,
)


@every_text
def test_words(text: Path) -> None:
    """None of the unwanted words stands in the text; code in backticks is not looked at."""
    assert [found[0] for found in UNWANTED.finditer(pages.prose(text))] == []
