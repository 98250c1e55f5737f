# SPDX-License-Identifier: Apache-2.0
"""Datagrams about nodes: only agents with the key are heard, once, and not too often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.model.node_messages import (
    COPY,
    FORGED,
    MOST_A_SECOND,
    SILENCE_SECONDS,
    SIZE,
    STRANGER,
    TOO_MANY,
    Kind,
    Mail,
    Message,
    open_sealed,
    seal,
)

KEY, OTHER_KEY = b"k" * 16, b"o" * 16
ONE, TWO = 0xFFFF0A000001, 0xFD << 120 | 2
ASK = Message(Kind.ASK, TWO, 7)


@given(
    st.sampled_from(list(Kind)),
    st.integers(0, 2**128 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_what_is_sealed_is_read(kind: Kind, about: int, number: int, time: int) -> None:
    """All kinds have one size, so an answer is not larger than its question."""
    message = Message(kind, about, number)
    datagram = seal(KEY, ONE, message, time)
    assert len(datagram) == SIZE
    assert open_sealed(KEY, ONE, datagram) == (message, time)


@given(st.integers(0, SIZE - 1), st.integers(1, 255))
def test_no_byte_can_be_changed(place: int, change: int) -> None:
    datagram = bytearray(seal(KEY, ONE, ASK, 1))
    datagram[place] ^= change
    assert open_sealed(KEY, ONE, bytes(datagram)) is None


@given(st.binary(max_size=2 * SIZE))
def test_what_strangers_send_is_nothing(datagram: bytes) -> None:
    assert open_sealed(KEY, ONE, datagram) is None


def test_the_key_and_the_sender_count() -> None:
    datagram = seal(KEY, ONE, ASK, 1)
    assert open_sealed(OTHER_KEY, ONE, datagram) is None
    assert open_sealed(KEY, TWO, datagram) is None


def test_an_unknown_kind_is_nothing() -> None:
    assert open_sealed(KEY, ONE, seal(KEY, ONE, Message(9, 1), 1)) is None  # type: ignore[arg-type]


@pytest.fixture
def mail() -> Mail:
    made = Mail(KEY)
    made.keep(frozenset({ONE}))
    return made


def test_strangers_are_dropped_and_counted(mail: Mail) -> None:
    """Those with an unknown address, another size, or without the key."""
    assert mail.open(None, seal(KEY, TWO, ASK, 1), 0.0) is None
    assert mail.open(TWO, seal(KEY, TWO, ASK, 1), 0.0) is None
    assert mail.open(ONE, b"", 0.0) is None
    assert mail.open(ONE, seal(OTHER_KEY, ONE, ASK, 1), 0.0) is None
    assert mail.dropped == {STRANGER: 3, FORGED: 1}


def test_a_copy_is_dropped(mail: Mail) -> None:
    """By the sender's own clock, which no other clock has to agree with."""
    datagram = seal(KEY, ONE, ASK, 1000)
    assert mail.open(ONE, datagram, 5.0) == ASK
    assert mail.open(ONE, datagram, 6.0) is None
    assert mail.open(ONE, seal(KEY, ONE, ASK, 999), 7.0) is None
    assert mail.open(ONE, seal(KEY, ONE, ASK, 1001), 8.0) == ASK
    assert mail.dropped == {COPY: 2}


def test_a_clock_that_was_set_back_is_believed_after_a_silence(mail: Mail) -> None:
    assert mail.open(ONE, seal(KEY, ONE, ASK, 1000), 0.0) == ASK
    assert mail.open(ONE, seal(KEY, ONE, ASK, 10), SILENCE_SECONDS) == ASK


def test_a_sender_is_heard_so_often_a_second(mail: Mail) -> None:
    """A flood with an agent's address costs others nothing, and the key is not tried on it."""
    for number in range(MOST_A_SECOND + 5):
        mail.open(ONE, seal(KEY, ONE, ASK, number + 1), 1.5)
    assert mail.dropped == {TOO_MANY: 5}
    assert mail.open(ONE, seal(KEY, ONE, ASK, 10**6), 2.5) == ASK


def test_who_stays_known_is_not_forgotten(mail: Mail) -> None:
    datagram = seal(KEY, ONE, ASK, 1)
    assert mail.open(ONE, datagram, 0.0)
    mail.keep(frozenset({ONE, TWO}))
    assert mail.open(ONE, datagram, 1.0) is None
    mail.keep(frozenset({TWO}))
    assert mail.open(ONE, seal(KEY, ONE, ASK, 2), 1.0) is None
