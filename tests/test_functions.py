# SPDX-License-Identifier: Apache-2.0
"""The maximum length of functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("ebpflb", "ebpflb_page", "tests", "bench")
PYTHON = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PROGRAMS = sorted(
    path
    for path in (ROOT / "bpf").rglob("*.[ch]")
    if "stub" not in path.relative_to(ROOT).parts  # headers of the kernel
)
MOST_LINES = 40  # of a function, with its head
C_FUNCTION = re.compile(r"(?:^[^\s#/*{}].*\n)(?:^[^\n{}#]+\n)*?^\{\n(?:.*\n)*?^\}", re.M)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements at any depth; the many expressions are no functions."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case):
            yield each
            yield from statements(each)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the first line of each function, and its number of lines."""
    if path.suffix == ".py":
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or 0) - node.lineno + 1
    else:
        for found in C_FUNCTION.finditer(path.read_text()):
            yield found[0].partition("\n")[0], found[0].count("\n") + 1


def test_functions_fit_on_a_screen() -> None:
    """Functions fit on a screen, in C and in Python, also in tests."""
    found = [(str(path), *each) for path in (*PROGRAMS, *PYTHON) for each in functions(path)]
    assert len(found) > 3000
    assert [each for each in found if each[2] > MOST_LINES] == []


def test_mistakes_are_found(tmp_path: Path) -> None:
    """The check above can fail."""
    (other := tmp_path / "other.h").write_text(
        "int f(int a,\n      int b)\n{\n" + "\n" * 38 + "}\n"
    )
    assert list(functions(other)) == [("int f(int a,", 42)]
