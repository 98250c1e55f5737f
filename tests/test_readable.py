# SPDX-License-Identifier: Apache-2.0
"""readable() waits for descriptors, whatever their numbers."""

import os
import socket

from ebpflb.workers import readable
from tests.kit.descriptors import beyond_1023


def test_only_those_that_can_be_read() -> None:
    """The function returns sockets or numbers, as given; none after the time-out."""
    near, far = socket.socketpair()
    number = os.eventfd(0)
    both: list[socket.socket | int] = [near, number]
    with near, far:
        assert readable(both, 0.0) == []
        far.send(b"x")
        assert readable(both, 60.0) == [near]
        os.eventfd_write(number, 1)
        assert set(readable(both, 60.0)) == {near, number}
    os.close(number)


def test_beyond_1023() -> None:
    """The function works with descriptors for which select(2) fails."""
    with beyond_1023():
        number = os.eventfd(1)
        assert number > 1023
        assert readable([number], 60.0) == [number]
        os.close(number)
