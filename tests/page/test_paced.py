# SPDX-License-Identifier: Apache-2.0
"""A value that takes long to read holds up no client that has seen an earlier one."""

from threading import Event
from typing import Any

import pytest

from ebpflb.errors import NodeError
from ebpflb.lab.agents import wait_until


class Slow:
    """Readings take five seconds by its clock; one goes on until ``goes_on`` is set."""

    def __init__(self) -> None:
        self.now, self.count, self.goes_on, self.fails = 0.0, 0, Event(), False
        self.goes_on.set()

    def read(self) -> int:
        self.goes_on.wait()
        if self.fails:
            raise NodeError("no maps")
        self.now, self.count = self.now + 5, self.count + 1
        return self.count


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def paced(slow: Slow) -> Any:
    """Return one with a first value; a reading takes a tenth of the time, so the next is due in 45
    s.
    """
    from ebpflb_page.rate_meter import Paced

    made = Paced(slow.read, 10, lambda: slow.now)
    assert made.get() == 1
    return made


def test_the_last_value_is_given_while_the_next_is_read(slow: Slow, paced: Any) -> None:
    slow.goes_on.clear()
    slow.now += 46
    assert [paced.get() for _ in range(3)] == [1, 1, 1]
    slow.goes_on.set()
    wait_until("it is read", lambda: paced.get() == 2)
    assert slow.count == 2


def test_a_value_that_is_much_too_old_is_not_given(slow: Slow, paced: Any) -> None:
    """After an hour without clients the first one waits."""
    slow.now += 3600
    assert paced.get() == 2


def test_an_error_of_such_a_reading_is_given_to_the_next_client(slow: Slow, paced: Any) -> None:
    """When the error is over there is a value again."""
    slow.fails = True
    slow.now += 46

    def is_refused() -> bool:
        try:
            paced.get()
        except NodeError:
            return True
        return False

    wait_until("it fails", is_refused)
    slow.fails = False
    assert paced.get() == 2
