# SPDX-License-Identifier: Apache-2.0
"""The agent's part of ``ebpflb monitor``.

While a monitor is connected, the monitoring variant of the programs is attached, and the agent
forwards its events. A thread listens, loads the variant, reads the ring buffer and forwards
unchanged records; only the loop exchanges the programs, which takes as long as an upgrade's
exchange. The thread never waits for a client: events that a connection does not take are dropped
and counted.
"""

import logging
import math
import socket
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from ebpflb import unix_socket
from ebpflb.agent.inspection import Call
from ebpflb.agent.node_sync import NodeSync
from ebpflb.errors import EbpflbError, KernelError, in_words
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.monitoring import (
    FRAME,
    STRIDE,
    MonitorAnswer,
    MonitorQuestion,
    Variant,
    format_hash,
)
from ebpflb.kernel.programs.loader import ProgramSet
from ebpflb.options import Paths
from ebpflb.stopping import run_all
from ebpflb.workers import DescriptorWorker

# One ``ebpflb monitor`` that is connected to the agent.
#
# it sends      a line of JSON: a MonitorQuestion
# it receives   a line of JSON: a MonitorAnswer, and if that is no error, frames:
#               FRAME (how many events are lost, how many bytes follow), then records of the ring

QUESTION_SECONDS = 5.0  # until the client must have asked
MOST_BYTES = 4096  # of a question
BUFFER = 1 << 20  # bytes that the kernel buffers for a client


class MonitorClient:
    """``asked`` has a bit for each wanted verdict; 0 until the client has asked."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.asked = 0
        self.is_served = False
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._said, self._until = b"", time.monotonic() + QUESTION_SECONDS
        self._rest = memoryview(b"")  # of a partly sent frame
        self._lost = self._lost_before = self._told = 0

    @property
    def is_new(self) -> bool:
        """Whether the client has asked, and has no answer yet."""
        return bool(self.asked) and not self.is_served

    @property
    def is_late(self) -> bool:
        return not self.asked and time.monotonic() > self._until

    def read(self) -> bool:
        """Read from the client; return False if it has ended, or asks for something impossible."""
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
        if question.format != format_hash():
            self.refuse("the agent has another version: use the agent's own `ebpflb`")
            return False
        self.asked = question.verdicts
        return bool(self.asked)

    def welcome(self, lost: int) -> None:
        """Accept the client; ``lost`` is the number of events lost before."""
        self._lost_before, self.is_served = lost, True
        self._rest = memoryview(msgspec.json.encode(MonitorAnswer()) + b"\n")
        self._flush()

    def refuse(self, error: str) -> None:
        self._rest = memoryview(msgspec.json.encode(MonitorAnswer(error)) + b"\n")
        self._flush()

    def send(self, records: bytes, lost: int) -> bool:
        """Send all of the records or none of them; return False if the client has ended."""
        if not self._flush():
            return False
        if self._rest:
            self._lost += len(records) // STRIDE
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


log = logging.getLogger(__name__)

MOST_CLIENTS = 8
READ_SECONDS = 0.05  # between two looks at the ring buffer
EXCHANGE_SECONDS = 30.0  # until an unresponsive loop is given up


class Monitoring(DescriptorWorker):
    """The server of monitors; if it cannot listen, the agent continues without it."""

    def __init__(
        self,
        paths: Paths,
        datapath: Datapath,
        node_sync: NodeSync,
        put: Callable[[Call[Any]], None],
    ) -> None:
        """``put`` belongs to the loop's inbox."""
        super().__init__("monitor")
        self._paths, self._datapath, self._node_sync, self._put = paths, datapath, node_sync, put
        self._clients: list[MonitorClient] = []
        self._variant: Variant | None = None
        self._listening: socket.socket | None = None
        self._call: Call[None] | None = None

    def start(self) -> None:
        try:
            self._listening = unix_socket.listen(self._paths.monitor_socket)
        except OSError as error:
            path = self._paths.monitor_socket
            log.warning("%s: %s: `ebpflb monitor` cannot connect", path, in_words(error))
            return
        self._listening.setblocking(False)
        super().start()

    def stop(self) -> None:
        """Put the usual programs back; to be called when the loop has ended."""
        self.stopped.set()
        if self._call:
            self._call.cancel()
        run_all(super().stop, self._end_listening, self._forget_all, self._put_back)

    def _end_listening(self) -> None:
        if self._listening:
            self._listening.close()
            self._paths.monitor_socket.unlink(missing_ok=True)

    def _put_back(self) -> None:
        if self._variant:
            run_all(partial(self._node_sync.exchange, None), self._variant.close)

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self._turn()
            except Exception:
                self._forget_all()
                raise

    def _turn(self) -> None:
        assert self._listening
        seconds = READ_SECONDS if self._clients or self._variant else math.inf
        ready = self.wait([self._listening, *(it.socket for it in self._clients)], seconds)
        for client in [it for it in self._clients if it.socket in ready]:
            self._read(client)
        if self._listening in ready:
            self._accept()
        if self.stopped.is_set():
            return
        for client in [it for it in self._clients if it.is_late]:
            self._forget(client)
        self._send_on()
        if self._variant and self._datapath.others is not self._variant.programs:
            self._replaced()
        elif self._variant and not any(client.asked for client in self._clients):
            self._end()

    def _accept(self) -> None:
        with suppress(OSError):
            assert self._listening
            client = MonitorClient(self._listening.accept()[0])
            if len(self._clients) >= MOST_CLIENTS:
                client.refuse(f"{MOST_CLIENTS} monitors are already running: end one of them")
                client.close()
                return
            self._clients.append(client)

    def _read(self, client: MonitorClient) -> None:
        """Read a client's question, or its end."""
        if not client.read():
            self._forget(client)
        elif client.is_new:
            try:
                self._serve(client)
            except (EbpflbError, OSError) as error:
                log.warning("no monitor can be started: %s", in_words(error))
                client.refuse(in_words(error).splitlines()[0])
                self._forget(client)

    def _serve(self, client: MonitorClient) -> None:
        """Serve a client.

        Raises the errors of loading the variant, and then nothing has changed.
        """
        if self._variant is None:
            self._node_sync.require_own_programs()
            self._variant = self._begin(client.asked)
        else:
            self._ask()
        client.welcome(lost=self._variant.lost())

    def _begin(self, verdicts: int) -> Variant:
        variant = Variant(self._datapath, self._paths.cache)
        try:
            variant.ask(verdicts)
            self._exchange(variant.programs)
        except BaseException:
            variant.programs.close()
            variant.close()
            raise
        log.info("monitor started: the programs emit events")
        return variant

    def _ask(self) -> None:
        """Report every verdict that one of the clients wants."""
        wanted = 0
        for client in self._clients:
            wanted |= client.asked
        if self._variant:
            self._variant.ask(wanted)

    def _send_on(self) -> None:
        if self._variant is None:
            return
        records, lost = self._variant.ring.take(), self._variant.lost()
        for client in list(self._clients):
            if client.is_served and not client.send(records, lost):
                self._forget(client)

    def _replaced(self) -> None:
        """Disconnect the clients, who must ask again.

        The agent has loaded its programs again, and they are in force.
        """
        variant, self._variant = self._variant, None
        for client in [it for it in self._clients if it.is_served]:
            self._forget(client)
        if variant:
            variant.close()

    def _end(self) -> None:
        """Put the usual programs in force again; after a failure the audit tries it."""
        variant, self._variant = self._variant, None
        try:
            self._exchange(None)
        except EbpflbError as error:
            log.error("the monitor's programs are still loaded: %s", error)
        else:
            log.info("monitor stopped: the usual programs are loaded again")
        if variant:
            variant.close()

    def _exchange(self, programs: ProgramSet | None) -> None:
        """Let the loop exchange the programs. Raises NodeError or KernelError."""
        self._call = Call(lambda *_: self._node_sync.exchange(programs))
        self._put(self._call)
        try:
            self._call.result(EXCHANGE_SECONDS)
        except (TimeoutError, CancelledError):
            raise KernelError("exchanging programs", 0, "the agent's loop is busy") from None

    def _forget_all(self) -> None:
        for client in list(self._clients):
            self._forget(client)

    def _forget(self, client: MonitorClient) -> None:
        self._clients.remove(client)
        client.close()
        with suppress(KernelError):
            self._ask()
