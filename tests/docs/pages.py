# SPDX-License-Identifier: Apache-2.0
"""The pages that people read, split into links, headings, code and prose."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "vagrant/README.md",
    ROOT / "bench/results/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

BLOCK = re.compile(r"^ *```\w*\n.*?^ *```$", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)


class Link(NamedTuple):
    """A relative link: the file that it leads to, and the heading in that file, or ""."""

    path: Path
    heading: str


def name(page: Path) -> str:
    """Return a page's path from the root of the repository."""
    return str(page.relative_to(ROOT))


def code(page: Path) -> Iterator[str]:
    """Return the text in backticks: blocks and spans."""
    text = page.read_text()
    yield from BLOCK.findall(text)
    yield from SPAN.findall(BLOCK.sub("", text))


def links(page: Path) -> Iterator[Link]:
    """Return the links to files of this repository or to headings of the page itself."""
    for target in LINK.findall(SPAN.sub("", BLOCK.sub("", page.read_text()))):
        if ":" not in target:
            path, _, heading = target.partition("#")
            yield Link((page.parent / path).resolve() if path else page, heading)


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    found = HEADING.findall(BLOCK.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", LINK.sub("]", it)).lower().replace(" ", "-") for it in found}


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without the table's head."""
    below = page.read_text().split(f"# {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", below, re.M)
    assert lines, heading
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]
    ]
