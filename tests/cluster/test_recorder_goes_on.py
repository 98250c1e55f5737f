# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong when an event is sent, the next ones are sent too."""

import json

import pytest

from ebpflb.cluster import recorder
from ebpflb.cluster.recorder import ApiRecorder
from ebpflb.errors import ClusterError
from tests.cluster.heard import NODE, QUICK

STARTING = (recorder.node(NODE), "Normal", "Starting", "StartKubeProxy")


def test_unforeseen(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever goes wrong is a line, and the event is told later, as are those after it."""
    told: list[str] = []
    failures = [RuntimeError("can't start new thread"), ClusterError("away")]

    class Server:
        def create(self, path: str, body: bytes) -> None:
            if failures:
                raise failures.pop(0)
            told.append(json.loads(body)["note"])

    sending = ApiRecorder(Server, NODE, pace=QUICK)
    sending.start()
    for number in range(2):
        sending.event(*STARTING, f"the {number}th")
    sending.stop()
    assert told == ["the 0th", "the 1th"]
    assert caplog.messages == [
        'events cannot be told to the API server: RuntimeError("can\'t start new thread")',
        "events cannot be told to the API server: away",
    ]
