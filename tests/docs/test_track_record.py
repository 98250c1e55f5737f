# SPDX-License-Identifier: Apache-2.0
"""docs/track-record.md: the tests that reproduce a defect exist."""

import re

from tests.docs import pages
from tests.docs.named_tests import assert_exists
from tests.docs.pages import ROOT

PAGE = ROOT / "docs/track-record.md"
COMMITS = re.compile(r"[0-9a-f]{8}–[0-9a-f]{8}")
ROWS = pages.rows(PAGE, "Which ones were there?")


def test_each_defect_has_a_test_that_runs() -> None:
    assert len(ROWS) > 50
    for *_, test in ROWS:
        assert_exists(test.strip("`"))


def test_each_defect_names_when_it_came_and_went() -> None:
    for _, found_by, commits, _ in ROWS:
        assert found_by in ("", "load", "review", "simulation", "tests", "trial")
        assert COMMITS.fullmatch(commits)
