# SPDX-License-Identifier: Apache-2.0
"""docs/kube-proxy-parity.md against docs/kube-proxy.md, and against the tests that it names.

A row fails here if its test was renamed or removed; so does a metric, flag, endpoint, difference of
the modes, test of upstream (upstream_tests.yaml) or section of kube-proxy.md without a row.
"""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "docs/kube-proxy.md").read_text()
PARITY = (ROOT / "docs/kube-proxy-parity.md").read_text()
UPSTREAM = yaml.safe_load((ROOT / "tests/docs/upstream_tests.yaml").read_text())

NUMBER = re.compile(r"#+ (\d+(?:\.\d+)?)\.? ")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[[\w ]+\])?`")
CONFORMANCE = ROOT / "tests/conformance/cases.py"  # which test_packets_table plays
CASE = re.compile(r"`(tests/[\w/]+\.py)::test_\w+\[([\w ]+)\]`")
NOT_APPLICABLE = re.compile(r"not applicable: \w.{7,}")
ANSWER = re.compile(r"same\b|differs: \w")
SKIPPED = re.compile(r"\bmark\.(skip|xfail)\b")
SOMETIMES = re.compile(
    r"\bmark\.skipif\b|\bpytest\.(skip|importorskip)\b|\bneeds\.bridge_netfilter\b"
)


class Row(NamedTuple):
    """A line of a table, and the headings of the section and of the part of it that it is in."""

    section: str
    part: str
    cells: tuple[str, ...]
    line: int

    @property
    def answer(self) -> str:
        return self.cells[-2]

    @property
    def tests(self) -> list[tuple[str, str]]:
        return TEST.findall(self.cells[-1])


def rows(text: str) -> Iterator[Row]:
    """The rows of all tables, without their head rows."""
    section, part, rule = "", "", False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            part = line.lstrip("# ")
            section = part if line.startswith("## ") else section
        if not line.startswith("|"):
            rule = False
        elif set(line) <= set("|- "):
            rule = True
        elif rule:
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            yield Row(section, part, tuple(cell.strip() for cell in cells), number)


OURS = [row for row in rows(PARITY) if row.section]
AT_THE_HEAD = [row for row in rows(PARITY) if not row.section]


def of(found: Iterable[Row], section: str) -> list[Row]:
    """The rows below the heading with this number, and below its subheadings."""
    number = re.compile(rf"{re.escape(section)}(\.|\s|$)")
    return [row for row in found if number.match(row.part) or number.match(row.section)]


def text_of(number: int) -> str:
    """The text of a section of kube-proxy.md."""
    (text,) = re.findall(rf"^## {number}\b.*?(?=^## |\Z)", RULES, re.M | re.S)
    return str(text)


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def functions(path: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in parsed(path).body if isinstance(each, ast.FunctionDef)}


def marks(path: str, name: str) -> list[str]:
    """The decorators of a test and the marks of its file; a mark with a name as its definition."""
    named = {
        target.id: ast.unparse(each.value)
        for each in parsed(path).body
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    own = [ast.unparse(decorator) for decorator in functions(path)[name].decorator_list]
    return [named.get(mark, mark) for mark in (*own, named.get("pytestmark", ""))]


def is_skipped_somewhere(path: str, name: str) -> bool:
    """Whether a mark, the test itself, or one of its fixtures can skip it."""
    conftest = str(Path(path).parent / "conftest.py")
    fixtures = functions(conftest) if (ROOT / conftest).is_file() else {}
    known = fixtures | functions(path)
    used = [known[a.arg] for a in known[name].args.args if a.arg in known]
    bodies = [ast.unparse(each) for each in (known[name], *used)]
    return any(map(SOMETIMES.search, (*marks(path, name), *bodies)))


def test_answered() -> None:
    """Each row says same, differs or not applicable, and has a test or a reason to have none."""
    for row in OURS:
        assert_answered(row)


def assert_answered(row: Row) -> None:
    assert len(row.cells) >= 3 and all(row.cells), row
    named = re.sub(rf"{TEST.pattern}(, )?", "", row.cells[-1])
    if NOT_APPLICABLE.match(row.answer):
        assert named in ("", "-"), row
    else:
        assert ANSWER.match(row.answer), row.answer
        assert row.tests and not named, row.cells[-1]


def test_tests_exist() -> None:
    """Every test that is named is collected by pytest, and none is skipped outright; so is every
    case of a table.
    """
    for row in OURS:
        assert_tests_exist(row)


def assert_tests_exist(row: Row) -> None:
    for path, name in row.tests:
        assert Path(path).name.startswith("test_") and (ROOT / path).is_file(), path
        assert name in functions(path), f"{path} has no {name}"
        assert not any(map(SKIPPED.search, marks(path, name))), f"{path} skips {name}"
    for path, case in CASE.findall(row.cells[-1]):
        tables = (ROOT / path).read_text(), CONFORMANCE.read_text()
        assert any(f'    "{case}": Case(' in it for it in tables), f"{path} has no case {case}"


def test_skipped_tests_are_listed() -> None:
    """The table at the head lists the tests that are skipped on some kernels, and no others."""
    named = {test for row in OURS for test in row.tests}
    assert {test for row in AT_THE_HEAD for test in row.tests} == {
        test for test in named if is_skipped_somewhere(*test)
    }


def test_each_network_file_is_told_its_engine() -> None:
    """The page says of each file of tests/network that a row names by which engine it is shown."""
    listed = re.findall(r"`(test_\w+)`", "\n".join(re.findall(r"^- \*.*", PARITY, re.M)))
    told = {name for name in listed if (ROOT / f"tests/network/{name}.py").exists()}
    named = {Path(path).stem for path, _ in TEST.findall(PARITY) if "/network/" in path}
    assert named <= told


def test_files_are_those_that_make_test_all_runs() -> None:
    """pytest collects from tests/, so `make test-all` runs every test that is named there."""
    assert re.search(r"^testpaths = tests$", (ROOT / "setup.cfg").read_text(), re.M)
    command = ["make", "--dry-run", "--always-make", "test-all"]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^\.venv/bin/python -m pytest -n \d+ +\|\|", planned, re.M)


def headings() -> list[str]:
    """The numbers of the sections 1 to 19 and of their subsections."""
    found = [match[1] for line in RULES.splitlines() if (match := NUMBER.match(line))]
    return [number for number in found if float(number) < 20]


@pytest.mark.parametrize("section", headings())
def test_section_has_rows(section: str) -> None:
    """Every section of kube-proxy.md up to the unit tests has rows below a heading of its own."""
    assert of(OURS, section)


def test_order() -> None:
    """The sections are in kube-proxy.md's order."""
    ours = [match[1] for line in PARITY.splitlines() if (match := NUMBER.match(line))]
    assert [number for number in ours if number in headings()] == [
        number for number in headings() if number in ours
    ]


def test_differences_of_the_modes() -> None:
    """All 14 rows of section 12, by number and topic."""
    listed = [row.cells[:2] for row in of(rows(RULES), "12")]
    assert len(listed) == 14
    assert [row.cells[:2] for row in of(OURS, "12")] == listed


ENDPOINT = re.compile(r"`(/[\w/*]+)`")


@pytest.mark.parametrize(("section", "port"), [("13.1", "10256"), ("13.2", "10249")])
def test_endpoints(section: str, port: str) -> None:
    """Every path that is served on either port has a row."""
    (text,) = re.findall(rf"^### {section} .*?(?=^##+ )", RULES, re.M | re.S)
    paths = set(ENDPOINT.findall(text.split("e2e requires")[0]))
    assert port in text and "/healthz" in paths
    mentioned = {path for row in of(OURS, section) for path in ENDPOINT.findall(row.cells[0])}
    assert paths - mentioned == set()


METRIC = re.compile(r"\b((?:kubeproxy|kubernetes|rest_client|go|process)_[\w*]+)")


def test_metrics() -> None:
    """Every metric of section 14 has a row, also those of the libraries."""
    listed = set(METRIC.findall(text_of(14)))
    assert len(listed) > 25
    assert {name for row in of(OURS, "14") for name in METRIC.findall(row.cells[0])} == listed


def test_flags() -> None:
    """Every row of section 15, by its flags, or by its fields if it has none, in the same order."""
    listed = [row.cells[1] if row.cells[0] == "-" else row.cells[0] for row in rows(text_of(15))]
    assert len(listed) > 30
    ours = [row.cells[0] for row in of(OURS, "15")]
    first = ours.index(listed[0])
    assert ours[first : first + len(listed)] == listed


@pytest.mark.parametrize("section", UPSTREAM)
def test_tests_of_upstream(section: str) -> None:
    """Every e2e test and every unit test of upstream has its row."""
    assert [row.cells[0] for row in of(OURS, section)] == UPSTREAM[section]


def test_mistakes_are_found() -> None:
    """The checks above can fail."""
    text = "## 1 X\n| rule | ebpflb | test |\n|---|---|---|\n"
    row = next(
        rows(text + "| a | same | `tests/docs/test_parity.py::test_nothing_of_the_kind` |\n")
    )
    with pytest.raises(AssertionError):
        assert_tests_exist(row)
    for cells in ("| a | same | - |", "| a | not applicable: | - |", "| a | likewise | - |"):
        with pytest.raises(AssertionError):
            assert_answered(next(rows(f"{text}{cells}\n")))
