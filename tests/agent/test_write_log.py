# SPDX-License-Identifier: Apache-2.0
"""Plans in the log: a lone one at once, many share one line per second."""

import logging
import math
from ipaddress import IPv4Address

import pytest

from ebpflb.agent.service_sync import LOG_LINE_SECONDS, WriteLog
from ebpflb.entries.services import Backend
from ebpflb.plan.planner import Plan
from tests.kit.clock import Clock

PLAN = Plan(
    slots=[(4, Backend(IPv4Address("10.0.0.1"), 80, frozenset({"cluster"}), 7, 1))],
    removed_backend_names=[3],
)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_plans_of_a_second_share_a_line_and_none_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(1000.0)
    written = WriteLog(clock)
    for _ in range(101):
        written.wrote(PLAN, 0.001, 0.002)
        written.turn()
    assert len(lines(caplog)) == 1
    assert written.due == clock.now + LOG_LINE_SECONDS
    clock.now = written.due
    written.turn()
    assert lines(caplog)[1:] == [
        "wrote 100 changes: 0 frontends (0 removed), 100 slots, 100 backends removed; "
        "planned in 100.0 ms, written in 200.0 ms"
    ]
    assert written.due == math.inf
