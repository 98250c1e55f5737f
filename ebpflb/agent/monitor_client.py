# SPDX-License-Identifier: Apache-2.0
"""One ``ebpflb monitor`` that is connected to the agent.

it sends      a line of JSON: a MonitorQuestion
it receives   a line of JSON: a MonitorAnswer, and if that is no error, frames:
              FRAME (how many events are lost, how many bytes follow), then records of the ring
"""

import socket
import time

import msgspec

from ebpflb.datapath.monitoring import decisions
from ebpflb.datapath.monitoring.protocol import FRAME, MonitorAnswer, MonitorQuestion

QUESTION_SECONDS = 5.0  # until it has asked
MOST_BYTES = 4096  # of a question
BUFFER = 1 << 20  # bytes that the kernel keeps for it


class MonitorClient:
    """``asked``: a bit for each verdict that it wants; 0 as long as it has not asked."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.asked = 0
        self.is_served = False
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._said, self._until = b"", time.monotonic() + QUESTION_SECONDS
        self._rest = memoryview(b"")  # of a frame that it has taken in part
        self._lost = self._lost_before = self._told = 0

    @property
    def is_new(self) -> bool:
        """It has asked, and has no answer yet."""
        return bool(self.asked) and not self.is_served

    @property
    def is_late(self) -> bool:
        return not self.asked and time.monotonic() > self._until

    def read(self) -> bool:
        """False if it has ended, or what it asks cannot be served."""
        try:
            said = self.socket.recv(MOST_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not said:
            return False
        if not self.asked:
            self._said += said
        return self._understand() if b"\n" in self._said else len(self._said) < MOST_BYTES

    def _understand(self) -> bool:
        if self.asked:
            return True
        try:
            question = msgspec.json.decode(self._said, type=MonitorQuestion)
        except msgspec.MsgspecError:
            question = MonitorQuestion("", 0)
        if question.format != decisions.format_hash():
            self.refuse("the agent is of another version: use the `ebpflb` of the agent")
            return False
        self.asked = question.verdicts
        return bool(self.asked)

    def welcome(self, lost: int) -> None:
        """``lost``: how many events before its time."""
        self._lost_before, self.is_served = lost, True
        self._rest = memoryview(msgspec.json.encode(MonitorAnswer()) + b"\n")
        self._flush()

    def refuse(self, error: str) -> None:
        self._rest = memoryview(msgspec.json.encode(MonitorAnswer(error)) + b"\n")
        self._flush()

    def send(self, records: bytes, lost: int) -> bool:
        """All of the records or none of them; False if it has ended."""
        if not self._flush():
            return False
        if self._rest:
            self._lost += len(records) // decisions.STRIDE
            return True
        now = lost - self._lost_before + self._lost
        if records or now != self._told:
            self._told = now
            self._rest = memoryview(FRAME.pack(now, len(records)) + records)
        return self._flush()

    def _flush(self) -> bool:
        try:
            while self._rest:
                self._rest = self._rest[self.socket.send(self._rest) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()
