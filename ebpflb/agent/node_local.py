# SPDX-License-Identifier: Apache-2.0
"""Ask the listeners on this node that Services name (ebpflb.io/node-local) whether they answer.

Each second every listener is asked once: by a TCP connection, or by a DNS query over UDP, because a
DNS cache is what such a listener is for. Any answer counts. A listener is gone when the kernel
refuses, or when it was silent twice. The questions are sent from the listener's own address, so
nothing leaves a node that does not have that address.
"""

import logging
import os
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress

from ebpflb.agent.loop import Inbox
from ebpflb.errors import in_words
from ebpflb.model.addresses import host_port
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.facts import Fact, Observed
from ebpflb.model.nodes import ANSWERING, SILENT, Listener
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.service_entries import ServiceEntries
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = _ANSWER_SECONDS = 1.0
_MOST_SILENT = 2  # questions in succession without an answer
# Class CHAOS, type TXT, version.bind: a DNS server answers by itself, if only by an error.
_QUERY = bytes.fromhex("eb9f00000001000000000000 0776657273696f6e 0462696e64 00 00100003")


class NodeLocalWatch(PeriodicWorker):
    """Emits the listeners that answer, after each change.

    Those that an earlier agent found serve until they do not answer.
    """

    def __init__(self, cluster: ClusterState, inbox: Inbox) -> None:
        super().__init__("node-local", _INTERVAL_SECONDS, steady=True)
        self._cluster, self._inbox = cluster, inbox
        self._named: frozenset[Listener] = frozenset()
        self._answering: frozenset[Listener] = cluster.observed[Fact.ANSWERING_LISTENERS]
        self._silent: dict[Listener, int] = {}  # questions without an answer, in succession

    @property
    def counts(self) -> dict[str, int]:
        """The number of listeners by state, for the metrics."""
        wanted = self._named
        answering = len(wanted & self._answering)
        return {ANSWERING: answering, SILENT: len(wanted) - answering}

    def turn(self) -> None:
        """Ask once; sleep if Services name no listener."""
        if not self._cluster.complete:
            return
        self.want(False)  # a Service that changes meanwhile wakes this again
        if self._cluster.node_local.changed:
            with suppress(TimeoutError):  # a busy loop is asked again by the next turn
                self._named = self._inbox.ask(self._cluster.node_local.take_wanted)
        if self._named or self._cluster.node_local.changed:
            self.want(True)
        wanted = self._named
        found = ask(wanted) if wanted else {}
        self._silent = {each: self._silent[each] for each in wanted & self._silent.keys()}
        answering = frozenset(it for it in wanted if self._still_answers(it, found[it]))
        if answering != self._answering:
            for each in sorted(answering ^ self._answering, key=str):  # of both families
                self._say(each, found.get(each, "no Service names it"), answering)
            self._answering = answering
            self._inbox.put(Observed(Fact.ANSWERING_LISTENERS, answering))

    def _still_answers(self, listener: Listener, error: str | None) -> bool:
        """Whether the listener answers, now or last time; ``error`` is "" for silence."""
        if error is None:
            self._silent.pop(listener, None)
            return True
        self._silent[listener] = silent = self._silent.get(listener, 0) + 1
        return not error and silent < _MOST_SILENT and listener in self._answering

    def _say(self, each: Listener, error: str | None, answering: frozenset[Listener]) -> None:
        where = f"{host_port(each.address, each.port)}/{each.protocol.name}"
        if each in answering:
            log.info("node-local listener %s answers: it serves the sockets of its Service", where)
        else:
            reason = error or "no answer"
            log.warning("node-local listener %s: %s; sockets get endpoints", where, reason)


def ask(listeners: Collection[Listener]) -> dict[Listener, str | None]:
    """Ask all at once; return why each did not answer: None if it did, "" if it was silent."""
    errors: dict[Listener, str | None] = dict.fromkeys(listeners, "")
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.PollSelector())
        for each in listeners:
            try:
                opened = stack.enter_context(_begin(each))
            except OSError as error:
                errors[each] = in_words(error)
            else:
                is_tcp = each.protocol == Protocol.TCP
                event = selectors.EVENT_WRITE if is_tcp else selectors.EVENT_READ
                selector.register(opened, event, (each, opened))
        end = time.monotonic() + _ANSWER_SECONDS
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                each, opened = key.data
                selector.unregister(opened)
                errors[each] = _end(opened)
    return errors


def _begin(listener: Listener) -> socket.socket:
    """Return a socket that has asked. Raises OSError, also if the node lacks the address."""
    family = socket.AF_INET6 if listener.address.version == 6 else socket.AF_INET
    is_tcp = listener.protocol == Protocol.TCP
    opened = socket.socket(family, socket.SOCK_STREAM if is_tcp else socket.SOCK_DGRAM)
    try:
        opened.setblocking(False)
        opened.bind((str(listener.address), 0))
        with suppress(BlockingIOError):
            opened.connect((str(listener.address), listener.port))
        if not is_tcp:
            opened.send(_QUERY)
    except BaseException:
        opened.close()
        raise
    return opened


def _end(opened: socket.socket) -> str | None:
    """Return why there is no answer; None if there is one."""
    if error := opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return os.strerror(error)
    return None


def answering_in(programmed: Mapping[PortName, ServiceEntries]) -> frozenset[Listener]:
    """Return the listeners that the maps have."""
    return frozenset(
        Listener(each.address, each.port, Protocol(name.protocol))
        for name, entries in programmed.items()
        if any("node_local" in service.flags for service in entries.services.values())
        for each in entries.backends[-1:]
        if "node_local" in each.flags
    )
