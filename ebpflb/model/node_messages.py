# SPDX-License-Identifier: Apache-2.0
"""What agents say to each other about nodes: datagrams of one size, sealed with a shared key.

An answer is not larger than its question, so nobody can make agents send more than they are sent.
A datagram is valid only from the address that sealed it. Its ``time`` grows with each datagram of a
sender, so a copy is noticed; an answer repeats the question's random ``number``.
"""

import hmac
from collections import Counter
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

_BODY = Struct("!B3xQQ16s")  # kind, number, time, the node's address
_VERSION = b"ebpflb nodes 1"  # of this layout: agents with another one are strangers
_SEAL_BYTES = 16  # of HMAC-SHA256, as RFC 2104 section 5 allows
SIZE = _BODY.size + _SEAL_BYTES
LEAST_KEY_BYTES = 16

MOST_A_SECOND = 64  # datagrams of one sender that are looked at
SILENCE_SECONDS = 60.0  # then a sender's clock may have been set back

# Why a datagram is dropped.
REASONS = (STRANGER, FORGED, COPY, TOO_MANY) = ("stranger", "forged", "copy", "too-many")


class Kind(IntEnum):
    """What is said about a node."""

    SUSPECT = 1  # it does not answer the sender: look for yourself
    ASK = 2  # does it answer you?
    ALIVE = 3  # it does
    MISSED = 4  # it does not, and did before


_KINDS = frozenset(Kind)


class Message(NamedTuple):
    """``about``: the node's address, of 128 bits. ``number``: of the question, else 0."""

    kind: Kind
    about: int
    number: int = 0


class Opened(NamedTuple):
    """A valid datagram. ``time``: when it was sent, by the sender's clock, in nanoseconds."""

    message: Message
    time: int


def seal(key: bytes, sender: int, message: Message, time: int) -> bytes:
    """Return the datagram of the agent at this address, of 128 bits."""
    body = _BODY.pack(message.kind, message.number, time, message.about.to_bytes(16, "big"))
    return body + _seal(key, sender, body)


def open_sealed(key: bytes, sender: int, datagram: bytes) -> Opened | None:
    """Return what an agent has said; None if no agent with this key has sent it."""
    body, found = datagram[: _BODY.size], datagram[_BODY.size :]
    if len(datagram) != SIZE or not hmac.compare_digest(found, _seal(key, sender, body)):
        return None
    kind, number, time, about = _BODY.unpack(body)
    if kind not in _KINDS:
        return None
    return Opened(Message(Kind(kind), int.from_bytes(about, "big"), number), time)


def _seal(key: bytes, sender: int, body: bytes) -> bytes:
    return hmac.digest(key, _VERSION + sender.to_bytes(16, "big") + body, "sha256")[:_SEAL_BYTES]


class _Sender:
    """What was last received from one address; times of this node's clock are in seconds."""

    __slots__ = ("at", "count", "second", "time")

    def __init__(self) -> None:
        self.time, self.at = 0, 0.0  # of the last valid datagram: the sender's time, and ours
        self.second, self.count = 0, 0


class Mail:
    """Opens the datagrams of known senders; ``dropped`` counts the others by reason."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._senders: dict[int, _Sender] = {}
        self.dropped: Counter[str] = Counter()

    def keep(self, senders: frozenset[int]) -> None:
        """Know these senders, by their addresses of 128 bits, and no others."""
        self._senders = {it: self._senders.get(it) or _Sender() for it in senders}

    def open(self, sender: int | None, datagram: bytes, now: float) -> Message | None:
        """Return what is said; None if it is dropped. ``now``: a monotonic clock, in seconds."""
        found = self._open(sender, datagram, now)
        if isinstance(found, Message):
            return found
        self.dropped[found] += 1
        return None

    def _open(self, sender: int | None, datagram: bytes, now: float) -> Message | str:
        """Return what is said, or why it is dropped."""
        known = self._senders.get(sender) if sender is not None else None
        if known is None or sender is None or len(datagram) != SIZE:
            return STRANGER
        if int(now) != known.second:
            known.second, known.count = int(now), 0
        known.count += 1
        if known.count > MOST_A_SECOND:
            return TOO_MANY
        opened = open_sealed(self._key, sender, datagram)
        if opened is None:
            return FORGED
        if opened.time <= known.time and now - known.at < SILENCE_SECONDS:
            return COPY
        known.time, known.at = opened.time, now
        return opened.message
