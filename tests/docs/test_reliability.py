# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md: each promise has tests, and these exist."""

import ast
import re
from functools import cache
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT

PROMISES: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/docs/promises.yaml").read_text())


@pytest.mark.parametrize("each", PROMISES, ids=[it["promise"][:60] for it in PROMISES])
def test_each_promise_has_tests_that_must_pass(each: dict[str, Any]) -> None:
    """Each named test exists, and may not fail."""
    named = [(file, name) for file, names in each["shown by"].items() for name in names]
    assert named
    for file, name in named:
        assert name in functions(file), f"{file} has no {name}"
        assert not may_fail(functions(file)[name]), f"{file}: {name}"


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    body = ast.parse((ROOT / file).read_text()).body
    return {it.name: it for it in body if isinstance(it, ast.FunctionDef)}


def may_fail(test: ast.FunctionDef) -> bool:
    return any("xfail" in ast.unparse(each) for each in test.decorator_list)


def test_the_page_has_these_promises() -> None:
    """Page and list have the same promises in the same order."""
    promises = (ROOT / "docs/reliability.md").read_text().partition("## Promises\n")[2]
    listed = re.findall(r"(?m)^- (.+)$", promises.partition("\n## ")[0])
    assert listed == [each["promise"] for each in PROMISES]
