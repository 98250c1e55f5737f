# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md: each promise names the tests that show it, and these are there."""

import ast
import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/reliability.md").read_text()
PROMISES = re.findall(
    r"(?m)^\| (?!promise|---)(.+) \| (.+) \|$",
    PAGE.partition("## Promises")[2].partition("\n## ")[0],
)
TESTS = re.compile(r"`(tests/[\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)")


@pytest.mark.parametrize(("promise", "shown"), PROMISES, ids=[row[0][:60] for row in PROMISES])
def test_each_promise_has_tests_that_must_pass(promise: str, shown: str) -> None:
    """Each test that is named is there, and may not fail."""
    named = TESTS.findall(shown)
    assert named
    assert TESTS.sub("", shown).strip("; ") == "", "a file without tests, or a test without a file"
    for file, names in named:
        functions = ast.parse((ROOT / file).read_text()).body
        found = {it.name: it for it in functions if isinstance(it, ast.FunctionDef)}
        for name in re.findall(r"\w+", names):
            assert name in found, f"{file} has no {name}"
            assert not may_fail(found[name]), f"{file}: {name}"


def may_fail(test: ast.FunctionDef) -> bool:
    return any("xfail" in ast.unparse(each) for each in test.decorator_list)


def test_there_are_promises() -> None:
    """The tables are read as they are written."""
    assert len(PROMISES) > 40
