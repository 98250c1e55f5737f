# SPDX-License-Identifier: Apache-2.0
"""The Records of all structs that are keys and values of maps, checked at import.

Entries that the agent writes are defined in plan/entries.py, those of the datapath here.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from ebpflb.kernel.maps.layout import Record, address_bytes, address_from
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan import entries
from ebpflb.plan.flow_entries import Flow, Tuple

# What the programs store about packets that open no flow.


class FragmentKey(NamedTuple):
    source: Address
    destination: Address
    id: int
    protocol: int
    hook: int


class FragmentPorts(NamedTuple):
    seen: int
    source_port: int
    destination_port: int


class Forwarded(NamedTuple):
    since: int
    hops: int
    replied: int


# What the datapath stores about sockets (bpf/layout/socket.h).

NO_FRONTEND = entries.Frontend(address_from(bytes(16)), 0, 0)


class Peer(NamedTuple):
    socket: int
    address: Address
    port: int


class PeerFrontend(NamedTuple):
    frontend: entries.Frontend
    backend: int
    address: Address
    port: int
    is_connected: int = 1


class SocketEntry(NamedTuple):
    """A socket's data; ``next`` has no port at the end of the list."""

    peer: PeerFrontend
    service: int
    is_shared: int = 0
    is_unlisted: int = 0
    expires: int = 0
    stream_from: int = 0
    netns: int = 0
    next: entries.Frontend = NO_FRONTEND
    counted: int = 0


class SocketsFull(NamedTuple):
    streams: int
    datagrams: int


class AssignmentKey(NamedTuple):
    socket: int
    frontend: entries.Frontend


# The working memory of the packet programs: struct scratch and its parts.


class SelectedBackend(NamedTuple):
    """C: struct selection."""

    backend: entries.Backend
    service: entries.ServiceEntry
    is_local_client: int
    is_assigned: int
    is_pending: int


class Ending(NamedTuple):
    between: Tuple
    reply_tuple: Tuple
    request_tuple: Tuple


class ReadPacket(NamedTuple):
    tuple: Tuple
    transport: int
    end: int
    second: int
    id: int
    piece: int
    v6: int
    options: int
    opens: int
    ends: int
    sequence: int
    acknowledgment: int
    bytes: int
    tag: int
    chosen: int
    reflected: int
    header: int
    control: int


class NextHop(NamedTuple):
    family: int
    address: Address


class PortSequence(NamedTuple):
    first: int
    size: int
    next: int
    step: int


class Onward(NamedTuple):
    to: Tuple
    known: Flow
    between: Tuple
    second: Flow
    after: Tuple
    device: int
    next: NextHop
    mtu: int


class Opening(NamedTuple):
    selection: SelectedBackend
    request_entry: Flow
    reply_entry: Flow
    snat_entry: Flow
    reply_tuple: Tuple
    snat_tuple: Tuple
    other: Flow
    former_request_tuple: Tuple
    source: Address
    claim: Tuple
    ending: Ending
    holder_created: int
    holder_connection: int
    oldest: int
    oldest_created: int
    oldest_port: int
    ports: PortSequence


class Scratch(NamedTuple):
    packet: ReadPacket
    onward: Onward
    opening: Opening


class AffinityKey(NamedTuple):
    netns: int
    address: Address
    service: int


class Affinity(NamedTuple):
    last_used: int
    backend: int


class CountedConnection(NamedTuple):
    backend: int
    generation: int


class HalfOpen(NamedTuple):
    request: Tuple
    reply: Tuple
    created: int


class FlowGate(NamedTuple):
    opened: int
    written: int
    empty: int


class DatagramChoice(NamedTuple):
    service: int
    chosen: int
    frontend_moves: int
    last_used: int


class Rotation(NamedTuple):
    """``lock`` belongs to the kernel: no agent reads or writes it."""

    lock: int
    cluster: int
    local: int


class Sweep(NamedTuple):
    swept: int
    entries: int
    evicted: int


class FlowCounters(NamedTuple):
    created: int
    deleted: int
    full: int
    displaced: int


class RejectBudget(NamedTuple):
    refilled: int
    left: int


class MonitorEvent(NamedTuple):
    time: int
    netns: int
    took: int
    process: int
    ifindex: int
    service: int
    backend: int
    port: int
    verdict: int
    hook: int
    kind: int
    tuple: Tuple
    address: Address
    comm: str


class Monitor(NamedTuple):
    verdicts: int
    process_offset: int
    comm_offset: int


class ServiceCounters(NamedTuple):
    chosen: int
    by_affinity: int
    refused: int
    no_local_endpoint: int


class BackendCounters(NamedTuple):
    opened: int
    closed: int


FRONTEND = Record("struct frontend", entries.Frontend)
PEER_FRONTEND = Record("struct peer_frontend", PeerFrontend, {"frontend": FRONTEND})
_RANGE = Record("struct range", entries.Range)
SERVICE = Record(
    "struct service",
    entries.ServiceEntry,
    {"cluster": _RANGE, "local": _RANGE, "table": _RANGE},
)
BACKEND = Record("struct backend", entries.Backend)
_PREFIX = Record("struct prefix", entries.Prefix)
_TUPLE, _FLOW = Record("struct tuple", Tuple), Record("struct flow", Flow)
_PACKET = Record("struct packet", ReadPacket, {"tuple": _TUPLE})
_ENDING = Record(
    "struct ending", Ending, dict.fromkeys(("between", "reply_tuple", "request_tuple"), _TUPLE)
)
_SELECTION = Record("struct selection", SelectedBackend, {"backend": BACKEND, "service": SERVICE})
_ONWARD = Record(
    "struct onward",
    Onward,
    dict[str, Record[Any]]({"next": Record("struct next_hop", NextHop)})
    | dict.fromkeys(("to", "between", "after"), _TUPLE)
    | dict.fromkeys(("known", "second"), _FLOW),
)
_OPENING = Record(
    "struct opening",
    Opening,
    dict[str, Record[Any]]({"selection": _SELECTION, "ending": _ENDING})
    | {"ports": Record("struct port_sequence", PortSequence)}
    | dict.fromkeys(("request_entry", "reply_entry", "snat_entry", "other"), _FLOW)
    | dict.fromkeys(("reply_tuple", "snat_tuple", "former_request_tuple", "claim"), _TUPLE),
)
SETTINGS = Record(
    "struct settings",
    entries.Settings,
    dict.fromkeys(("pods_v4", "pods_v6", "span_v4", "span_v6"), _PREFIX),
)
SERVICE_NAME = Record("struct service_name", PortName)
BACKEND_NAME = Record("struct backend_name", entries.BackendName)

RECORDS: dict[str, Record[Any]] = {
    "struct frontend": FRONTEND,
    "struct service": SERVICE,
    "struct backend": BACKEND,
    "struct affinity_key": Record("struct affinity_key", AffinityKey),
    "struct affinity": Record("struct affinity", Affinity),
    "struct peer": Record("struct peer", Peer),
    "struct peer_frontend": PEER_FRONTEND,
    "struct socket_entry": Record(
        "struct socket_entry", SocketEntry, {"peer": PEER_FRONTEND, "next": FRONTEND}
    ),
    "struct sockets_full": Record("struct sockets_full", SocketsFull),
    "struct assignment_key": Record("struct assignment_key", AssignmentKey, {"frontend": FRONTEND}),
    "struct connection": Record("struct connection", CountedConnection),
    "struct backend_load": Record("struct backend_load", entries.BackendLoad),
    "struct tuple": _TUPLE,
    "struct flow": _FLOW,
    "struct scratch": Record(
        "struct scratch", Scratch, {"packet": _PACKET, "onward": _ONWARD, "opening": _OPENING}
    ),
    "struct half_open": Record("struct half_open", HalfOpen, {"request": _TUPLE, "reply": _TUPLE}),
    "struct flow_gate": Record("struct flow_gate", FlowGate),
    "struct datagram_choice": Record("struct datagram_choice", DatagramChoice),
    "struct forwarded": Record("struct forwarded", Forwarded),
    "struct fragment_key": Record("struct fragment_key", FragmentKey),
    "struct fragment_ports": Record("struct fragment_ports", FragmentPorts),
    "struct flow_counters": Record("struct flow_counters", FlowCounters),
    "struct choice": Record("struct choice", entries.Choice),
    "struct rotation": Record("struct rotation", Rotation),
    "struct sweep": Record("struct sweep", Sweep),
    "struct reject_budget": Record("struct reject_budget", RejectBudget),
    "struct source_range": Record("struct source_range", entries.SourceRange),
    "struct service_range": Record("struct service_range", entries.ServiceRange),
    "struct route": Record("struct route", entries.RouteKey),
    "struct device": Record("struct device", entries.DeviceEntry),
    "struct timeout_key": Record("struct timeout_key", entries.TimeoutKey),
    "struct timeout": Record("struct timeout", entries.Timeout),
    "struct settings": SETTINGS,
    "struct event": Record("struct event", MonitorEvent, {"tuple": _TUPLE}),
    "struct monitor": Record("struct monitor", Monitor),
    "struct service_counters": Record("struct service_counters", ServiceCounters),
    "struct backend_counters": Record("struct backend_counters", BackendCounters),
    "struct service_name": SERVICE_NAME,
    "struct backend_name": BACKEND_NAME,
}


class Codec(NamedTuple):
    """Convert values of one C type to bytes and back."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


def _mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", "")) + bytes(2)


_MAC_BYTES = 6
_NUMBER32, _NUMBER64 = struct.Struct("=I"), struct.Struct("=Q")
_PLAIN = {
    "struct steps": Codec(bytes, bytes),  # ebpflb/kernel/recording.py reads them
    "__u32": Codec(_NUMBER32.pack, lambda packed: _NUMBER32.unpack(packed)[0]),
    "__u64": Codec(_NUMBER64.pack, lambda packed: _NUMBER64.unpack(packed)[0]),
    "struct address": Codec(address_bytes, address_from),
    "struct link_address": Codec(_mac_bytes, lambda packed: packed[:_MAC_BYTES].hex(":")),
}


def codec(ctype: str) -> Codec:
    """Return the codec of a map's key or value type, as maps.h names it."""
    if ctype in _PLAIN:
        return _PLAIN[ctype]
    return Codec(RECORDS[ctype].pack, RECORDS[ctype].unpack)
