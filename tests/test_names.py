# SPDX-License-Identifier: Apache-2.0
"""One name for one thing in the package, and how long its functions and files may be."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ebpflb.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "ebpflb").rglob("*.py"))
TESTS = sorted(path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py"))
PROGRAMS = sorted(
    path
    for path in (ROOT / "bpf").rglob("*.[ch]")
    if "stub" not in path.relative_to(ROOT).parts  # headers of the kernel
)
MOST_LINES = 40  # of a function, with its head
C_FUNCTION = re.compile(r"(?:^[^\s#/*{}].*\n)(?:^[^\n{}#]+\n)*?^\{\n(?:.*\n)*?^\}", re.M)
COMMAND_MODULES = {f"{name}.py" for name in COMMANDS}  # in cli, each named after its command


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def classes(tree: ast.Module) -> Iterator[str]:
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def constants(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives to others: neither private nor a logger or variable of it."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for name in getattr(target, "elts", [target]):
                if isinstance(name, ast.Name) and name.id[0].isupper():
                    yield name.id


def given_twice(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Names of more than one file, each with its files."""
    found = defaultdict(set)
    for name, path in names:
        found[name].add(str(path))
    return {name: sorted(paths) for name, paths in found.items() if len(paths) > 1}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """The first line of each function, and how many it has."""
    if path.suffix == ".py":
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or 0) - node.lineno + 1
    else:
        for found in C_FUNCTION.finditer(path.read_text()):
            yield found[0].partition("\n")[0], found[0].count("\n") + 1


def too_long(paths: Iterable[Path], lines: int) -> list[Path]:
    return [path for path in paths if len(path.read_text().splitlines()) > lines]


@pytest.mark.parametrize("names", [classes, constants])
def test_one_name_for_one_thing(names: Callable[[ast.Module], Iterator[str]]) -> None:
    """No class, and no constant that other modules may import, is named as one elsewhere."""
    found = [(name, path) for path in PACKAGE for name in names(parsed(path))]
    assert given_twice(found) == {}


def test_one_name_for_one_module() -> None:
    """Nor is a file; a module of the command line has its command's name, whatever others have."""
    others = [
        path
        for path in PACKAGE
        if path.name != "__init__.py"
        and not (path.parent.name == "cli" and path.name in COMMAND_MODULES)
    ]
    assert given_twice((path.name, path) for path in others) == {}


def test_functions_fit_on_a_screen() -> None:
    """In C and in Python, of tests too."""
    found = [
        (str(path), *each) for path in (*PROGRAMS, *PACKAGE, *TESTS) for each in functions(path)
    ]
    assert len(found) > 3000
    assert [each for each in found if each[2] > MOST_LINES] == []


def test_files_have_one_subject() -> None:
    """So none is longer than that takes: in C 150 lines, in Python 250, of a test 400."""
    assert too_long(PROGRAMS, 150) + too_long(PACKAGE, 250) + too_long(TESTS, 400) == []


def test_mistakes_are_found(tmp_path: Path) -> None:
    """The checks above can fail."""
    (one := tmp_path / "one.py").write_text("class A: ...\nB, _C = 1, 2\nlog = D = 3\n" * 100)
    (other := tmp_path / "other.h").write_text(
        "int f(int a,\n      int b)\n{\n" + "\n" * 38 + "}\n"
    )
    tree = ast.parse(one.read_text())
    assert {*classes(tree), *constants(tree)} == {"A", "B", "D"}
    assert given_twice([("A", one), ("A", other), ("B", one)]) == {"A": [str(one), str(other)]}
    assert list(functions(other)) == [("int f(int a,", 42)]
    assert too_long([one, other], 250) == [one]
