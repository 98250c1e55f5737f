# SPDX-License-Identifier: Apache-2.0
"""Readiness and liveness detect a loop that hangs, but not a loop that starts or is late."""

import threading

import pytest

from ebpflb.agent.loop import Call
from ebpflb.lab.agents import wait_until
from ebpflb.model.nodes import DEAD_SECONDS, STALLED_SECONDS
from ebpflb.serve.health import Health
from ebpflb.serve.listener import Request
from tests.agent.fakes import Harness
from tests.agent.told import EVERYTHING
from tests.kit.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(harness: Harness, clock: Clock) -> Harness:
    harness.health = Health(timeout=3600, monotonic=clock)
    return harness


def codes(health: Health) -> list[int]:
    return [health.respond(Request(path, "")).status for path in ("/readyz", "/livez")]


def test_a_loop_that_hangs(timed: Harness, clock: Clock) -> None:
    """The node is not ready after half a minute, and the agent is restarted after a minute."""
    timed.start()
    timed.send(*EVERYTHING)
    wait_until("it is ready", lambda: timed.health.ready)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        goes_on.wait(60)

    timed.inbox.put(Call(hang))
    assert hangs.wait(60)
    begun = clock.now
    clock.now = begun + STALLED_SECONDS - 1
    assert codes(timed.health) == [200, 200]
    clock.now = begun + STALLED_SECONDS
    assert codes(timed.health) == [503, 200]
    asked = Request("/readyz", "", on_loopback=True)
    assert b"the agent's loop has not run for 30 s" in timed.health.respond(asked).body
    clock.now = begun + DEAD_SECONDS
    assert codes(timed.health) == [503, 503]
    goes_on.set()
    wait_until("it is well again", lambda: codes(timed.health) == [200, 200])


def test_a_start_may_take_long(timed: Harness, clock: Clock) -> None:
    """An agent whose first sync is not complete is not restarted because its loop takes long."""
    timed.start()
    timed.send()
    clock.now = 100 * DEAD_SECONDS
    assert codes(timed.health) == [503, 200]
    assert timed.health.pulse.silent == 0
