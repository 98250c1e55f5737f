# SPDX-License-Identifier: Apache-2.0
"""If no Node has this node's name, the agent serves, and reports the problem clearly."""

import pytest

from ebpflb.lab import manifests
from ebpflb.model.events import Kind, Replaced
from tests.agent.fakes import Harness, changed, listed, service, slices

SERVICES = listed(Kind.SERVICE, service("a", "10.96.0.1"))
SLICES = listed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1"))
OURS = manifests.node("node-1", "192.0.2.1")


def test_it_is_said_in_status_log_and_an_event_until_the_node_is_there(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Services are still programmed; the warning and the event come once."""
    notes: list[str] = []
    harness.record_unknown_node = notes.append
    harness.start()
    harness.send(SERVICES, SLICES)
    assert harness.status.node_unknown is None  # no one knows yet
    harness.send(Replaced(Kind.NODE, {}))
    said = f'no Node "node-1" in {harness.options.source}'
    assert harness.status.node_unknown == said
    assert harness.status.service_ports == 1
    harness.send(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.2")))
    assert notes == [said]
    warnings = [it.getMessage() for it in caplog.records if "no Node" in it.getMessage()]
    assert warnings == [f"{said}: /healthz answers 503; set --hostname-override"]
    harness.send(changed(Kind.NODE, OURS))
    assert harness.status.node_unknown is None
