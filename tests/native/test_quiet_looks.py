# SPDX-License-Identifier: Apache-2.0
"""Which look at a socket ends it (bpf/sockets/quiet.h); tests/kernel/test_quiet_sockets.py has the
kernel's own sockets.
"""

from struct import Struct
from typing import Any, NamedTuple

import pytest

from ebpflb.kernel.maps import layout
from tests.native.build import built

IDLE = 5
READY = layout.ffi.typeof("enum quiet_state").relements["QUIET_READY"]
_NUMBERS, _SOCKET = Struct("=B3x7I4Q"), Struct("=QQ4I")


class Numbers(NamedTuple):
    """struct tcp_numbers of a connection whose server was last, and all of it is acknowledged."""

    state: int = 1  # TCP_ESTABLISHED
    sent: int = 1000
    acknowledged: int = 1000
    received: int = 2000
    read: int = 2000
    acknowledged_by: int = 1900
    last_sent: int = 50
    last_received: int = 60
    backlog: int = 0
    out_of_order: int = 0
    user_data: int = 0
    ulp: int = 0


class Looked:
    """A socket that the agent wants ended, or not, once it is between two requests."""

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._module: Any = built("set_retval")
        self._socket = self._module.ffi.new("char[]", _SOCKET.pack(IDLE, 0, 0, 0, 0, is_wanted))
        self.time = 100

    def ends(self, numbers: Numbers, after: int = 0) -> bool:
        self.time += after
        return bool(self._module.lib.look_at(self._socket, _NUMBERS.pack(*numbers), self.time))

    def is_used(self) -> Numbers:
        """Be idle once, and send a request; return the numbers, with the response."""
        assert not self.ends(Numbers())
        assert not self.ends(Numbers(), IDLE)
        now = Numbers(sent=1100, acknowledged=1100, received=2500, read=2500, acknowledged_by=2400)
        assert not self.ends(now, 1)
        return now

    @property
    def state(self) -> int:
        return int(_SOCKET.unpack(bytes(self._module.ffi.buffer(self._socket))[: _SOCKET.size])[4])


def test_between_two_requests_it_is_ended() -> None:
    """After the time given, not before."""
    looked = Looked()
    now = looked.is_used()
    assert not looked.ends(now, IDLE - 1)
    assert looked.ends(now, 1)


def test_what_is_not_wanted_stays() -> None:
    """It is known to be ready, for when it is wanted."""
    looked = Looked(is_wanted=False)
    assert not looked.ends(looked.is_used(), IDLE)
    assert looked.state == READY


UNDER_WAY = {
    "half closed": {"state": 8},  # TCP_CLOSE_WAIT
    "not all acknowledged": {"acknowledged": 1099},
    "not all read": {"read": 2499},
    "a segment waits for the lock": {"backlog": 1 << 40},
    "a segment is behind a gap": {"out_of_order": 1 << 40},
    "the kernel's own, or steered": {"user_data": 1 << 40},
    "TLS in the kernel": {"ulp": 1 << 40},
    "the client was last": {"last_sent": 61},
    "the client was last, in the same jiffy": {"last_sent": 60, "acknowledged_by": 2500},
}


@pytest.mark.parametrize("why", UNDER_WAY)
def test_it_stays_while_anything_is_under_way(why: str) -> None:
    """Its idle time goes on meanwhile: it is ended at the next look without."""
    looked = Looked()
    now = looked.is_used()
    assert not looked.ends(now._replace(**UNDER_WAY[why]), IDLE)
    assert looked.ends(now)


def test_in_the_same_jiffy_the_numbers_say_who_was_last() -> None:
    """Also where they wrap (RFC 9293 3.4)."""
    looked = Looked()
    looked.is_used()
    now = Numbers(received=5, read=5, acknowledged_by=2**32 - 5, last_sent=60)
    assert not looked.ends(now, 1)
    assert looked.ends(now, IDLE)


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_only_receives_is_never_ended(rounds: int) -> None:
    """A server may send unasked after the handshake: a client has to have sent since."""
    looked = Looked()
    now = Numbers()
    for _ in range(rounds):
        assert not looked.ends(now)
        assert not looked.ends(now, IDLE)
        now = now._replace(received=now.received + 100, read=now.read + 100)
    assert not looked.ends(now, IDLE)


def test_a_new_request_begins_the_time_anew() -> None:
    looked = Looked()
    now = looked.is_used()
    assert looked.ends(now, IDLE)
    assert looked.state == READY
    later = now._replace(sent=1200, acknowledged=1200, received=2600, read=2600)
    assert not looked.ends(later, 1)
    assert looked.state != READY
    assert not looked.ends(later, IDLE - 1)
    assert looked.ends(later, 1)
