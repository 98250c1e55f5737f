# SPDX-License-Identifier: Apache-2.0
"""The cases of tests.conformance with each engine."""

from tests.conformance.cases import CASES
from tests.kit import cells
from tests.kit.cells import Case
from tests.kit.parameters import both_engines, families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import TwoNodes

pytestmark = both_engines

case = cells.fixture(CASES)


@families
@protocols
@cells.rows(CASES)
def test_a_client_meets_what_the_row_says(
    two: TwoNodes, case: Case, who: str, number: int, kind: str, cell: str, v6: bool, send: Send
) -> None:
    """A client gets the result in the row, and each request is counted."""
    where = cells.at(two, number, kind, v6=v6)
    before = two.verdict(case.verdict) if case.verdict else 0
    cells.assert_cell(two, who, where, cell, send)
    assert not case.verdict or two.verdict(case.verdict) > before
