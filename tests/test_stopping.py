# SPDX-License-Identifier: Apache-2.0
"""The agent ends when a thread of it fails, and each step of an end is taken."""

import threading
from collections.abc import Iterator

import pytest

from ebpflb import stopping
from ebpflb.errors import NodeError


def fail(error: Exception) -> None:
    raise error


def test_each_is_run_and_what_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each function is run; an error is one log line, except for mistakes of the program."""
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


@pytest.fixture
def usual_hook() -> Iterator[None]:
    """After the test exceptions of threads are pytest's again."""
    former = threading.excepthook
    yield
    threading.excepthook = former


@pytest.mark.usefixtures("usual_hook")
def test_a_thread_that_fails_ends_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    """If a thread fails, the agent ends, with one line that names the thread and the error.

    The traceback is for -v=4 and more.
    """
    caplog.set_level("DEBUG")
    stopped = threading.Event()
    failed = stopping.FailedThreads(stopped.set)
    thread = threading.Thread(target=fail, args=[ValueError("out of\nrange")], name="removals")
    thread.start()
    thread.join()
    assert stopped.is_set() and failed.name == "removals"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("CRITICAL", "thread removals failed, so the agent exits: ValueError: out of range"),
        ("DEBUG", "thread removals"),
    ]
    assert caplog.records[1].exc_info


@pytest.mark.usefixtures("usual_hook")
def test_a_thread_that_ends_is_no_failure() -> None:
    """Most end with the agent."""
    failed = stopping.FailedThreads(lambda: pytest.fail("stopped"))
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert not failed.name
