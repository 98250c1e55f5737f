# SPDX-License-Identifier: Apache-2.0
"""The diagrams in docs/diagrams: each SVG is drawn from its source, and names what exists."""

import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ebpflb.kernel.maps import layout
from tests.docs.pages import ROOT

SOURCES = sorted((ROOT / "docs/diagrams").glob("*.dot"))
every_diagram = pytest.mark.parametrize("source", SOURCES, ids=[it.stem for it in SOURCES])

SVG = "{http://www.w3.org/2000/svg}"
FILE = re.compile(r"(?:\w+/)+\w+\.(?:c|h|py)")
MAP = re.compile(r'port="(\w+)"')


def shown(svg: str) -> list[tuple[str, list[str]]]:
    """Return nodes and edges by name with their lines of text, equal for every version of dot."""
    groups = [it for it in ElementTree.fromstring(svg).iter(f"{SVG}g") if it.get("class")]
    return sorted(
        (
            group.findtext(f"{SVG}title") or "",
            [text.text or "" for text in group.iter(f"{SVG}text")],
        )
        for group in groups
        if group.get("class") in ("node", "edge")
    )


@every_diagram
def test_drawn_from_its_source(source: Path) -> None:
    """`make diagrams` would change no node, edge or text."""
    drawn = subprocess.run(["dot", "-Tsvg", source], check=True, capture_output=True, text=True)
    found = shown(source.with_suffix(".svg").read_text())
    assert len(found) > 10
    assert found == shown(drawn.stdout)


@every_diagram
def test_names_what_exists(source: Path) -> None:
    """Boxes are files below bpf/ and ebpflb/, and cells are maps."""
    text = source.read_text().replace("\\n", "")
    for file in FILE.findall(text):
        assert (ROOT / "bpf" / file).is_file() or (ROOT / "ebpflb" / file).is_file(), file
    assert set(MAP.findall(text)) <= layout.MAPS.keys()
    small = re.findall(r'<font point-size="9">([\w, ]+)</font>', text)
    used = {name for names in small for name in names.split(", ")} - {"ingress", "egress"}
    assert used and used <= layout.MAPS.keys()
