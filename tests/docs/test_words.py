# SPDX-License-Identifier: Apache-2.0
"""Texts and code use the field's words (docs/architecture.md, Glossary)."""

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
# Identifiers, comments and messages.
CODE = sorted(
    path
    for folder, pattern in (("bpf", "*.[ch]"), ("ebpflb", "*.py"))
    for path in (ROOT / folder).rglob(pattern)
    if "stub" not in path.parts  # headers of the kernel
)
every_text = pytest.mark.parametrize("text", TEXTS, ids=map(pages.name, TEXTS))

# Metaphors and private words for what the field has a name for.
UNWANTED = re.compile(
    r"\b(afresh|askers?|astray|beside us|cannot be meant|census|confines?|corridors?|cur(e|es|ed)"
    r"|doors?|fates?|floors?|guests?|heirs?|houses?|keeps? up|knock(s|ing)?|last words"
    r"|obey(s|ed)?|one's own words?|patience|pictures?|remarks?|rooms?|sight(s|ings?)?|story"
    r"|stories|strangers?|suspects?|take offence|testif(y|ies)|troubles?"
    r"|what is (said|told|heard)|whoever|whom|witness(es)?)\b",
    re.I,
)


@every_text
def test_words(text: Path) -> None:
    """None of the unwanted words stands in the text; code in backticks is not looked at."""
    assert [found[0] for found in UNWANTED.finditer(pages.prose(text))] == []


def words(code: str) -> str:
    """The parts of identifiers as words of their own: ``drop_anew``, ``SocketEnder``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", code).replace("_", " ")


def test_code() -> None:
    """Nor in an identifier, comment or message of programs and package, or a file's name."""
    found = {
        (pages.name(path), word[0])
        for path in CODE
        for word in UNWANTED.finditer(words(f"{path.stem} {path.read_text()}"))
    }
    assert found == set()


def test_mistakes_are_found() -> None:
    """The check above can fail."""
    assert UNWANTED.search(words("def is_told_by_whoever(asked)"))
    assert UNWANTED.search(words("class RoomCensus:"))
    assert not UNWANTED.search(words("histories of a classroom"))
