# SPDX-License-Identifier: Apache-2.0
"""docs/conformance.md has each case in a row, and its rows add up."""

import re

from tests.conformance.cases import CASES
from tests.docs.pages import ROOT

ROWS = re.findall(r"^\| (?!cases|--)(.+) \|$", (ROOT / "docs/conformance.md").read_text(), re.M)
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
    """A row has the number of requests of its cases: two protocols in two families for each."""
    *rows, every = RESULTS
    assert ", ".join(rows).split(", ") == [*CASES] and every == "all"
    for names in rows:
        requests = sum(map(REQUESTS.__getitem__, names.split(", ")))
        assert {passed_of(cell)[1] for cell in RESULTS[names]} == {requests}, names


def test_rows_add_up() -> None:
    *rows, every = RESULTS
    for number, cell in enumerate(RESULTS[every]):
        column = [passed_of(RESULTS[names][number]) for names in rows]
        assert passed_of(cell) == tuple(map(sum, zip(*column, strict=True)))
