# SPDX-License-Identifier: Apache-2.0
"""The tests that a page or a list names exist, and none of them is skipped."""

import ast
import re
from functools import cache

from tests.docs.pages import ROOT

CONFORMANCE = ROOT / "tests/conformance/cases.py"  # which test_packets_table plays
TEST = re.compile(r"(tests/(?:[\w/]+/)?test_\w+\.py)::(test_\w+)(?:\[([\w ]+)\])?")
SKIPPED = re.compile(r"\bmark\.(skip|xfail)\b")


@cache
def marks_in(path: str) -> dict[str, str]:
    """Return the pytest marks of each test in a file, including the marks of the whole file."""
    body = ast.parse((ROOT / path).read_text()).body
    everywhere = "".join(ast.unparse(it) for it in body if "pytestmark" in ast.unparse(it)[:10])
    return {
        it.name: " ".join([everywhere, *map(ast.unparse, it.decorator_list)])
        for it in body
        if isinstance(it, ast.FunctionDef)
    }


def assert_exists(test: str) -> None:
    """Check that the test exists, with the named case of its table, and is never skipped
    altogether.
    """
    named = TEST.fullmatch(test)
    assert named, test
    path, name, case = named.groups()
    assert name in marks_in(path), test
    assert not SKIPPED.search(marks_in(path)[name]), test
    tables = (ROOT / path).read_text(), CONFORMANCE.read_text()
    assert case is None or any(f'    "{case}": Case(' in it for it in tables), test
