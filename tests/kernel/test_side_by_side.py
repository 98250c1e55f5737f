# SPDX-License-Identifier: Apache-2.0
"""Parallel calls to the kernel: all or none succeed, in order."""

import threading
from functools import partial

import pytest

from ebpflb import workers as module
from ebpflb.workers import side_by_side

WAIT_SECONDS = 30.0  # seconds


@pytest.fixture(params=[1, 4])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    number: int = request.param
    monkeypatch.setattr(module, "usable_cores", lambda: number)
    return number


@pytest.mark.usefixtures("cores")
def test_results_are_in_the_order_of_the_calls() -> None:
    """The order does not depend on which call ends first."""
    later = threading.Event()

    def first() -> int:
        return int(later.wait(0.01)) * 0

    def second() -> int:
        later.set()
        return 1

    found = side_by_side([first, second, lambda: 2], lambda _: None)
    assert found == [0, 1, 2]


def test_they_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls that wait for each other both end if there are two cores."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    barrier = threading.Barrier(2)
    found = side_by_side([partial(barrier.wait, WAIT_SECONDS)] * 2, lambda _: None)
    assert sorted(found) == [0, 1]


def fail(text: str) -> int:
    raise OSError(text)


@pytest.mark.usefixtures("cores")
def test_a_failure_discards_what_the_others_made() -> None:
    """The first error in order is raised; the results of other calls are closed."""
    made: list[int] = []
    discarded: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    calls = [partial(make, 0), partial(fail, "first"), partial(make, 2), partial(make, 3)]
    with pytest.raises(OSError, match="first"):
        side_by_side(calls, discarded.append)
    assert sorted(discarded) == sorted(made)
