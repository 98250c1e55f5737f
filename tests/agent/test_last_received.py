# SPDX-License-Identifier: Apache-2.0
"""The agent publishes how old what it knows of the cluster is."""

from ebpflb.model.events import Kind, Replaced
from tests.agent.fakes import Harness


def test_the_status_has_the_time_of_each_kind(harness: Harness) -> None:
    """As RFC 3339, and anew with each turn of the loop."""
    harness.start()
    harness.source.times = {"Service": 0.0, "Node": 60.0}
    harness.send(Replaced(Kind.NODE, {}))
    assert harness.status.last_received == {
        "Service": "1970-01-01T00:00:00+00:00",
        "Node": "1970-01-01T00:01:00+00:00",
    }
