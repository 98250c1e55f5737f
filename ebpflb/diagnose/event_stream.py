# SPDX-License-Identifier: Apache-2.0
"""The events that a running agent sends on: it puts the monitoring programs in force meanwhile."""

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from ebpflb import unix_socket
from ebpflb.datapath.maps.records import MonitorEvent
from ebpflb.datapath.monitoring import decisions
from ebpflb.datapath.monitoring.protocol import FRAME, MonitorAnswer, MonitorQuestion
from ebpflb.errors import NodeError, in_words
from ebpflb.options import Paths

BEGIN_SECONDS = 300.0  # where the programs have to be compiled first
_LONGEST = 1 << 16  # bytes of an answer
_NO_AGENT = "no agent runs: start `ebpflb run`; the agent has to load the monitor's programs"
_OLDER = "the agent is of another version, without a monitor: use the `ebpflb` of the agent"


class EventBatch(NamedTuple):
    """Events in their order, and how many have been lost since the beginning."""

    events: Iterator[MonitorEvent]
    lost: int


class EventStream:
    """To be read until it ends, which it does when the agent does."""

    def __init__(self, paths: Paths, verdicts: int) -> None:
        """Returns when the programs are in force. Raises NodeError that says what to do."""
        self._socket = _connect(paths)
        try:
            question = MonitorQuestion(decisions.format_hash(), verdicts)
            self._socket.sendall(msgspec.json.encode(question) + b"\n")
            self._file = self._socket.makefile("rb")
            said = self._file.readline(_LONGEST)
            answer = msgspec.json.decode(said, type=MonitorAnswer)
        except TimeoutError:
            self._socket.close()
            raise NodeError("the agent does not answer: see its log, and `ebpflb status`") from None
        except (OSError, msgspec.MsgspecError):
            self._socket.close()
            raise NodeError("the agent has ended: see its log, and `ebpflb status`") from None
        if answer.error:
            self._socket.close()
            raise NodeError(f"no monitor can run: {answer.error}")
        self._socket.settimeout(None)

    def parts(self) -> Iterator[EventBatch]:
        """Ends when the agent does."""
        while (head := self._read(FRAME.size)) is not None:
            lost, size = FRAME.unpack(head)
            records = self._read(size)
            if records is None:
                return
            yield EventBatch(decisions.unpacked(records), lost)

    def end(self) -> None:
        """``parts`` ends; safe in any thread, which ``close`` is not."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
        try:
            found = self._file.read(size)
        except OSError:
            return None
        return found if len(found) == size else None


def _connect(paths: Paths) -> socket.socket:
    try:
        return unix_socket.connect(paths.monitor_socket, BEGIN_SECONDS)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            raise NodeError(_NO_AGENT if not _answers(paths) else _OLDER) from None
        raise NodeError(f"{paths.monitor_socket}: {in_words(error)}") from error


def _answers(paths: Paths) -> bool:
    """Whether an agent listens for other commands."""
    try:
        unix_socket.connect(paths.socket_file, 1.0).close()
    except OSError:
        return False
    return True
