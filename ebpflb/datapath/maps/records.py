# SPDX-License-Identifier: Apache-2.0
"""The Records of all structs that are keys and values of maps, checked at import.

What the agent writes is defined in plan/entries.py, what the datapath writes is here.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from ebpflb.datapath.maps.layout import Record, address_bytes, address_from
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan import entries
from ebpflb.plan.flow_entries import Flow, Tuple


class AffinityKey(NamedTuple):
    netns: int
    address: Address
    service: int


class Affinity(NamedTuple):
    last_used: int
    backend: int


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


class AssignmentKey(NamedTuple):
    socket: int
    frontend: entries.Frontend


class Assignment(NamedTuple):
    service: int
    backend: int
    address: Address
    port: int
    next: entries.Frontend
    expires: int = 0
    stream_from: int = 0


class SelectedBackend(NamedTuple):
    """C: struct selection."""

    service: entries.ServiceEntry
    backend: entries.Backend
    is_local_client: int
    is_assigned: int
    is_pending: int


class Ending(NamedTuple):
    between: Tuple
    reply_tuple: Tuple
    request_tuple: Tuple


class Scratch(NamedTuple):
    selection: SelectedBackend
    request_entry: Flow
    reply_entry: Flow
    snat_entry: Flow
    reply_tuple: Tuple
    snat_tuple: Tuple
    former_request_tuple: Tuple
    claim: Tuple
    ending: Ending
    holder_created: int
    oldest: int
    oldest_created: int
    oldest_port: int


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


class HalfOpen(NamedTuple):
    request: Tuple
    reply: Tuple
    created: int


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


class ServiceCounters(NamedTuple):
    chosen: int
    by_affinity: int
    refused: int
    no_local_endpoint: int


class BackendCounters(NamedTuple):
    opened: int
    closed: int


FRONTEND = Record("struct frontend", entries.Frontend)
_RANGE = Record("struct range", entries.Range)
SERVICE = Record(
    "struct service",
    entries.ServiceEntry,
    {"frontend": FRONTEND, "cluster": _RANGE, "local": _RANGE},
)
BACKEND = Record("struct backend", entries.Backend)
_PREFIX = Record("struct prefix", entries.Prefix)
_TUPLE, _FLOW = Record("struct tuple", Tuple), Record("struct flow", Flow)
_ENDING = Record(
    "struct ending", Ending, dict.fromkeys(("between", "reply_tuple", "request_tuple"), _TUPLE)
)
_SELECTION = Record("struct selection", SelectedBackend, {"service": SERVICE, "backend": BACKEND})
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
    "struct peer_frontend": Record("struct peer_frontend", PeerFrontend, {"frontend": FRONTEND}),
    "struct assignment_key": Record("struct assignment_key", AssignmentKey, {"frontend": FRONTEND}),
    "struct assignment": Record("struct assignment", Assignment, {"next": FRONTEND}),
    "struct tuple": _TUPLE,
    "struct flow": _FLOW,
    "struct scratch": Record(
        "struct scratch",
        Scratch,
        dict[str, Record[Any]]({"selection": _SELECTION, "ending": _ENDING})
        | dict.fromkeys(("request_entry", "reply_entry", "snat_entry"), _FLOW)
        | dict.fromkeys(("reply_tuple", "snat_tuple", "former_request_tuple", "claim"), _TUPLE),
    ),
    "struct half_open": Record("struct half_open", HalfOpen, {"request": _TUPLE, "reply": _TUPLE}),
    "struct forwarded": Record("struct forwarded", Forwarded),
    "struct fragment_key": Record("struct fragment_key", FragmentKey),
    "struct fragment_ports": Record("struct fragment_ports", FragmentPorts),
    "struct flow_counters": Record("struct flow_counters", FlowCounters),
    "struct sweep": Record("struct sweep", Sweep),
    "struct reject_budget": Record("struct reject_budget", RejectBudget),
    "struct source_range": Record("struct source_range", entries.SourceRange),
    "struct service_range": Record("struct service_range", entries.ServiceRange),
    "struct device": Record("struct device", entries.DeviceEntry),
    "struct timeout_key": Record("struct timeout_key", entries.TimeoutKey),
    "struct timeout": Record("struct timeout", entries.Timeout),
    "struct settings": SETTINGS,
    "struct service_counters": Record("struct service_counters", ServiceCounters),
    "struct backend_counters": Record("struct backend_counters", BackendCounters),
    "struct service_name": SERVICE_NAME,
    "struct backend_name": BACKEND_NAME,
}


class Codec(NamedTuple):
    """How values of one C type become bytes and back."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


_NUMBER32, _NUMBER64 = struct.Struct("=I"), struct.Struct("=Q")
_PLAIN = {
    "__u32": Codec(_NUMBER32.pack, lambda packed: _NUMBER32.unpack(packed)[0]),
    "__u64": Codec(_NUMBER64.pack, lambda packed: _NUMBER64.unpack(packed)[0]),
    "struct address": Codec(address_bytes, address_from),
}


def codec(ctype: str) -> Codec:
    """The codec of a map's key or value type, as maps.h names it."""
    if ctype in _PLAIN:
        return _PLAIN[ctype]
    return Codec(RECORDS[ctype].pack, RECORDS[ctype].unpack)
