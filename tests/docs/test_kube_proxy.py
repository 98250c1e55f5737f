# SPDX-License-Identifier: Apache-2.0
"""docs/kube-proxy.md: each rule and each difference has tests, and these exist.

kube_proxy.yaml names the tests: a renamed or removed test fails here, and so does a difference,
section or flag of the page without tests.
"""

import re
from collections import Counter

import pytest
import yaml

from ebpflb.config.parameters import PARAMETERS
from tests.docs.named_tests import assert_exists
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/kube-proxy.md").read_text()
SHOWN_BY: dict[str, dict[str, list[str] | str]] = yaml.load(
    (ROOT / "tests/docs/kube_proxy.yaml").read_text(), yaml.CSafeLoader
)
DIFFERENCE = "ebpflb: "


def sections(page: str) -> dict[str, str]:
    """Return the text below each numbered heading."""
    parts = re.split(r"^#+ (\d+(?:\.\d+)?)\.? .*\n", page, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def differences(text: str) -> list[str]:
    """Return the marked differences; in tables with a column ebpflb, the cells of that column."""
    found = re.findall(r"\*\*ebpflb:\*\* (.+)$", text, re.M)
    for table in re.findall(r"^\|.*\| ebpflb \|\n\|[-|]+\n((?:\|.*\n)+)", text, re.M):
        rows = [[it.strip() for it in row.strip("|").split("|")] for row in table.splitlines()]
        found += [f"{row[0]}: {row[-1]}" for row in rows if row[-1]]
    return found


def assert_is_shown(section: str, text: str) -> None:
    """Check that each difference begins like one key of the section, and each key like a
    difference.
    """
    begins = [it.removeprefix(DIFFERENCE) for it in SHOWN_BY[section] if it.startswith(DIFFERENCE)]
    listed = Counter(begin for it in differences(text) for begin in begins if it.startswith(begin))
    assert listed == Counter(begins)
    assert listed.total() == len(differences(text)), differences(text)


@pytest.mark.parametrize(("section", "text"), sections(PAGE).items(), ids=sections(PAGE).keys())
def test_each_section_is_shown(section: str, text: str) -> None:
    """Each section, or each of its parts, has tests, and so has each difference."""
    parts = [it for it in SHOWN_BY if f"{it}.".startswith(f"{section}.")]
    assert parts
    if section in parts or differences(text):
        assert_is_shown(section, text)


@pytest.mark.parametrize("section", SHOWN_BY)
def test_tests_exist(section: str) -> None:
    """Each rule has tests, or a reason for having none."""
    for rule, tests in SHOWN_BY[section].items():
        assert tests, rule
        for test in tests if isinstance(tests, list) else ():
            assert_exists(test)


def test_every_flag_has_tests() -> None:
    """Every flag of section 15 has tests."""
    rules = [it.removeprefix(DIFFERENCE) for it in SHOWN_BY["15"]]
    flags = re.findall(r"^\| (-[^|]*[^|-]) \|", sections(PAGE)["15"], re.M)
    assert len(flags) >= 30
    assert [it for it in flags if not any(rule[:40].startswith(it[:40]) for rule in rules)] == []


def test_flags_without_effect() -> None:
    """For each flag without effect the page says so."""
    rows = re.findall(r"^\| (-[^|]*) \|.*\| ([^|]*) \|$", sections(PAGE)["15"], re.M)
    told = {flag: said for flags, said in rows for flag in re.findall(r"--([\w-]+)", flags)}
    ignored = {it.flag for it in PARAMETERS if it.ignored}
    assert len(told.keys() & ignored) >= 8
    for flag, said in told.items():
        assert flag not in ignored or re.search("no effect|not read", said), flag
        assert flag in ignored or not said.startswith("no effect"), flag
