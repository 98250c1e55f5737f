# SPDX-License-Identifier: Apache-2.0
"""Descriptors are waited for, whatever their numbers."""

import os
import socket

from ebpflb.workers import readable
from tests.kit.descriptors import beyond_1023


def test_only_those_that_can_be_read() -> None:
    """A socket or a number, as it was given; none when the time is over."""
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
