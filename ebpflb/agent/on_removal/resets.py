# SPDX-License-Identifier: Apache-2.0
"""How connections to a removed endpoint are found and reset: sockets, flows, conntrack's entries.

First the connections whose client is a socket of this node, or of one of its pods.

The socket is ended by SOCK_DESTROY: its owner gets ECONNABORTED from the waiting call, or from the
next one, and the kernel sends the backend a reset. The socket's entry in the map stays until it is
closed.
"""

import errno
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from ebpflb.agent.on_removal.reset_worker import ResetCounts, WantedConnections
from ebpflb.agent.stale_udp.lookups import Maps
from ebpflb.agent.stale_udp.socket_search import (
    EachNamespace,
    Sockets,
    namespaces_of,
    peers_where,
)
from ebpflb.entries.flows import (
    Connection,
    Ends,
    Flow,
    FlowKind,
    Hook,
    Tuple,
    between_hooks,
    reverse,
)
from ebpflb.entries.services import Frontend
from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel.maps.layout import MAPS, ffi
from ebpflb.kernel.maps.records import EntryEnd, ExpiredEntry, PeerFrontend
from ebpflb.kernel.maps.sweep import EndFlow, Gate, ended_flow
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.netfilter.probe import internet_checksum
from ebpflb.kernel.node.sock_diag import Connected, SockDiag
from ebpflb.model import annotations
from ebpflb.model.services import Protocol
from ebpflb.plan.removed_endpoints import Endpoint

# Segments in the name of one end of a connection to the other, by raw sockets.
#
# They pass netfilter's OUTPUT and the device's egress. They need CAP_NET_RAW; without it a client
# notices the reset with its next segment.

log = logging.getLogger(__name__)

_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_TCP, _HOPS, _SIZE = 6, 64, 20
_SYN_ACK, _RST_ACK = 0x12, 0x14
_V4 = struct.Struct(">BBHHHBBH4s4s")
_V6 = struct.Struct(">IHBB16s16s")
_SEGMENT = struct.Struct(">HHIIBBHHH")


def reset_segment(ends: Ends, sequence: int, acknowledgment: int) -> bytes:
    """Return an IP packet with a reset.

    ``sequence`` is the number that the receiver expects; ``acknowledgment`` the number that it has
    sent, which counts if it is still connecting.
    """
    return _packet(ends, _RST_ACK, sequence, acknowledgment)


def question_segment(ends: Ends) -> bytes:
    """Return an IP packet that is answered by an acknowledgment with the right numbers.

    It is not a SYN: conntrack treats a SYN-ACK of an unknown connection as invalid, and makes no
    entry.
    """
    return _packet(ends, _SYN_ACK, 0, 0)


class Sender:
    """Raw sockets that are open until the end of the ``with`` block."""

    may_send = True  # false after the capability was missing, which is logged once

    def __enter__(self) -> "Sender":
        self._stack = ExitStack()
        self._raw: dict[int, socket.socket] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, ends: Ends, packets: Iterable[bytes]) -> None:
        """Send packets; those without a route are left out."""
        for packet in packets:
            try:
                raw = self._socket(ends.destination.version)
                if raw:
                    raw.sendto(packet, (str(ends.destination), 0))
            except OSError as error:
                log.debug("no reset could be sent to %s: %s", ends.destination, error.strerror)

    def _socket(self, version: int) -> socket.socket | None:
        if version not in self._raw and self.may_send:
            try:
                raw = socket.socket(_FAMILIES[version], socket.SOCK_RAW, socket.IPPROTO_RAW)
            except PermissionError:
                type(self).may_send = False
                log.warning("CAP_NET_RAW is missing: idle clients of the packet path are not reset")
            else:
                self._raw[version] = self._stack.enter_context(raw)
        return self._raw.get(version)


def _packet(ends: Ends, flags: int, sequence: int, acknowledgment: int) -> bytes:
    ports = ends.source_port, ends.destination_port
    numbers = *ports, sequence, acknowledgment, _SIZE // 4 << 4, flags, 0
    source, destination = ends.source.packed, ends.destination.packed
    pseudo = source + destination + struct.pack(">II", _SIZE, _TCP)
    checksum = internet_checksum(pseudo + _SEGMENT.pack(*numbers, 0, 0))
    segment = _SEGMENT.pack(*numbers, checksum, 0)
    if ends.destination.version == 6:
        return _V6.pack(6 << 28, _SIZE, _TCP, _HOPS, source, destination) + segment
    whole = _V4.size + _SIZE  # the kernel writes the header's checksum
    header = _V4.pack(0x45, 0, whole, 0, 0x4000, _HOPS, _TCP, 0, source, destination)
    return header + segment


# Connections of the flow tables: the request's entry is marked, and both ends are reset.
#
# From then on the datapath answers the client's packets with resets. The agent's segments have the
# addresses between the hooks, so that netfilter assigns them to their connection, and the device's
# egress translates them like others of the flow.

GONE_FLAG = frozenset({"gone"})

_PORT = slice(*(ffi.offsetof("struct tuple", "destination_port") + n for n in (0, 2)))
_HOOK = ffi.offsetof("struct tuple", "hook")
_KIND = ffi.offsetof("struct flow", "kind")
assert MAPS["tcp_flows"].key_size == ffi.sizeof("struct tuple"), "keys are read by these offsets"


class FlowConnections:
    """The connections in the map of TCP's flows."""

    kind = annotations.BY_FLOWS

    def __init__(self, maps: Maps, end_flow: EndFlow) -> None:
        self._flows, self._end_flow = maps["tcp_flows"], end_flow

    def found(self, wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        return {
            _through_flow(*each) for each in self._search(wanted) if not each[1].flags & GONE_FLAG
        }

    def reset(self, wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        counts = ResetCounts()
        with Sender() as sender:
            for key, flow in list(self._search(wanted)):
                marked = flow if flow.flags & GONE_FLAG else self._mark(key, flow)
                if marked is None or "rst" in marked.flags:
                    continue
                counts[_through_flow(key, flow)] += not flow.flags & GONE_FLAG
                self._send(sender, key, marked)
        return +counts

    def _search(self, wanted: WantedConnections) -> Iterator[tuple[Tuple, Flow]]:
        """Yield the entries of requests."""
        ports = {port.to_bytes(2, "big") for port in wanted.ports}
        for key, value in self._flows.packed_items():
            is_request = key[_HOOK] == Hook.INGRESS and value[_KIND] == FlowKind.DNAT
            if is_request and key[_PORT] in ports:
                at, flow = self._flows.key.unpack(key), self._flows.value.unpack(value)
                if wanted.has(*_through_flow(at, flow)):
                    yield at, flow

    def _mark(self, key: Tuple, former: Flow) -> Flow | None:
        """Mark the entry, and return it as it is then; None if another flow has its place now.

        A program compares and marks in one run, so that no packet finds the entry missing.
        """
        entry = ExpiredEntry(key, former.created, EntryEnd.GONE)
        flow = self._flows.get(key) if self._end_flow(ended_flow([entry])) else None
        return flow if flow and flow.created == former.created else None

    def _send(self, sender: Sender, key: Tuple, request: Flow) -> None:
        inside = between_hooks(key, request)
        reply: Flow | None = self._flows.get(reverse(inside))
        to_backend = Ends(*inside[:4])
        end, acknowledged = (reply.end, reply.acknowledged) if reply else (0, 0)
        numbers = {request.acknowledged, end}
        sender.send(to_backend.reversed(), _ending(to_backend.reversed(), numbers, request.end))
        if end:  # otherwise the endpoint has never answered
            sender.send(to_backend, _ending(to_backend, {acknowledged, request.end}, end))


def _ending(ends: Ends, numbers: set[int], acknowledgment: int) -> Iterator[bytes]:
    """Yield resets for the known numbers, or a question if none is known.

    One number is the expected one; for another in the window the receiver asks again, and the
    datapath answers.
    """
    known = numbers - {0}
    for number in known or {0}:
        yield reset_segment(ends, number, acknowledgment)
    if not known:
        yield question_segment(ends)


def _through_flow(key: Tuple, flow: Flow) -> tuple[Frontend, Endpoint]:
    frontend = Frontend(key.destination, key.destination_port, key.protocol)
    return frontend, (flow.address, flow.port)


# Translated connections of the kernel's conntrack: of its engine, and of a kube-proxy.
#
# conntrack has no sequence numbers of TCP, and removing an entry resets nothing. So a flow to the
# frontend itself is written, marked as gone: the datapath looks flows up before conntrack, and
# answers the client with resets. Both ends are asked for their numbers. conntrack's entry is
# deleted with the last pass: by then it has translated their answers.

_FLAGS = GONE_FLAG | {"request", "seen"}
_OVER = {"last-ack", "time-wait", "close", "none"}
_OPENING = {"syn-sent", "syn-sent2"}


class ConntrackConnections:
    """The connections of the calling thread's network namespace."""

    kind = annotations.BY_CONNTRACK

    def __init__(self, maps: Maps) -> None:
        self._flows, self._gate = maps["tcp_flows"], Gate(maps)

    def found(self, wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        return {_through_entry(each) for each in self._search(wanted)}

    def reset(self, wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        counts, over = ResetCounts(), list[Connection]()
        with Sender() as sender:
            for each in list(self._search(wanted)):
                if each.state_name in _OPENING:  # the client's next SYN gets another endpoint
                    over.append(each)
                    continue
                counts[_through_entry(each)] += self._mark(each)
                to_client, to_backend = each.original.reversed(), each.reply.reversed()
                sender.send(to_client, [question_segment(to_client)])
                sender.send(to_backend, [question_segment(to_backend)])
                over += [each] if is_last else []
        conntrack.delete(over)
        return +counts

    def _search(self, wanted: WantedConnections) -> Iterator[Connection]:
        ports = wanted.ports
        try:
            listed = conntrack.connections(lambda _, __, port: port in ports, Protocol.TCP)
            for each in listed:
                if each.state_name not in _OVER and wanted.has(*_through_entry(each)):
                    yield each
        except NodeError as error:
            raise OSError(str(error)) from error

    def _mark(self, each: Connection) -> bool:
        """Mark the connection; return False if it is already marked."""
        key = Tuple(*each.original, Protocol.TCP, Hook.INGRESS)
        now = time.monotonic_ns()
        flow = Flow(
            created=now,
            connection=0,
            address=each.original.destination,
            port=each.original.destination_port,
            other_port=each.original.source_port,
            service=0,
            backend=0,
            ifindex=0,
            kind=FlowKind.DNAT,
            flags=_FLAGS,
            last_seen=now,
        )
        self._gate.open()
        return self._flows.insert(key, flow)


def _through_entry(each: Connection) -> tuple[Frontend, Endpoint]:
    frontend = Frontend(each.original.destination, each.original.destination_port, each.protocol)
    return frontend, (each.reply.source, each.reply.source_port)


class SocketConnections:
    """The sockets; ``can_destroy`` tries whether this kernel ends TCP sockets."""

    kind = annotations.BY_SOCKETS

    def __init__(
        self, maps: Maps, each_namespace: EachNamespace, can_destroy: Callable[[], bool]
    ) -> None:
        self._maps, self._each_namespace, self._can_destroy = maps, each_namespace, can_destroy
        self._can: bool | None = None  # not tried yet

    def found(self, wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        entries = self._peers(wanted).values()
        return {(entry.frontend, (entry.address, entry.port)) for entry in entries}

    def reset(self, wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        peers, ended = self._peers(wanted), ResetCounts()
        entries = {peer.socket: entry for peer, entry in peers.items()}
        if not entries or not self._can_end(len(entries)):
            return ended
        for diag in self._each_namespace(SockDiag, namespaces_of(self._maps, peers)):
            with diag:
                for entry in _end(diag, entries):
                    ended[entry.frontend, (entry.address, entry.port)] += 1
            if not entries:
                break
        return ended

    def _peers(self, wanted: WantedConnections) -> Sockets:
        def is_wanted(entry: PeerFrontend) -> bool:
            is_tcp = entry.frontend.protocol == Protocol.TCP
            return is_tcp and wanted.has(entry.frontend, (entry.address, entry.port))

        return peers_where(self._maps, is_wanted)

    def _can_end(self, count: int) -> bool:
        if self._can is None:
            self._can = self._can_destroy()
        if not self._can:
            log.warning(
                "this kernel cannot destroy TCP sockets: %d stay connected to a removed endpoint",
                count,
            )
        return self._can


def _end(diag: SockDiag, entries: dict[int, PeerFrontend]) -> Iterator[PeerFrontend]:
    """End the sockets in this namespace; yield their entries, which are removed from ``entries``.

    A socket that is now connected elsewhere is left alone.
    """
    ports = {entry.port for entry in entries.values()}
    port = ports.pop() if len(ports) == 1 else 0
    for one in list(diag.connected(Protocol.TCP, port)):
        entry = entries.get(one.cookie)
        if entry and one.remote == (entry.address, entry.port) and _destroyed(diag, one):
            yield entries.pop(one.cookie)


def _destroyed(diag: SockDiag, one: Connected) -> bool:
    """End the socket; return False also in TIME_WAIT, for which older kernels answer EOPNOTSUPP."""
    try:
        return diag.destroy(one)
    except KernelError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
