# SPDX-License-Identifier: Apache-2.0
"""The rows that `ebpflb maps dump` shows, from maps filled by hand."""

import os
import time
from contextlib import closing
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.cli.output import as_data
from ebpflb.entries.flows import Tuple
from ebpflb.entries.services import (
    Backend,
    BackendLoad,
    BackendName,
    Frontend,
    Range,
    ServiceEntry,
    Settings,
)
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import (
    NO_FRONTEND,
    Affinity,
    AffinityKey,
    AssignmentKey,
    Attempt,
    BackendHealth,
    CountedConnection,
    Peer,
    PeerFrontend,
    ServiceBackend,
    ServiceClient,
    SocketEntry,
)
from ebpflb.kernel.netfilter.elements import Elements
from ebpflb.kernel.netfilter.table import NetfilterTable, TableOptions
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.tools.dump import ROWS, dump_maps
from tests.cli.described import faults
from tests.kernel.node import nodes
from tests.tools.conftest import count

WEB, UNNAMED, LOST = 7, 8, 99  # service ids: one has a name, one has none, one is nowhere
A, B, LEAVING = 21, 22, 23  # backend ids
NAME = PortName("shop", "web", "http", Protocol.TCP, Family.IPV4)
NOBODY = ip_address("::")


def frontend(ip: str, port: int = 80, protocol: int = 6) -> Frontend:
    return Frontend(ip_address(ip), port, protocol)


def entry(
    where: Frontend, number: int, *flags: str, affinity: int = 0
) -> tuple[Frontend, ServiceEntry]:
    """A frontend of WEB, with the slots 40 to 42, or of another service, with the slot 50."""
    cluster, local = (Range(40, 2), Range(40, 1)) if number == WEB else (Range(50, 1), Range(50, 0))
    slots = 3 if number == WEB else 1
    return where, ServiceEntry(number, frozenset(flags), affinity, slots, cluster, local)


def backend(number: int, ip: str, *flags: str, service: int = WEB) -> Backend:
    return Backend(ip_address(ip), 8080, frozenset(flags), number, service)


@pytest.fixture(scope="module", autouse=True)
def filled(maps: dict[str, Map]) -> None:
    maps["services"].write(
        [
            entry(frontend("10.96.0.1"), WEB, "endpoints", affinity=60),
            entry(frontend("203.0.113.1"), WEB, "external", "endpoints", "local"),
            entry(frontend("203.0.113.2"), WEB, "external", "load_balancer", "endpoints"),
            entry(frontend("0.0.0.0", 30080), WEB, "external", "endpoints"),
            entry(frontend("fd00::1", 53, 17), UNNAMED),
        ]
    )
    maps["slots"].write(
        [
            (40, backend(A, "10.1.0.1", "cluster", "local")),
            (41, backend(B, "10.1.0.2", "cluster")),
            (42, backend(LEAVING, "10.1.0.3")),
            (50, backend(A + 100, "fd00:1::1", "cluster", service=UNNAMED)),
        ]
    )
    maps["backend_slots"].write([(A, 40), (B, 41), (LEAVING, 42), (A + 100, 50)])
    maps["service_names"].write([(WEB, NAME)])
    maps["backend_names"].write(
        [(A, BackendName("node-1", "web-0")), (B, BackendName("node-2", ""))]
    )
    maps["node_addresses"].write([(ip_address("192.0.2.1"), 1), (ip_address("2001:db8::1"), 1)])
    maps["own_addresses"].write([(ip_address("203.0.113.20"), 1)])
    maps["link_addresses"].write([("02:00:00:00:00:0a", 1)])
    maps["settings"].write([(0, Settings(5, 8, frozenset({"guard_nodeports"})))])
    count(maps["service_stats"], WEB, 10, 4, 2, 1)
    count(maps["backend_stats"], A, 5, 3)
    count(maps["backend_stats"], B, 1, 2)
    count(maps["verdicts"], 1, 77)


@pytest.fixture(scope="module", autouse=True)
def remembered(maps: dict[str, Map], filled: None) -> None:
    """What the datapath writes."""
    address, now = ip_address("10.1.0.1"), time.monotonic_ns()
    maps["affinity"].write(
        [
            (AffinityKey(4711, NOBODY, WEB), Affinity(now - 3_000_000_000, A)),
            (AffinityKey(0, ip_address("198.51.100.1"), LOST), Affinity(now, LOST)),
        ]
    )
    maps["sockets"].write(
        [
            (1, SocketEntry(PeerFrontend(frontend("10.96.0.1"), A, address, 8080), WEB, counted=8)),
            (2, SocketEntry(PeerFrontend(frontend("10.96.0.9"), A, address, 8080), LOST)),
            (4, SocketEntry(PeerFrontend(NO_FRONTEND, A, address, 8080), LOST)),
        ]
    )
    asked = PeerFrontend(frontend("10.96.0.1", 53, 17), A, address, 8080)
    maps["assignments"].write([(AssignmentKey(3, asked.frontend), SocketEntry(asked, LOST))])
    maps["peers"].write([(Peer(3, address, 8080), asked)])


def rows(maps: dict[str, Map], name: str) -> list[dict[str, Any]]:
    return dump_maps(maps, (name,)).maps[name]


def column(maps: dict[str, Map], name: str, *keys: str) -> list[Any]:
    found = [tuple(row[key] for key in keys) for row in rows(maps, name)]
    return [each[0] for each in found] if len(keys) == 1 else found


def test_every_map(maps: dict[str, Map]) -> None:
    """Without names every map that lasts is shown; with names these alone, in their order."""
    hidden = {"scratch", "secret", "timeouts", "no_frontends", "moved_flows"}
    names = maps.keys() - hidden | {"conntrack", "translations"}
    assert dump_maps(maps).maps.keys() == ROWS.keys() == names
    assert list(dump_maps(maps, ("slots", "backend_slots")).maps) == ["slots", "backend_slots"]


def test_endpoints_that_were_not_reached(maps: dict[str, Map]) -> None:
    """Which client's last connection to a Service opened, and how many failed at which endpoint."""
    maps["service_clients"].write([(ServiceClient(0x2A, WEB), 1)])
    failed = BackendHealth(since=time.monotonic_ns(), first=0x2B, second=0x2A)
    opened = BackendHealth(has_opened=1)
    maps["backend_health"].write(
        [(ServiceBackend(WEB, A), failed), (ServiceBackend(WEB, LOST), opened)]
    )
    assert column(maps, "service_clients", "service", "client_hash") == [
        ("shop/web:http/TCP", "0x2a")
    ]
    assert column(maps, "backend_health", "endpoint", "clients_failed", "has_opened") == [
        ("10.1.0.1:8080", 2, False),
        (f"removed (#{LOST})", 0, True),
    ]


def test_connections_without_an_answer(maps: dict[str, Map]) -> None:
    key = Tuple(ip_address("192.0.2.7"), ip_address("10.96.0.1"), 40001, 80, 6, 1)
    maps["attempts"].write([(key, Attempt(0x2A, time.monotonic_ns(), WEB, A, 1))])
    shown = "source", "destination", "service", "endpoint", "client_hash", "has_failed"
    assert column(maps, "attempts", *shown) == [
        ("192.0.2.7:40001", "10.96.0.1:80", "shop/web:http/TCP", "10.1.0.1:8080", "0x2a", True)
    ]


def test_translations(maps: dict[str, Map]) -> None:
    """What netfilter's table holds, with names; of an id that has gone the endpoint alone."""
    with nodes.fresh(f"ebpflb-test-{os.getpid()}-translations"):
        assert rows(maps, "translations") == []
        options = TableOptions(0x4000, ((30000, 65535),), drops_invalid=True, sctp=False)
        with closing(NetfilterTable(options)) as table:
            table.build()
            elements = Elements(table.session, options)
            elements.write([(LOST, ip_address("fd00::9"), 9), (A, ip_address("10.0.0.1"), 8080)])
            assert rows(maps, "translations") == [
                {
                    "service": "shop/web:http/TCP",
                    "endpoint": "10.0.0.1:8080",
                    "target": dict(maps["backend_names"].items())[A].target,
                    "id": A,
                },
                {"service": "", "endpoint": "[fd00::9]:9", "target": "", "id": LOST},
            ]


def test_service_row(maps: dict[str, Map]) -> None:
    """Ranges, policy, affinity and live counters stand beside the frontend."""
    row = next(row for row in rows(maps, "services") if row["frontend"] == "10.96.0.1:80")
    assert (row["cluster_slots"], row["local_slots"], row["policy"]) == (
        "40-41",
        "40-40",
        "Cluster",
    )
    assert (row["affinity_seconds"], row["has_endpoints"]) == (60, True)
    assert (row["chosen"], row["by_affinity"], row["refused"], row["no_local_endpoint"]) == (
        10,
        4,
        2,
        1,
    )


def test_counted_connections(maps: dict[str, Map]) -> None:
    """Sockets and flows of services with least-connections, and how many their endpoints have."""
    maps["backend_loads"].write([(A, BackendLoad(2, 1, 4)), (B, BackendLoad(0, 3))])
    keys = [AssignmentKey(4711, NO_FRONTEND), AssignmentKey(2**63 | 5, NO_FRONTEND)]
    maps["connections"].write([(key, CountedConnection(A, 1)) for key in keys])
    assert column(maps, "connections", "of", "number", "endpoint") == [
        ("socket", 4711, "10.1.0.1:8080"),
        ("flow", 2**63 | 5, "10.1.0.1:8080"),
    ]
    assert column(maps, "backend_loads", "id", "open", "uncounted")[:2] == [(A, 2, 4), (B, 0, 0)]


def test_affinity(maps: dict[str, Map]) -> None:
    """Clients by namespace or address, idle times, and endpoints that are no more."""
    by_address, by_netns = rows(maps, "affinity")
    assert (by_netns["netns"], by_netns["endpoint"]) == (4711, "10.1.0.1:8080")
    assert by_netns["idle_seconds"] >= 3
    assert by_address["client"] == "198.51.100.1"
    assert (by_address["service"], by_address["endpoint"]) == ("#99", "removed (#99)")


def test_sockets(maps: dict[str, Map]) -> None:
    """The frontend and true peer of each socket; the service if it is still there. A socket that
    was ended has none.
    """
    assert column(maps, "sockets", "socket", "frontend", "peer", "service", "counted") == [
        (1, "10.96.0.1:80", "10.1.0.1:8080", "shop/web:http/TCP", True),
        (2, "10.96.0.9:80", "10.1.0.1:8080", "", False),
    ]


@pytest.mark.parametrize(("writes", "changed"), [(8, False), (9, True)])
def test_changed(maps: dict[str, Map], writes: int, changed: bool) -> None:
    """A dump says when the agent was writing."""
    settings = maps["settings"].get(0)
    maps["settings"].write([(0, settings._replace(writes=writes))])
    assert dump_maps(maps).changed_while_reading is changed
    maps["settings"].write([(0, settings)])


def test_every_word_is_described(maps: dict[str, Map]) -> None:
    """docs/output.md has the words of all rows, with their types."""
    found = as_data([row for rows in dump_maps(maps).maps.values() for row in rows])
    assert not [*faults(found, "maps")]
