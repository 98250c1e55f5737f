# SPDX-License-Identifier: Apache-2.0
"""Rows are printed as kubectl prints them."""

from typing import Any

import pytest

from ebpflb.cli.monitor import EventLines
from ebpflb.cli.output import Output, table_lines
from ebpflb.tools.events import Told

LONG = "a-name-of-a-service-" * 4


def drawn(*rows: dict[str, object], **how: Any) -> list[str]:
    return list(table_lines(rows, **how))


def test_columns_are_as_wide_as_their_content() -> None:
    """Columns are as wide as their content and two blanks apart, numbers are aligned right,
    booleans are yes or no, and an empty cell counts as a column.
    """
    rows = [
        {"name": "a", "idle_seconds": 7, "took": "12.5 µs", "pod": "", "ok": True},
        {"name": "longer", "idle_seconds": 1.5, "took": "3.0 µs", "pod": "web-1", "ok": False},
    ]
    assert drawn(*rows) == [
        "NAME    IDLE-SECONDS     TOOK  POD     OK",
        "a                  7  12.5 µs  <none>  yes",
        "longer           1.5   3.0 µs  web-1   no",
    ]


def test_rows_that_come_one_by_one() -> None:
    """Columns have their minimum widths; a longer cell lengthens only its own line."""
    least = {"from": 6, "to": 4}
    assert list(table_lines([{"from": "a", "to": "b"}], headers=False, least=least)) == [
        "a       b"
    ]
    (line,) = table_lines([{"from": "longer-one", "to": "b"}], headers=False, least=least)
    assert line == "longer-one  b"


def test_columns_of_events_widen(capsys: pytest.CaptureFixture[str]) -> None:
    """A longer cell widens the column for all later lines."""
    lines = EventLines(Output())
    for service in ("shop/web:http/TCP", f"shop/{LONG}", "shop/web:http/TCP"):
        rest = (service, "10.96.0.10:80", "", "", "", 1)
        lines.show(Told("now", "connect", "translated", "TCP", "curl", 7, "", "", *rest))
    places = [line.find("10.96.0.10") for line in capsys.readouterr().out.splitlines()]
    assert places[0] == -1 and places[1] < places[2] == places[3]
