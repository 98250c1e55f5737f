# SPDX-License-Identifier: Apache-2.0
"""If sending an event fails for any reason, the next ones are sent too."""

import json
import threading
from typing import Any, cast

import pytest

from ebpflb.cluster import event_recorder
from ebpflb.cluster.event_recorder import EventRecorder
from ebpflb.errors import ClusterError
from ebpflb.model.events import PartStatus
from tests.cluster.event_log import NODE, QUICK
from tests.kit.api_server import WAIT_SECONDS
from tests.kit.failing import Failing


def test_unforeseen(failing: Failing, caplog: pytest.LogCaptureFixture) -> None:
    """After any failure the event and all later ones are sent; a mistake of ours is told."""
    sent: list[str] = []
    failures = [RuntimeError("can't start new thread"), ClusterError("away")]

    class Server:
        def create(self, path: str, body: bytes) -> None:
            if failures:
                raise failures.pop(0)
            sent.append(json.loads(body)["note"])

    sending = EventRecorder(cast(Any, Server), NODE, timing=QUICK, stop_timeout=WAIT_SECONDS)
    sending.start()
    for number in range(2):
        _record(sending, f"the {number}th")
    sending.stop()
    assert sent == ["the 0th", "the 1th"]
    assert "events cannot be sent to the API server: away" in caplog.messages
    assert failing.told == [
        PartStatus("events", "RuntimeError: can't start new thread"),
        PartStatus("events", None),
    ]
    caplog.clear()


def test_gives_up_in_the_end() -> None:
    """An event that fails for other reasons has twelve attempts, then the next has its own."""
    asked: list[bytes] = []
    done = threading.Event()

    class Broken:
        def create(self, path: str, body: bytes) -> None:
            asked.append(body)
            if len(asked) == 13:
                done.set()
            raise ClusterError("no route to host")

    it = EventRecorder(cast(Any, Broken), NODE, timing=QUICK, stop_timeout=0.0)
    it.start()
    for note in ("first", "second"):
        _record(it, note)
    assert done.wait(WAIT_SECONDS)
    it.stop()
    assert len(set(asked[:12])) == 1
    assert asked[12] != asked[0]
    assert it.dropped >= 1


def _record(recorder: EventRecorder, note: str) -> None:
    recorder.event(event_recorder.node(NODE), "Normal", "Starting", "StartKubeProxy", note)
