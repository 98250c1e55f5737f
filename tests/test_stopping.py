# SPDX-License-Identifier: Apache-2.0
"""A failing part does not stop the other parts, and every step of the agent's end is taken."""

import os
import threading
import time

import pytest

from ebpflb import stopping
from ebpflb.errors import NodeError
from ebpflb.model.events import PartStatus
from ebpflb.stopping import Parts
from tests.kit.failing import Failing


def fail(error: Exception) -> None:
    raise error


def test_each_is_run_and_what_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each function is run; an error is one log line, a bug has a traceback."""
    run = list[int]()
    stopping.run_all(
        lambda: fail(OSError(30, "Read-only file system", "/run/x")),
        lambda: run.append(1),
        lambda: fail(NodeError("no")),
        lambda: fail(KeyError("strange")),
        lambda: run.append(2),
        failed="ending",
    )
    assert run == [1, 2]
    said = ["ending: /run/x: Read-only file system", "ending: no", "ending: unexpected"]
    assert caplog.messages == said
    assert [bool(each.exc_info) for each in caplog.records] == [False, False, True]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def connected(failing: Failing, clock: Clock) -> Parts:
    """Return the parts of a new agent."""
    made = Parts(clock)
    made.connect(failing.told.append, failing.stopped.set, failing.record)
    return made


def test_a_part_that_fails_is_told_at_once_and_until_it_works(
    failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    """Each error is logged once with its traceback, and not raised further."""
    parts = connected(failing, Clock())
    for _ in range(2):
        assert not parts.attempt("sweep", lambda: fail(KeyError("x")))
    assert not parts.attempt("sweep", lambda: fail(ValueError("out of\nrange")))
    assert parts.attempt("sweep", list)
    assert parts.attempt("sweep", list)
    assert failing.told == [
        PartStatus("sweep", "KeyError: 'x'"),
        PartStatus("sweep", "ValueError: out of range"),
        PartStatus("sweep", None),
    ]
    assert [bool(each.exc_info) for each in caplog.records] == [True, True, False]
    assert not failing.stopped.is_set()


def test_the_agent_ends_for_a_part_that_fails_for_a_minute(failing: Failing) -> None:
    """The agent ends if a part had no success for a minute."""
    clock = Clock()
    parts = connected(failing, clock)
    for now, is_success in ((0, False), (59, False), (60, True), (70, False), (129, False)):
        clock.now = now
        parts.attempt("sweep", list if is_success else lambda: fail(KeyError("x")))
        assert not failing.stopped.is_set()
    clock.now = 130
    parts.attempt("sweep", lambda: fail(KeyError("x")))
    assert failing.stopped.is_set() and parts.ended_for == "sweep"


def fail_for_long(failing: Failing) -> bool:
    """Whether a new agent ends because of a failing part."""
    failing.stopped.clear()
    clock = Clock()
    parts = connected(failing, clock)
    for _ in range(1000):
        clock.now += 1
        parts.attempt("sweep", lambda: fail(KeyError("x")))
    assert parts.is_failing("sweep")
    return failing.stopped.is_set()


def test_the_agent_ends_for_its_parts_at_most_once_in_ten_minutes(failing: Failing) -> None:
    """The limit counts for all agents; a clock that was set back does not extend the wait."""
    assert fail_for_long(failing)
    assert not fail_for_long(failing)
    ended = failing.record.stat().st_mtime
    os.utime(failing.record, (0, ended - stopping.END_EVERY))
    assert fail_for_long(failing)
    os.utime(failing.record, (0, time.time() + 3600))
    assert fail_for_long(failing)


def test_an_agent_that_cannot_record_its_end_goes_on(failing: Failing) -> None:
    """The agent goes on; otherwise it would end again and again."""
    failing.record = failing.record / "missing"
    assert not fail_for_long(failing)


def test_a_thread_that_ends_by_an_exception_ends_the_agent(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent ends, because this process cannot start the thread again."""
    monkeypatch.setattr(threading, "excepthook", stopping.parts.thread_ended)
    for name in ("serve", "compile"):
        thread = threading.Thread(target=fail, args=[ValueError("no")], name=name)
        thread.start()
        thread.join()
    assert failing.told == [
        PartStatus("serve", "ValueError: no"),
        PartStatus("compile", "ValueError: no"),
    ]
    assert failing.stopped.is_set() and stopping.parts.ended_for == "serve"
