# SPDX-License-Identifier: Apache-2.0
"""An event of the datapath in words, and which of them somebody wants to see."""

import socket
import time
from datetime import UTC, datetime
from ipaddress import IPv4Network, IPv6Network
from typing import NamedTuple

import msgspec

from ebpflb.datapath.maps.layout import VERDICTS
from ebpflb.datapath.maps.records import MonitorEvent
from ebpflb.datapath.monitoring.decisions import FLOW_KINDS, HOOKS
from ebpflb.diagnose.event_names import EventNames
from ebpflb.model.addresses import Address
from ebpflb.plan.entries import Frontend
from ebpflb.plan.wording import host_port, protocol_name

_CALLS = {"connect", "sendmsg", "recvmsg", "getpeername", "bind"}


class Told(msgspec.Struct):
    """A decision. "" is what is not known, or what there is none of; ``ns`` is what it took."""

    time: str  # RFC 3339
    hook: str  # a call of a socket, or ingress or egress of a device
    verdict: str
    protocol: str
    process: str
    pid: int
    pod: str  # the client's
    client: str
    service: str
    frontend: str
    backend: str
    backend_pod: str
    device: str
    ns: int


class EventFilter(NamedTuple):
    """``service`` is NAMESPACE/NAME; None: any."""

    service: str | None = None
    client: IPv4Network | IPv6Network | None = None


class _Ends(NamedTuple):
    """Addresses and ports; None: not known."""

    client: tuple[Address, int] | None
    frontend: tuple[Address, int] | None
    backend: tuple[Address, int] | None


class Teller:
    """Says events in words, if they pass the filter."""

    def __init__(self, names: EventNames, wanted: EventFilter) -> None:
        self._names, self._wanted = names, wanted
        self._begun = time.time_ns() - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._devices: dict[int, str] = {}

    def tell(self, event: MonitorEvent) -> Told | None:
        hook = HOOKS[event.hook]
        ends = _ends_of_call(event) if hook in _CALLS else _ends_of_packet(event)
        frontend = Frontend(*ends.frontend, event.tuple.protocol) if ends.frontend else None
        service = self._names.service(event.service, frontend)
        if self._wanted.service not in (None, _named(service)):
            return None
        pod, addresses = self._client(event, ends)
        if self._wanted.client and not any(it in self._wanted.client for it in addresses):
            return None
        same = [it for it in addresses if it.version == event.tuple.destination.version]
        client = host_port(*ends.client) if ends.client else str(same[0]) if same else ""
        when = datetime.fromtimestamp((self._begun + event.time) / 1e9, UTC)
        return Told(
            time=when.isoformat(timespec="milliseconds"),
            hook=hook,
            verdict=VERDICTS[event.verdict],
            protocol=protocol_name(event.tuple.protocol),
            process=event.comm,
            pid=event.process,
            pod=pod,
            client=client,
            service=service,
            frontend=host_port(*ends.frontend) if ends.frontend else "",
            backend=host_port(*ends.backend) if ends.backend else "",
            backend_pod=self._names.target(event.backend) if event.backend else "",
            device=self._device(event.ifindex) if event.ifindex else "",
            ns=event.took,
        )

    def _client(self, event: MonitorEvent, ends: _Ends) -> tuple[str, tuple[Address, ...]]:
        """The pod, and the addresses that it may have."""
        if ends.client:
            return self._names.pod_at(ends.client[0]), (ends.client[0],)
        if event.netns:
            return self._names.place(event.netns, event.process)
        return "", ()

    def _device(self, index: int) -> str:
        """In the node's network namespace; its number where it has gone."""
        if index not in self._devices:
            try:
                self._devices[index] = socket.if_indextoname(index)
            except OSError:
                return str(index)
        return self._devices[index]


def _named(service: str) -> str:
    """NAMESPACE/NAME of what ``wording.service_name`` says."""
    return service.rpartition("/")[0].partition(":")[0]


def _ends_of_call(event: MonitorEvent) -> _Ends:
    """A call's address is its backend's only where it has one."""
    to = event.tuple.destination, event.tuple.destination_port
    return _Ends(None, to, (event.address, event.port) if event.backend else None)


def _ends_of_packet(event: MonitorEvent) -> _Ends:
    """By the entry of a known flow (bpf/layout/flow.h), else as the packet came."""
    source = event.tuple.source, event.tuple.source_port
    destination = event.tuple.destination, event.tuple.destination_port
    entry = event.address, event.port
    match FLOW_KINDS.get(event.kind):
        case "dnat":
            return _Ends(source, destination, entry)
        case "un_dnat":
            return _Ends(destination, entry, source)
        case "snat" | "snat_pending" | "direct":
            return _Ends(source, None, destination)
        case "un_snat":
            return _Ends(entry, None, source)
        case "un_direct":
            return _Ends(destination, None, source)
        case _:
            return _Ends(source, destination, entry if event.backend else None)
