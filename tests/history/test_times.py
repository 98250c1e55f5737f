# SPDX-License-Identifier: Apache-2.0
"""Times as people type them."""

from datetime import datetime

import pytest

from ebpflb.history.records import parse_time

NOW = datetime(2026, 3, 4, 15, 0, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m", datetime(2026, 3, 4, 14, 50)),
        ("1.5h", datetime(2026, 3, 4, 13, 30)),
        ("14:03", datetime(2026, 3, 4, 14, 3)),
        ("9:03:07", datetime(2026, 3, 4, 9, 3, 7)),
        ("16:00", datetime(2026, 3, 3, 16, 0)),
        ("2026-03-01T08:00", datetime(2026, 3, 1, 8, 0)),
        ("2026-03-01 08:00:00.5", datetime(2026, 3, 1, 8, 0, 0, 500000)),
    ],
)
def test_a_time_is_relative_or_in_the_past(text: str, expected: datetime) -> None:
    """A time is relative ("ago"), a past time of day, or a date, in this machine's zone."""
    assert parse_time(text, NOW) == expected.timestamp()


@pytest.mark.parametrize("text", ["", "10", "x", "25:00", "10y", "2026-13-01"])
def test_no_time(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError):
        parse_time(text, NOW)
