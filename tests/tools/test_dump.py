# SPDX-License-Identifier: Apache-2.0
"""The rows of `ebpflb maps dump`, from maps filled by hand."""

import json
import os
import time
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.entries.flows import Flow, FlowKind, Tuple
from ebpflb.entries.services import (
    CHOSEN_LIFT,
    NO_V4,
    NO_V6,
    Backend,
    BackendLoad,
    BackendName,
    Chosen,
    DeviceEntry,
    Frontend,
    Prefix,
    Range,
    ServiceEntry,
    ServiceRange,
    Settings,
    SourceRange,
)
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import (
    NO_FRONTEND,
    Affinity,
    AffinityKey,
    BackendHealth,
    Peer,
    PeerFrontend,
    ServiceBackend,
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

RECORDED = Path(__file__).with_name("rows.yaml")
AGES = {"age_seconds", "idle_seconds"}
LONG = 90  # seconds in which no machine takes the rows
WEB, UNNAMED, LOST = 7, 8, 99  # service ids: one has a name, one has none, one is nowhere
A, B, LEAVING = 21, 22, 23  # backend ids
NAME = PortName("shop", "web", "http", Protocol.TCP, Family.IPV4)
NOBODY = ip_address("::")


CLIENT, FRONTEND, NODE, POD = map(
    ip_address, ("198.51.100.7", "203.0.113.1", "192.0.2.1", "10.244.1.11")
)
NO_DEVICE = 2**31 - 1


def mask(bits: int) -> Any:
    return ip_address(((1 << bits) - 1) << (128 - bits))


def frontend(ip: str, port: int = 80, protocol: int = 6) -> Frontend:
    return Frontend(ip_address(ip), port, protocol)


def entry(
    where: Frontend, number: int, *flags: str, affinity: int = 0
) -> tuple[Frontend, ServiceEntry]:
    """Return a frontend of WEB, with the slots 40 to 42, or of another service, with slot 50."""
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
    key, value = maps["services"].packed(*entry(frontend("10.96.0.1"), WEB, "endpoints"))
    maps["service_places"].write([(9, key + bytes(4) + value + bytes(20))])
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
    pods = Prefix(ip_address("10.244.0.0"), mask(96 + 16))
    span = Prefix(ip_address("fd00:96::"), mask(108))
    flags = frozenset({"guard_nodeports", "detect_local"})
    settings = Settings(5, 8, flags, 61000, 65535, pods_v4=pods, span_v6=span, node_v4=NODE)
    maps["settings"].write([(0, settings)])
    count(maps["service_stats"], WEB, 10, 4, 2, 1)
    count(maps["backend_stats"], A, 5, 3)
    count(maps["backend_stats"], B, 1, 2)
    count(maps["verdicts"], 1, 77)


@pytest.fixture(scope="module", autouse=True)
def remembered(maps: dict[str, Map], filled: None) -> None:
    """Write entries as the datapath does."""
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
    maps["assignments"].write([((3, asked.frontend), SocketEntry(asked, LOST))])
    maps["peers"].write([(Peer(3, address, 8080), asked)])
    maps["service_clients"].write([((0x2A, WEB), 1)])
    failed = BackendHealth(since=now, first=0x2B, second=0x2A)
    opened = BackendHealth(has_opened=1)
    maps["backend_health"].write(
        [(ServiceBackend(WEB, A), failed), (ServiceBackend(WEB, LOST), opened)]
    )
    key = Tuple(ip_address("192.0.2.7"), ip_address("10.96.0.1"), 40001, 80, 6, 1)
    maps["attempts"].write([(key, (0x2A, now, WEB, A, 1))])
    maps["backend_loads"].write([(A, BackendLoad(2, 1, 4)), (B, BackendLoad(0, 3))])
    keys = [(4711, NO_FRONTEND), (2**63 | 5, NO_FRONTEND)]
    maps["connections"].write([(key, (A, 1)) for key in keys])


@pytest.fixture(scope="module", autouse=True)
def filled_for_packets(maps: dict[str, Map]) -> None:
    """Write the entries that an agent writes only for the packet path."""
    for length, address in ((64 + 96 + 24, "198.51.100.0"), (64 + 48, "2001:db8::")):
        maps["source_ranges"].write([(SourceRange(length, WEB, 0, ip_address(address)), 1)])
    for length, address in ((96 + 16, "10.96.0.0"), (108, "fd00:96::")):
        maps["service_ranges"].write([(ServiceRange(length, ip_address(address)), 1)])
    maps["cluster_ips"].write([(FRONTEND, 1), (ip_address("10.96.0.1"), 1)])
    maps["devices"].write(
        [
            (1, DeviceEntry(NODE, ip_address("2001:db8::1"), frozenset())),
            (NO_DEVICE, DeviceEntry(NO_V4, NO_V6, frozenset({"pods"}))),
        ]
    )


@pytest.fixture(scope="module", autouse=True)
def remembered_of_packets(maps: dict[str, Map]) -> None:
    """Write a masqueraded flow whose client's port was changed, and all other entries that the
    datapath writes.
    """
    now = time.monotonic_ns()
    begun, request = now - LONG * 1_000_000_000, frozenset({"request"})
    dnat = Flow(begun, 0, POD, 8080, 2000, WEB, A, 0, FlowKind.DNAT, request, last_seen=now)
    snat = dnat._replace(address=NODE, port=61000, other_port=8080, kind=FlowKind.SNAT)
    un_dnat = dnat._replace(address=FRONTEND, port=80, other_port=1000, kind=FlowKind.UN_DNAT)
    un_snat = dnat._replace(address=CLIENT, port=2000, other_port=8080, kind=FlowKind.UN_SNAT)
    maps["tcp_flows"].write(
        [
            (Tuple(POD, CLIENT, 8080, 2000, 6, 2), un_dnat._replace(flags=frozenset())),
            (Tuple(POD, NODE, 8080, 61000, 6, 1), un_snat._replace(flags=frozenset({"seen"}))),
            (Tuple(CLIENT, POD, 2000, 8080, 6, 2), snat),
            (Tuple(CLIENT, FRONTEND, 1000, 80, 6, 1), dnat),
        ]
    )
    pending = dnat._replace(address=NO_V6, port=0, other_port=53, service=99, backend=99)
    pending = pending._replace(kind=FlowKind.SNAT_PENDING)
    direct = dnat._replace(created=now, service=0, backend=0, kind=FlowKind.DIRECT)
    maps["other_flows"].write(
        [(Tuple(CLIENT, POD, 2000, 53, 17, 2), pending), (Tuple(CLIENT, POD, 1, 53, 17, 1), direct)]
    )
    maps["fragments"].write([((CLIENT, FRONTEND, 4711, 17, 1), (now, 5000, 53))])
    maps["forwarded"].write([(Tuple(CLIENT, FRONTEND, 9, 80, 6, 2), (begun, 62, 1))])
    asked = Tuple(CLIENT, FRONTEND, 1000, 80, 6, 1)
    chosen = Chosen.PREFIX | Chosen.MASQUERADE | Chosen.LIFTED | A & ~15 | (A & 15) << CHOSEN_LIFT
    maps["udp_choices"].write(
        [
            (asked._replace(protocol=17), (WEB, chosen, 0, begun)),
            (asked._replace(protocol=17, source_port=1), (WEB, 99, 0, begun)),
        ]
    )


def rows(maps: dict[str, Map], name: str) -> list[dict[str, Any]]:
    return dump_maps(maps, (name,)).maps[name]


def test_every_map(maps: dict[str, Map]) -> None:
    """By default all maps are dumped except counters and the programs' own marks."""
    hidden = {"scratch", "secret", "timeouts", "no_frontends", "moved_flows", "flow_gate"}
    hidden |= {"socket_places", "sockets_full", "recent_choices", "flow_stats", "sweeps"}
    hidden |= {"backend_slots", "half_open", "service_stats", "backend_stats", "reject_budgets"}
    hidden |= {"quiet_sockets", "failed_openings"}
    names = maps.keys() - hidden | {"translations"}
    assert dump_maps(maps).maps.keys() == ROWS.keys() == names
    assert list(dump_maps(maps, ("slots", "choices")).maps) == ["slots", "choices"]


def test_every_row_is_as_recorded(maps: dict[str, Map]) -> None:
    """Every row equals the recorded one, in order. `EBPFLB_RECORD=1 pytest` of this file records
    the rows.
    """
    found = dump_maps(maps, tuple(ROWS.keys() - {"translations", "devices"})).maps
    shown = json.loads(json.dumps({each: found[each] for each in sorted(found)}))
    for row in (row for rows in shown.values() for row in rows):
        row.update({word: (row[word] or 0) // LONG * LONG for word in AGES & row.keys()})
    text = "".join(
        f"{name}:\n" + "".join(sorted(f"- {json.dumps(row)}\n" for row in rows))
        for name, rows in shown.items()
        if rows
    )
    if "EBPFLB_RECORD" in os.environ:
        RECORDED.write_text(text)
    assert text == RECORDED.read_text()


def test_rows_of_netfilter_have_names(maps: dict[str, Map]) -> None:
    """Rows of netfilter's table have names; the row of a removed id has only its endpoint."""
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


@pytest.mark.parametrize(("writes", "changed"), [(8, False), (9, True)])
def test_a_dump_says_when_the_agent_was_writing(
    maps: dict[str, Map], writes: int, changed: bool
) -> None:
    settings = maps["settings"].get(0)
    maps["settings"].write([(0, settings._replace(writes=writes))])
    assert dump_maps(maps).changed_while_reading is changed
    maps["settings"].write([(0, settings)])


def test_every_word_is_described(maps: dict[str, Map]) -> None:
    """docs/output.md has the words of all rows, with their types."""
    found = [row for rows in dump_maps(maps).maps.values() for row in rows]
    assert not [*faults(found, "maps")]
