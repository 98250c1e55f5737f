# SPDX-License-Identifier: Apache-2.0
"""The rows of the packet path's maps, from maps filled by hand."""

import time
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.entries.flows import Flow, FlowKind, Tuple
from ebpflb.entries.services import (
    NO_V4,
    NO_V6,
    Backend,
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
from ebpflb.kernel.attach.netns_cookie import by_socket
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import (
    DatagramChoice,
    Forwarded,
    FragmentKey,
    FragmentPorts,
    HalfOpen,
    RecentChoice,
    Sweep,
)
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.tools.dump import dump_maps
from tests.tools.conftest import count

WEB, BACKEND = 7, 21
CLIENT, FRONTEND, NODE, POD = map(
    ip_address, ("198.51.100.7", "203.0.113.1", "192.0.2.1", "10.244.1.11")
)
NO_DEVICE = 2**31 - 1


def mask(bits: int) -> Any:
    return ip_address(((1 << bits) - 1) << (128 - bits))


@pytest.fixture(scope="module", autouse=True)
def filled(maps: dict[str, Map]) -> None:
    """A service, and all else that an agent writes for the packet path."""
    at = Frontend(FRONTEND, 80, 6)
    flags = frozenset({"external", "endpoints"})
    service = ServiceEntry(WEB, flags, 0, 1, Range(40, 1), Range(40, 0))
    name = PortName("shop", "web", "http", Protocol.TCP, Family.IPV4)
    maps["services"].write([(at, service)])
    maps["slots"].write([(40, Backend(POD, 8080, frozenset({"cluster"}), BACKEND, WEB))])
    maps["service_names"].write([(WEB, name)])
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
def remembered(maps: dict[str, Map]) -> None:
    """A masqueraded flow whose client's port was changed, and all else that the datapath writes."""
    now = time.monotonic_ns()
    begun, request = now - 60_000_000_000, frozenset({"request"})
    dnat = Flow(begun, 0, POD, 8080, 2000, WEB, BACKEND, 0, FlowKind.DNAT, request, last_seen=now)
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
    maps["fragments"].write(
        [(FragmentKey(CLIENT, FRONTEND, 4711, 17, 1), FragmentPorts(now, 5000, 53))]
    )
    maps["forwarded"].write([(Tuple(CLIENT, FRONTEND, 9, 80, 6, 2), Forwarded(begun, 62, 1))])
    maps["sweeps"].write([(0, Sweep(10, 4, 2)), (1, Sweep(0, 1, 0))])
    count(maps["flow_stats"], 0, 16, 1, 3, 2)
    asked = Tuple(CLIENT, FRONTEND, 1000, 80, 6, 1)
    maps["half_open"].write([(7, HalfOpen(asked, asked, begun))])
    count(maps["reject_budgets"], 0, now, 42)
    count(maps["reject_budgets"], 1, now, 43)
    _remember_choices(maps, asked, begun)


def _remember_choices(maps: dict[str, Map], asked: Tuple, begun: int) -> None:
    chosen = Chosen.PREFIX | Chosen.MASQUERADE | BACKEND
    maps["udp_choices"].write(
        [
            (asked._replace(protocol=17), DatagramChoice(WEB, chosen, 0, begun)),
            (asked._replace(protocol=17, source_port=1), DatagramChoice(WEB, 99, 0, begun)),
        ]
    )
    places = ((7, WEB << 32 | chosen), (8, 0), (9, WEB << 32 | 99))
    maps["recent_choices"].write([(index, RecentChoice(5, choice)) for index, choice in places])


def rows(maps: dict[str, Map], name: str) -> list[dict[str, Any]]:
    return dump_maps(maps, (name,)).maps[name]


def column(maps: dict[str, Map], name: str, *keys: str) -> list[Any]:
    return [tuple(row[key] for key in keys) for row in rows(maps, name)]


def test_flow_names(maps: dict[str, Map]) -> None:
    """Service, endpoint, flags, age and idle time stand beside; what is gone is a number."""
    row = rows(maps, "tcp_flows")[2]
    assert (row["service"], row["endpoint"]) == ("shop/web:http/TCP", "10.244.1.11:8080")
    assert (row["flags"], row["age_seconds"] >= 60 > row["idle_seconds"]) == ("seen", True)
    pending, beside = rows(maps, "other_flows")
    assert (pending["protocol"], pending["rewritten"]) == ("UDP", "source not chosen yet")
    assert (pending["service"], pending["endpoint"]) == ("#99", "removed (#99)")
    assert (beside["service"], beside["endpoint"]) == ("", "")


def test_half_open_rows(maps: dict[str, Map]) -> None:
    """The flows that are half-open: neither places of flows that have been answered, have ended or
    have been followed by another one of the same ends, nor free places.
    """
    ((_, place),) = [it for it in maps["half_open"].items() if it[1].created]
    answered = place.request._replace(source_port=1001)
    ended = [answered._replace(source_port=1002), answered._replace(protocol=17)]
    others = [place._replace(request=it, reply=it) for it in (answered, *ended)]
    others.append(place._replace(created=place.created - 1))
    maps["half_open"].write(list(enumerate(others, 8)))
    seen = maps["tcp_flows"].get(place.request)._replace(flags=frozenset({"request", "seen"}))
    maps["tcp_flows"].write([(answered, seen)])
    ((source, destination, age),) = column(
        maps, "half_open", "source", "destination", "age_seconds"
    )
    maps["tcp_flows"].delete([answered])
    assert (source, destination) == ("198.51.100.7:1000", "203.0.113.1:80")
    assert age >= 60


def test_choices(maps: dict[str, Map]) -> None:
    """What datagrams and segments get on the engine netfilter: a backend that has gone is a number,
    and elements that were never written are left out.
    """
    assert column(maps, "udp_choices", "source", "service", "endpoint", "masquerade") == [
        ("198.51.100.7:1", "shop/web:http/TCP", "removed (#99)", False),
        ("198.51.100.7:1000", "shop/web:http/TCP", "10.244.1.11:8080", True),
    ]
    assert all(idle >= 60 for (idle,) in column(maps, "udp_choices", "idle_seconds"))
    assert column(maps, "recent_choices", "index", "service", "endpoint", "masquerade") == [
        (7, "shop/web:http/TCP", "10.244.1.11:8080", True),
        (8, "", "", False),
        (9, "shop/web:http/TCP", "removed (#99)", False),
    ]


def test_fragments(maps: dict[str, Map]) -> None:
    """The ports that the first fragment had."""
    (row,) = rows(maps, "fragments")
    assert (row.pop("idle_seconds"), row) == (
        pytest.approx(0, abs=60),
        {
            "hook": "ingress",
            "protocol": "UDP",
            "source": "198.51.100.7",
            "destination": "203.0.113.1",
            "id": 4711,
            "source_port": 5000,
            "destination_port": 53,
        },
    )


def test_devices(maps: dict[str, Map]) -> None:
    """A device has its name, as whom it masquerades, and whether pods are behind it.

    In another network namespace than the node's a name would be another device's.
    """
    here = by_socket()
    maps["settings"].write([(0, Settings(here or 0, 0, frozenset()))])
    assert [tuple(row.values()) for row in rows(maps, "devices")] == [
        ("lo", 1, "192.0.2.1", "2001:db8::1", ""),
        ("removed", NO_DEVICE, "", "", "pods"),
    ]
    if here is not None:
        maps["settings"].write([(0, Settings(here + 1, 0, frozenset()))])
        assert column(maps, "devices", "device") == [("1",), (str(NO_DEVICE),)]


def test_settings(maps: dict[str, Map]) -> None:
    """Flags in words, prefixes as CIDRs, and nothing where nothing is meant."""
    pods = Prefix(ip_address("10.244.0.0"), mask(96 + 16))
    span = Prefix(ip_address("fd00:96::"), mask(108))
    flags = frozenset({"guard_nodeports", "detect_local"})
    settings = Settings(5, 8, flags, 61000, 65535, pods_v4=pods, span_v6=span, node_v4=NODE)
    maps["settings"].write([(0, settings)])
    assert rows(maps, "settings") == [
        {
            "host_netns": 5,
            "writes": 8,
            "flags": "detect_local guard_nodeports",
            "first_port": 61000,
            "last_port": 65535,
            "mark": 0,
            "mark_mask": 0,
            "pods_v4": "10.244.0.0/16",
            "pods_v6": "",
            "span_v4": "",
            "span_v6": "fd00:96::/108",
            "node_v4": "192.0.2.1",
            "node_v6": "",
            "frontend_moves": 0,
            "stream_after": 0,
            "udp_timeout": 30,
            "udp_stream_timeout": 120,
            "last_service": 0,
            "last_backend": 0,
        }
    ]


def test_numbers(maps: dict[str, Map]) -> None:
    """What packets and sweeps did, by the map to which they did it."""
    assert rows(maps, "flow_stats") == [
        {"map": "tcp_flows", "created": 16, "deleted": 1, "refused": 3, "displaced": 2},
        {"map": "other_flows", "created": 0, "deleted": 0, "refused": 0, "displaced": 0},
    ]
    assert rows(maps, "sweeps") == [
        {"map": "tcp_flows", "swept": 10, "entries": 4, "evicted": 2, "capacity": 327680},
        {"map": "other_flows", "swept": 0, "entries": 1, "evicted": 0, "capacity": 196608},
    ]
    assert rows(maps, "reject_budgets") == [
        {"replies": "refusals", "left": 42},
        {"replies": "answers to pings", "left": 43},
    ]
