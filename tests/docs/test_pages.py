# SPDX-License-Identifier: Apache-2.0
"""README and docs name what exists: files, headings, modules, commands, make targets."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ebpflb.cli import COMMANDS
from tests.docs import pages
from tests.docs.pages import ROOT

every_page = pytest.mark.parametrize("page", pages.PAGES, ids=map(pages.name, pages.PAGES))


INDEX = ROOT / "README.md", ROOT / "docs/README.md"

FOLDERS = "bench", "bpf", "deploy", "docs", "ebpflb", "tests", "vagrant", r"\.ci"
PATH = re.compile(rf"(?<![\w./*<-])(?:{'|'.join(FOLDERS)})/[\w./*<>-]*[\w*>/]")
MODULE = re.compile(r"(?<![\w./-])(?:bench|ebpflb|tests|vagrant)(?:\.[a-z_]\w*)+\b(?![/-])")
NO_MODULE = re.compile(r".*\.(?:json|service|yaml)")
COMMAND = re.compile(r"(?:^|bin/|-- |&& )ebpflb ((?!-)[a-z]+)", re.M)
TARGET = re.compile(r"^(?:\w+: )?make ([a-z][\w-]*)", re.M)
PLACEHOLDER = "<"


def exists(path: str) -> bool:
    """Whether this is a file, a folder, a matching pattern, or a test file without its suffix."""
    path = path.rstrip("/")
    return any(ROOT.glob(path)) or (ROOT / f"{path}.py").is_file()


@every_page
def test_every_link_leads_to_a_file_and_heading(page: Path) -> None:
    for link in pages.links(page):
        assert link.path.exists(), link.path
        assert not link.heading or link.heading in pages.headings(link.path), link


@every_page
def test_every_path_exists(page: Path) -> None:
    """Every path in backticks that begins with a folder of the repository exists."""
    found = {path for text in pages.code(page) for path in PATH.findall(text)}
    assert {it for it in found if PLACEHOLDER not in it and not exists(it)} == set()


def test_paths_in_sources() -> None:
    """Every file that a comment or docstring of bpf/ and ebpflb/ names exists."""
    sources = [*ROOT.glob("bpf/**/*.[ch]"), *ROOT.glob("ebpflb/**/*.py")]
    found = {path for each in sources for path in PATH.findall(each.read_text()) if "." in path}
    assert {it for it in found if PLACEHOLDER not in it and not exists(it)} == set()


@every_page
def test_every_module_exists(page: Path) -> None:
    """Every module in backticks exists, or is the beginning of a longer name."""
    for text in pages.code(page):
        for module in filter(lambda it: not NO_MODULE.fullmatch(it), MODULE.findall(text)):
            assert find_spec(module.rpartition(".")[0]) or find_spec(module), module


@every_page
def test_every_command_exists(page: Path) -> None:
    found = {command for text in pages.code(page) for command in COMMAND.findall(text)}
    assert found <= set(COMMANDS)


@every_page
def test_every_make_target_exists(page: Path) -> None:
    makefiles = ROOT / "Makefile", ROOT / "vagrant/kernels/kernels.mk"
    rules = "\n".join(makefile.read_text() for makefile in makefiles)
    targets = set(" ".join(re.findall(r"^([\w -]+):", rules, re.M)).split())
    assert {target for text in pages.code(page) for target in TARGET.findall(text)} <= targets


def test_every_page_is_named() -> None:
    """README or the list of pages links to every page, except those at the root."""
    named = {link.path for each in INDEX for link in pages.links(each)}
    at_the_root = {ROOT / f"{it}.md" for it in ("ADOPTERS", "MAINTAINERS", "README")}
    assert set(pages.PAGES) - named == at_the_root
