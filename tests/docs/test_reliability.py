# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md: each promise names the tests that show it, and these are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text()
ROW = r"(?m)^\| (?!promise|---)(.+) \| (.+) \| (.+) \|$"
PROMISES = re.findall(ROW, PAGE.partition("## Promises")[2])


@pytest.mark.parametrize(
    ("promise", "shown", "figures"), PROMISES, ids=[it[0][:60] for it in PROMISES]
)
def test_each_promise_has_tests_and_figures(promise: str, shown: str, figures: str) -> None:
    """Each file that is named has at least one that must pass."""
    assert re.search(r"\d", figures)
    files = re.findall(r"`(tests/[\w/]+\.py)`", shown)
    assert files
    for file in files:
        tree = ast.parse((ROOT / file).read_text())
        found = [it for it in tree.body if isinstance(it, ast.FunctionDef)]
        assert any(it.name.startswith("test_") and not may_fail(it) for it in found), file


def may_fail(test: ast.FunctionDef) -> bool:
    return any("xfail" in ast.unparse(each) for each in test.decorator_list)


def test_there_are_promises() -> None:
    """The table is read as it is written."""
    assert len(PROMISES) > 20
