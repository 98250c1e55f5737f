# SPDX-License-Identifier: Apache-2.0
"""Each step of an end is taken, whatever those before it did."""

import pytest

from ebpflb import stopping
from ebpflb.errors import NodeError


def fail(error: Exception) -> None:
    raise error


def test_each_is_run_and_what_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """In one line, unless it is a mistake of the program."""
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
