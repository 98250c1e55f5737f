# SPDX-License-Identifier: Apache-2.0
"""The content that a service port and its selection need in the datapath (desired.py)."""

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ebpflb.entries.services import WHOLE, Flags, Frontend
from ebpflb.kernel.maps import records
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.api_servers import ApiPlaces, api_places
from ebpflb.model.endpoint_slices import EndpointName, Hints
from ebpflb.model.endpoints import Endpoint, Selection
from ebpflb.model.services import KUBERNETES, PortName, Protocol, ServicePort
from ebpflb.plan.desired import DesiredService
from tests.load import scaled
from tests.plan.builders import BLOCK_ORDER, desired_service

NOBODY = Selection((), (), (), has_any=False)
SOMEBODY = replace(NOBODY, has_any=True)
WEB = ServicePort(
    name=PortName("shop", "web", "http", Protocol.TCP, Family.IPV4),
    created="2025-01-01T00:00:00Z",
    cluster_ip=ip_address("172.30.0.41"),
    port=80,
    node_port=0,
    external_ips=(),
    load_balancer_ips=(),
    source_ranges=(),
    nodeport_source_ranges=(),
    affinity_seconds=0,
    internal_local=False,
    external_local=False,
    health_check_node_port=0,
)
RANGES = (ip_network("192.0.2.0/24"), ip_network("192.0.3.0/25"))
BALANCED = replace(
    WEB,
    node_port=30080,
    external_ips=(ip_address("198.51.100.7"),),
    load_balancer_ips=(ip_address("203.0.113.9"),),
)


def at(address: str, port: int = 80) -> Frontend:
    return Frontend(ip_address(address), port, 6)


def flags(text: str) -> Flags:
    return frozenset(text.split())


def endpoint(number: int, *, here: bool = False) -> Endpoint:
    return Endpoint(
        address=ip_address(f"10.1.0.{number}"),
        port=8080,
        ready=True,
        serving=True,
        terminating=False,
        local=here,
        name=EndpointName("node-a", f"pod-{number}"),
        hints=Hints(frozenset(), frozenset()),
    )


def numbers(found: DesiredService) -> list[int]:
    return [int(backend.address) & 0xFF for backend in found.backends]


@pytest.mark.parametrize(
    ("policies", "internal", "external"),
    [
        ({}, "", "external"),
        ({"internal_local": True}, "local", "external"),
        ({"external_local": True}, "", "external local"),
        ({"internal_local": True, "external_local": True}, "local", "external local"),
    ],
)
def test_policies_are_flags_of_their_frontends(
    policies: dict[str, Any], internal: str, external: str
) -> None:
    """Each policy is a flag of exactly the frontends to which it applies."""
    found = desired_service(replace(BALANCED, **policies), NOBODY).frontends
    assert found.pop(at("172.30.0.41")) == flags(internal)
    assert found.pop(at("203.0.113.9")) == flags(external + " load_balancer")
    assert found.pop(at("0.0.0.0", 30080)) == flags(external + " nodeport")
    assert set(found.values()) == {flags(external)}


def test_whole_addresses() -> None:
    """Each whole address has the flags of the frontend at the same address, and no flag of a
    NodePort.
    """
    whole = (WEB.cluster_ip, *BALANCED.external_ips, *BALANCED.load_balancer_ips)
    usual = desired_service(replace(BALANCED, external_local=True), SOMEBODY).frontends
    port = replace(BALANCED, external_local=True, whole_addresses=whole)
    found = desired_service(port, SOMEBODY).frontends
    added = {Frontend(address, 0, WHOLE): usual[Frontend(address, 80, 6)] for address in whole}
    assert found == usual | added


def test_restricted_nodeports() -> None:
    """Source ranges of NodePorts restrict the NodePort and no other frontend."""
    port = replace(BALANCED, node_port=30080)
    found = desired_service(replace(port, nodeport_source_ranges=RANGES), NOBODY)
    expected = desired_service(port, NOBODY).frontends
    nodeport = Frontend(ip_address("0.0.0.0"), 30080, 6)
    assert found.frontends.pop(nodeport) == flags("external nodeport restricted")
    assert found.frontends.items() < expected.items()
    assert (found.source_ranges, found.nodeport_source_ranges) == ((), RANGES)
    without = replace(port, node_port=0, nodeport_source_ranges=RANGES)
    assert desired_service(without, NOBODY).nodeport_source_ranges == ()


def test_restricted_vips() -> None:
    """Source ranges restrict the VIPs and no other frontend (kube-proxy.md 7)."""
    found = desired_service(replace(BALANCED, source_ranges=RANGES), NOBODY)
    expected = desired_service(BALANCED, NOBODY).frontends
    assert found.frontends.pop(at("203.0.113.9")) == flags("external load_balancer restricted")
    assert found.frontends.items() < expected.items()
    assert found.source_ranges == RANGES


@pytest.mark.parametrize(
    ("primary", "further"),
    [
        ({}, ()),
        ({Family.IPV4: ip_address("192.0.2.7")}, (ip_network("203.0.113.9/32"),)),
        ({Family.IPV4: ip_address("198.51.100.7")}, ()),
        ({Family.IPV6: ip_address("2001:db8::7")}, ()),
    ],
)
def test_vip_of_a_node_that_is_let_in(
    primary: dict[Family, Address], further: tuple[Network, ...]
) -> None:
    """If the ranges admit the node, the service's own VIP is admitted too (kube-proxy.md 7)."""
    found = desired_service(replace(BALANCED, source_ranges=RANGES), NOBODY, primary)
    assert found.source_ranges == (*RANGES, *further)


def test_cluster_ip_wins_over_an_equal_external_ip() -> None:
    """The cluster IP follows the internal policy, even if it is listed as an external IP too."""
    port = replace(WEB, external_ips=(WEB.cluster_ip,), external_local=True)
    assert desired_service(port, SOMEBODY).frontends == {at("172.30.0.41"): flags("endpoints")}


_lists = some.dictionaries(some.integers(1, 9), some.sets(some.sampled_from("clsh")))


@given(_lists)
@settings(max_examples=scaled(100), deadline=None)
def test_each_list_is_one_run(lists: dict[int, set[str]]) -> None:
    """The cluster list comes first, the local list is contiguous, and no backend is missing."""
    known = {number: endpoint(number, here="h" in lists[number]) for number in lists}
    cluster, local, serving = (
        tuple(known[number] for number in lists if of in lists[number]) for of in "cls"
    )
    found = desired_service(WEB, Selection(cluster, local, serving, has_any=True))
    order = [BLOCK_ORDER.index(backend.flags - {"here"}) for backend in found.backends]
    assert order == sorted(order)
    used = {number for number in lists if lists[number] & set("cls")}
    assert sorted(numbers(found)) == sorted(used)
    for of, word in (("c", "cluster"), ("l", "local"), ("h", "here")):
        listed = {int(b.address) & 0xFF for b in found.backends if word in b.flags}
        assert listed == {number for number in used if of in lists[number]}


@pytest.mark.parametrize(
    ("pod", "stored"),
    [
        ("p" * 64, "p" * 64),
        ("p" * 65, "p" * 61 + "…"),
        ("p" * 253, "p" * 61 + "…"),
        ("\u00e4" * 40, "\u00e4" * 30 + "…"),
        ("a\0b", "a"),
    ],
)
def test_a_name_is_as_the_map_holds_it(pod: str, stored: str) -> None:
    """A longer name is cut; otherwise the audit would find a difference."""
    one = msgspec.structs.replace(endpoint(1), name=EndpointName("node", pod, "z" * 70))
    (backend,) = desired_service(WEB, replace(SOMEBODY, cluster=(one,))).backends
    record = records.record("struct backend_name")
    assert record.unpack(record.pack(backend.name)) == backend.name
    assert backend.name.target == stored


API = ip_address("192.0.2.1"), 80
SERVERS = frozenset({API})


def ending_at(*endpoints: tuple[Address, int]) -> Selection:
    found = tuple(
        msgspec.structs.replace(endpoint(1), address=address, port=port)
        for address, port in endpoints
    )
    return Selection((), found, (), has_any=bool(found))


def place(frontend: Frontend) -> ApiPlaces:
    """Return API servers' places that include the frontend's address and port; for a NodePort, at
    this node's address.
    """
    if frontend.address.is_unspecified:
        address = ip_address("192.0.2.9")
        return api_places(frozenset({(address, frontend.port)}), SERVERS, frozenset({address}))
    return api_places(frozenset({frontend[:2]}), SERVERS, frozenset())


@pytest.mark.parametrize(
    "frontend", [at("198.51.100.7"), at("203.0.113.9"), at("0.0.0.0", 30080)], ids=str
)
@pytest.mark.parametrize("endpoints", [[], [(ip_address("10.1.0.1"), 8080)], [API, (API[0], 81)]])
def test_no_service_takes_a_place_of_the_api_servers(
    frontend: Frontend, endpoints: list[tuple[Address, int]]
) -> None:
    """A Service loses only this external address or NodePort, unless it leads to API servers."""
    usual = desired_service(BALANCED, ending_at(*endpoints)).frontends
    found = desired_service(BALANCED, ending_at(*endpoints), api=place(frontend))
    assert found.withheld == {frontend: usual.pop(frontend)}
    assert found.frontends == usual
    leads_there = desired_service(BALANCED, ending_at(API), api=place(frontend))
    own = replace(BALANCED, name=WEB.name._replace(namespace="default", service=KUBERNETES.name))
    itself = desired_service(own, ending_at(*endpoints), api=place(frontend))
    for free in (leads_there, itself):
        assert frontend in free.frontends and not free.withheld


def test_what_the_api_servers_leave_to_services() -> None:
    """Services may have other ports and protocols, NodePorts elsewhere, and any cluster IP."""
    balanced = replace(BALANCED, external_ips=(API[0], BALANCED.cluster_ip), port=443)
    elsewhere = frozenset({API, (API[0], 30080), (BALANCED.cluster_ip, 443)})
    found = desired_service(balanced, SOMEBODY, api=api_places(elsewhere, SERVERS, frozenset()))
    assert not found.withheld
    udp = replace(BALANCED, name=WEB.name._replace(protocol=Protocol.UDP))
    assert not desired_service(udp, SOMEBODY, api=place(at("203.0.113.9"))).withheld


def test_each_kind_of_frontend() -> None:
    """All frontends except the cluster IP are external, and VIPs and NodePorts are marked."""
    assert desired_service(BALANCED, NOBODY).frontends == {
        at("172.30.0.41"): flags(""),
        at("0.0.0.0", 30080): flags("external nodeport"),
        at("198.51.100.7"): flags("external"),
        at("203.0.113.9"): flags("external load_balancer"),
    }
