# SPDX-License-Identifier: Apache-2.0
"""Doctor's canary among the service ports: it takes nothing from any Service."""

from dataclasses import replace
from ipaddress import IPv4Address, ip_address, ip_network
from random import Random

from ebpflb.entries.services import Frontend
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.model.addresses import Address
from ebpflb.plan.canary import (
    CANARY_PROTOCOLS,
    FRAME_PORT,
    FRAMES_TO,
    Canary,
    frame_ports,
    is_canary,
    service_ports,
    unused_cluster_ip,
)
from ebpflb.plan.planner import Planner

CLUSTER_IP, CLIENT, ENDPOINT, NODE = map(
    IPv4Address, ("10.96.0.99", "198.18.0.1", "198.18.0.2", "192.0.2.1")
)
CANARY = Canary(CLUSTER_IP, CLIENT, ENDPOINT, NODE, 8080, 30999)
RANGE = ip_network("10.96.0.0/29")


def test_every_frontend_is_restricted() -> None:
    """Every frontend admits the node and the client, and the NodePort the client only."""
    ports = service_ports(CANARY)
    assert len(ports) == len(CANARY_PROTOCOLS) and all(map(is_canary, ports))
    for desired in ports.values():
        assert all("restricted" in flags for flags in desired.frontends.values())
        assert set(desired.source_ranges) == {ip_network(CLIENT), ip_network(NODE)}
        assert desired.nodeport_source_ranges == (ip_network(CLIENT),)


def test_a_service_wins() -> None:
    """Whichever comes first: a Service gets its frontends, the canary those that are left."""
    name, desired = next(iter(service_ports(CANARY).items()))
    real = replace(desired, name=name._replace(namespace="default"), created="2026-01-01T00:00:00Z")
    for order in ([desired, real], [real, desired]):
        planner = Planner(CAPACITY)
        for each in order:
            planner.plan_changes({each.name: each}, 0.0)
        assert set(planner.frontends.owners.values()) == {real.name}
        planner.plan_changes({real.name: None}, 1.0)
        assert planner.frontends.owners[Frontend(CLUSTER_IP, 8080, 6)] == name


def test_unused_in_the_range() -> None:
    """Every address of the range may be drawn but those in use, and its ends."""
    taken = [IPv4Address("10.96.0.1"), IPv4Address("10.96.0.5")]
    draw = Random(1).randrange
    found = {unused_cluster_ip([RANGE], RANGE, taken, taken, draw) for _ in range(200)}
    assert {str(it) for it in found} == {f"10.96.0.{i}" for i in (2, 3, 4, 6)}


def test_none_is_left() -> None:
    """There is no address if all are in use, or if it is unknown which are in use."""
    taken: list[Address] = [*RANGE]
    assert unused_cluster_ip([RANGE], RANGE, taken, taken, lambda below: 0) is None
    assert unused_cluster_ip([RANGE], None, [], [], lambda below: 0) is None
    one = ip_network("10.96.0.1/32")
    assert unused_cluster_ip([], one, taken[1:2], taken[1:2], lambda below: 0) is None


def test_near_cluster_ips_without_a_range() -> None:
    """Never far from one, as the prefix that covers two distant ones holds addresses of others."""
    covering = ip_network("10.0.0.0/8")
    used = [ip_address("10.1.0.7"), ip_address("10.200.3.9")]
    draw = Random(1).randrange
    for _ in range(500):
        found = unused_cluster_ip([], covering, used, used, draw)
        assert found is not None and found not in used
        assert any(int(found) >> 8 == int(it) >> 8 for it in used)


def test_frames_change_no_cluster_ips() -> None:
    """The prefix that covers all cluster IPs stays: what is unused in it is refused."""
    planner = Planner(CAPACITY)
    planner.plan_changes(service_ports(CANARY), 0.0)
    covering = dict(planner.cluster_ips.prefixes.networks)
    planner.plan_changes(frame_ports(), 1.0)
    frames = {Frontend(to, FRAME_PORT, 17) for to in FRAMES_TO.values()}
    assert frames <= planner.frontends.owners.keys()
    assert planner.cluster_ips.prefixes.networks == covering
