# SPDX-License-Identifier: Apache-2.0
"""The Services that firewall rules may name, and what of the node's settings matters to them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import device_watch
from ebpflb.model.addresses import Address
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import NODE_PORT, host_port
from ebpflb.tools.firewall.rules import Ranges, number
from ebpflb.tools.snapshot import Snapshot, kind

CLUSTER_IP, LOAD_BALANCER = "ClusterIP", "LoadBalancer"
_NODEPORTS = range(30000, 32768)  # the API server's default --service-node-port-range
_MOST_ADDRESSES = 16  # of the node, at which a NodePort is looked for
_MOST_ENDPOINTS = 8  # of a Service, that are compared


class Settings(NamedTuple):
    """What is in force on the node; ``own`` are its addresses."""

    engine: Engine
    own: frozenset[int] = frozenset()
    host_sockets: bool = False  # --socket-translation=host
    packet_mark: bool = False  # --packet-mark is set


class Frontend(NamedTuple):
    """``title`` names it and its Service. ``endpoints`` are addresses and ports. ``by_flows``: the
    flow tables serve it on either engine.
    """

    kind: str
    protocol: int
    family: int
    addresses: tuple[int, ...]
    port: int
    title: str
    endpoints: tuple[tuple[int, int], ...]
    by_flows: bool = False


class Frontends:
    """All of them, those for clients outside first, and by address and port: their own, and those
    of their endpoints.
    """

    def __init__(self, found: Iterable[Frontend]) -> None:
        self.all = sorted(found, key=lambda it: (_ORDER.index(it.kind), it.family, it.port))
        self.by_address = _Index(
            (address, it) for it in self.all for address in (*it.addresses, *dict(it.endpoints))
        )
        self.by_port = _Index(
            (port, it) for it in self.all for port in (it.port, *dict(it.endpoints).values())
        )


_ORDER = (NODE_PORT, LOAD_BALANCER, "ExternalIP", CLUSTER_IP)


class _Index:
    def __init__(self, entries: Iterable[tuple[int, Frontend]]) -> None:
        self._entries = sorted(entries, key=itemgetter(0))
        self._numbers = [entry[0] for entry in self._entries]

    def within(self, ranges: Ranges) -> Iterator[Frontend]:
        """Those with a number in the ranges."""
        for first, last in ranges.pairs:
            begin, end = bisect_left(self._numbers, first), bisect_right(self._numbers, last)
            yield from (frontend for _, frontend in self._entries[begin:end])


def in_force(state_directory: Path, engine: Engine) -> tuple[Settings, list[Frontend], bool]:
    """From the maps; the last is False if there are none. ``engine`` is the one to expect then.
    Raises NodeError.
    """
    addresses = device_watch.list_devices().addresses
    own = frozenset(map(number, addresses))
    try:
        maps = StateDir(state_directory).read_maps()
    except NodeError:
        return Settings(engine, own), list(_expected(addresses)), False
    try:
        settings = maps["settings"].get(0)
        flags = settings.flags
        found = Settings(
            Engine.NETFILTER if "netfilter" in flags else Engine.FLOWS,
            own,
            "host_sockets" in flags,
            bool(settings.mark_mask),
        )
        return found, list(_programmed(maps, sctp="netfilter_sctp" in flags)), True
    finally:
        for opened in maps.values():
            opened.close()


def _programmed(maps: Mapping[str, Map], *, sctp: bool) -> Iterator[Frontend]:
    """Those in the maps that have endpoints: others are not translated. ``sctp``: whether the
    kernel's NAT can translate it.
    """
    snapshot = Snapshot.read(maps)
    serving = _of_node(address for address, _ in maps["node_addresses"].items())
    endpoints: dict[int, list[tuple[int, int]]] = {}
    for backend in snapshot.slots.values():
        endpoint = number(backend.address), backend.port
        endpoints.setdefault(backend.service, []).append(endpoint)
    for frontend, service in snapshot.services.items():
        address, port = frontend.address, frontend.port
        if service.id in endpoints:
            where = f"NodePort {port}" if address.is_unspecified else host_port(address, port)
            yield Frontend(
                kind(frontend, service),
                frontend.protocol,
                address.version,
                serving[address.version] if address.is_unspecified else (number(address),),
                port,
                f"{where} ({snapshot.service(service.id)})",
                tuple(dict.fromkeys(endpoints[service.id]))[:_MOST_ENDPOINTS],
                "least_connections" in service.flags
                or (frontend.protocol == Protocol.SCTP and not sctp),
            )


def _expected(addresses: Iterable[Address]) -> Iterator[Frontend]:
    """Where nothing is programmed yet: every NodePort that a Service may get; its endpoint is not
    known.
    """
    serving = _of_node(addresses)
    for port, protocol, family in product(_NODEPORTS, (Protocol.TCP, Protocol.UDP), (4, 6)):
        title = f"NodePort {port}"
        yield Frontend(NODE_PORT, protocol, family, serving[family], port, title, ((-1, -1),))


def _of_node(addresses: Iterable[Address]) -> dict[int, tuple[int, ...]]:
    """Those at which clients outside reach a NodePort, by family."""
    found = [it for it in addresses if not (it.is_loopback or it.is_link_local)]
    return {
        family: tuple(sorted(number(it) for it in found if it.version == family))[:_MOST_ADDRESSES]
        for family in (4, 6)
    }
