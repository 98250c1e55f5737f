# SPDX-License-Identifier: Apache-2.0
"""docs/conformance.md has a row for each case, and its rows add up."""

import re

from tests.conformance.cases import CASES
from tests.docs.pages import ROOT

ROWS = re.findall(r"^\| (?!case|--)(.+) \|$", (ROOT / "docs/conformance.md").read_text(), re.M)
RESULTS = {name: cells for name, *cells in (row.split(" | ") for row in ROWS)}
REQUESTS = {
    name: sum(4 * len(row.clients.split()) * len(row.kinds.split()) for row in case.rows)
    for name, case in CASES.items()
}


def passed_of(cell: str) -> tuple[int, int]:
    """Return the number that pass and the total, from a text such as "148, 56 differ"."""
    passed, *differ = map(int, re.findall(r"\d+", cell))
    return passed, passed + sum(differ)


def test_each_case_has_its_row() -> None:
    """The row has the case's number of requests: two protocols in two families for each."""
    assert list(RESULTS) == [*CASES, "all"]
    for name, requests in REQUESTS.items():
        assert {passed_of(cell)[1] for cell in RESULTS[name]} == {requests}, name


def test_rows_add_up() -> None:
    for number, cell in enumerate(RESULTS["all"]):
        column = [passed_of(RESULTS[name][number]) for name in CASES]
        assert passed_of(cell) == tuple(map(sum, zip(*column, strict=True)))
