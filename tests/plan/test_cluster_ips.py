# SPDX-License-Identifier: Apache-2.0
"""The cluster IPs that the datapath knows, and the prefixes that cover them (ClusterIps)."""

from ipaddress import ip_network

from ebpflb.entries.services import NO_PREFIX, Flags, Prefix, prefix_of
from ebpflb.model.addresses import Family
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.planner import Planner
from tests.plan.builders import CAPACITY, by_name, desired, frontend, name
from tests.plan.node import PlannedNode
from tests.plan.simulation import writes

IP = frontend(1).address
SEEN = ("services", "cluster_ips")
INTERNAL = frozenset({"endpoints"})


def port(service: str, number: int, flags: Flags = INTERNAL) -> DesiredService:
    """Return a service port of 172.30.0.1."""
    return desired(service, {frontend(1)._replace(port=number): flags}, [number])


def test_known_only_while_all_its_frontends_are() -> None:
    """Clients of another proxy are not refused, neither before ebpflb serves the address nor
    after.
    """
    node = PlannedNode()
    come = node.change(by_name(port("a", 80), port("b", 81)))
    assert [part for part, _ in writes(come) if part in SEEN] == ["services"] * 2 + ["cluster_ips"]
    gone = node.change({name("a"): None, name("b"): None})
    removed = [f"removed_{part}" for part in ("cluster_ips", "services", "services")]
    assert [part for part, _ in writes(gone) if part in removed] == removed


def covered(planner: Planner, family: Family = Family.IPV4) -> Prefix:
    return planner.cluster_ips.cover(frozenset())[family]


def prefix(text: str) -> Prefix:
    return prefix_of(ip_network(text))


def test_covering_prefixes() -> None:
    """The prefix covers every cluster IP as soon as the IP is planned, and never shrinks."""
    planner = Planner(CAPACITY)
    assert [covered(planner, family) for family in Family] == [NO_PREFIX, NO_PREFIX]
    for change, expected in (
        (by_name(desired("a", [1], [1])), "172.30.0.1/32"),
        (by_name(desired("b", [2, 3], [1])), "172.30.0.0/30"),
        ({name("b"): None}, "172.30.0.0/30"),
    ):
        planner.plan_changes(change, 0)
        assert covered(planner) == prefix(expected)
    assert covered(planner, Family.IPV6) == NO_PREFIX
