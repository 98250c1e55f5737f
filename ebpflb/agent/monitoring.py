# SPDX-License-Identifier: Apache-2.0
"""The agent's part of ``ebpflb monitor``.

While a monitor is connected, the monitoring variant of the programs is attached. A thread listens,
loads the variant and hands the descriptors of its ring buffer to the monitor, which reads it
itself; only the loop exchanges the programs, which takes as long as an upgrade's exchange.
"""

import logging
import math
import socket
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from ebpflb import unix_socket
from ebpflb.agent.loop import Call
from ebpflb.agent.node_sync import NodeSync
from ebpflb.errors import EbpflbError, KernelError, NodeError, in_words
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.monitoring import MonitorAnswer, MonitorQuestion, Variant, format_hash
from ebpflb.kernel.programs.loader import ProgramSet
from ebpflb.options import Paths
from ebpflb.stopping import run_all
from ebpflb.workers import DescriptorWorker

log = logging.getLogger(__name__)

QUESTION_SECONDS = 5.0  # until a client must have asked
MOST_BYTES = 4096  # of a question
LOOK_SECONDS = 0.2  # between two looks at whether the variant is still in force
EXCHANGE_SECONDS = 30.0  # until an unresponsive loop is given up


class Monitoring(DescriptorWorker):
    """The server of one monitor at a time; if it cannot listen, the agent continues without it."""

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
        self._client: socket.socket | None = None
        self._variant: Variant | None = None  # attached while there is a client
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
        run_all(super().stop, self._end_listening, self._forget, self._put_back)

    def _end_listening(self) -> None:
        if self._listening:
            self._listening.close()
            self._paths.monitor_socket.unlink(missing_ok=True)

    def _put_back(self) -> None:
        if self._variant:
            run_all(partial(self._node_sync.exchange, None), self._close_variant)

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self._turn()
            except Exception:
                self._forget()
                raise

    def _turn(self) -> None:
        assert self._listening
        sources = [self._listening, *([self._client] if self._client else [])]
        ready = self.wait(sources, LOOK_SECONDS if self._variant else math.inf)
        if self._client in ready:  # it has ended: it has nothing to say
            self._forget()
        if self._listening in ready:
            self._accept()
        if self.stopped.is_set():
            return
        if self._variant and self._datapath.others is not self._variant.programs:
            self._forget()  # the agent has loaded its programs again: the client must ask again
            self._close_variant()
        elif self._variant and not self._client:
            self._end()

    def _accept(self) -> None:
        assert self._listening
        try:
            client = self._listening.accept()[0]
        except OSError:
            return
        client.settimeout(QUESTION_SECONDS)
        try:
            self._serve(client)
        except (EbpflbError, OSError) as error:
            log.warning("no monitor can be started: %s", in_words(error))
            with suppress(OSError):
                client.sendall(_line(MonitorAnswer(in_words(error).splitlines()[0])))
            client.close()

    def _serve(self, client: socket.socket) -> None:
        """Serve a client.

        Raises OSError, and the errors of loading the variant: then nothing has changed.
        """
        verdicts = _read_question(client)
        if self._client:
            raise NodeError("another `ebpflb monitor`, or a page that watches events, runs here")
        self._node_sync.require_own_programs()
        variant = self._variant = self._variant or self._begin()
        variant.ask(verdicts)
        socket.send_fds(client, [_line(MonitorAnswer())], variant.descriptors)
        self._client = client

    def _begin(self) -> Variant:
        variant = Variant(self._datapath, self._paths.cache)
        try:
            self._exchange(variant.programs)
        except BaseException:
            variant.programs.close()
            variant.close()
            raise
        log.info("monitor started: the programs emit events")
        return variant

    def _end(self) -> None:
        """Attach the usual programs again; if that fails, the audit tries again."""
        try:
            self._exchange(None)
        except EbpflbError as error:
            log.error("the monitor's programs are still loaded: %s", error)
        else:
            log.info("monitor stopped: the usual programs are loaded again")
        self._close_variant()

    def _close_variant(self) -> None:
        variant, self._variant = self._variant, None
        if variant:
            variant.close()

    def _exchange(self, programs: ProgramSet | None) -> None:
        """Let the loop exchange the programs. Raises NodeError or KernelError."""
        self._call = Call(lambda: self._node_sync.exchange(programs))
        self._put(self._call)
        try:
            self._call.result(EXCHANGE_SECONDS)
        except (TimeoutError, CancelledError):
            raise KernelError("exchanging programs", 0, "the agent's loop is busy") from None

    def _forget(self) -> None:
        client, self._client = self._client, None
        if client:
            client.close()


def _read_question(client: socket.socket) -> int:
    """Return the verdicts that a monitor wants. Raises NodeError for another version, OSError."""
    try:
        question = msgspec.json.decode(client.recv(MOST_BYTES), type=MonitorQuestion)
    except msgspec.MsgspecError:
        question = MonitorQuestion("", 0)
    if question.format != format_hash():
        raise NodeError("the agent has another version: use the agent's own `ebpflb`")
    return question.verdicts


def _line(answer: MonitorAnswer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
